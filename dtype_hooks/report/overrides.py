"""What DtypeOverrider did, as a line and as a table."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from dtype_hooks.core.dtypes import dtype_name
from dtype_hooks.core.naming import class_name
from dtype_hooks.core.override import OverrideHandle, OverrideRecord
from dtype_hooks.report.tables import MAX_ROWS, render_table

COLUMNS = ("module", "class", "method", "caught by", "computes in", "stored in", "#parameters")


def summary_line(handle: OverrideHandle) -> str:
    """``DtypeOverrider: 25 of 61 modules compute in float32 (patterns=['norm'])``, and what is stored in it."""
    rule = handle.rule
    stored = f", {_count_stored(handle)} stored in it" if handle.stored else ""
    return (
        f"{rule.name}: {len(handle.modules)} of {handle.total} modules compute in {dtype_name(rule.dtype)}{stored} "
        f"({rule.selection})"
    )


def override_table(handle: OverrideHandle, max_rows: int = MAX_ROWS, width: int | None = None) -> str:
    """One row for each overridden method, in the order of the model."""
    title = f"{handle.rule.name}: methods that compute in {dtype_name(handle.rule.dtype)}"
    rows = [_row(handle, record) for record in handle.records]
    return render_table(title, COLUMNS, rows, max_rows, width)


def stored_table(handle: OverrideHandle, max_rows: int = MAX_ROWS, width: int | None = None) -> str:
    """One row for each parameter and buffer that is stored in the dtype, with every name that a tied one has."""
    title = f"{handle.rule.name}: tensors stored in {dtype_name(handle.rule.dtype)}"
    rows = [
        (
            " = ".join(stored.names),
            "parameter" if stored.is_parameter else "buffer",
            "x".join(map(str, stored.tensor.shape)) or "scalar",
            dtype_name(stored.original),
            dtype_name(stored.tensor.dtype),
        )
        for stored in handle.stored
    ]
    return render_table(title, ("name", "kind", "#shape", "was", "stored in"), rows, max_rows, width)


def never_called_line(records: Sequence[OverrideRecord], name: str, max_names: int = 8) -> str:
    """The one warning about matched methods that nothing has called."""
    names = [f"{record.names[0]}.{record.method}" for record in records]
    more = f" and {len(names) - max_names} more" if len(names) > max_names else ""
    return (
        f"{name}: never called in the first iteration, so nothing was overridden there: {', '.join(names[:max_names])}{more}. "
        "A parent may read the weights itself (nn.MultiheadAttention does with out_proj) or call another method: "
        "name the parent, or the method in methods_to_override."
    )


def _count_stored(handle: OverrideHandle) -> str:
    parameters = sum(stored.is_parameter for stored in handle.stored)
    buffers = len(handle.stored) - parameters
    return f"{parameters} parameters" + (f" and {buffers} buffers" if buffers else "")


def _row(handle: OverrideHandle, record: OverrideRecord) -> tuple[str, ...]:
    parameters = list(record.module.parameters(recurse=True))
    return (
        " = ".join(record.names),
        class_name(record.module),
        record.method,
        ", ".join(record.caught_by),
        dtype_name(record.override.dtype or handle.rule.dtype),
        stored_dtypes(record.module),
        f"{sum(p.numel() for p in parameters):,}",
    )


def stored_dtypes(module: nn.Module) -> str:
    """The floating dtypes of all parameters in the module, or ``-`` where there are none."""
    names = {dtype_name(p.dtype) for p in module.parameters() if p.is_floating_point()}
    return ", ".join(sorted(names)) or "-"
