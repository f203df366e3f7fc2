"""Which node runs in which dtype, as a line and as a table."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from dtype_hooks.core.dtypes import dtype_name
from dtype_hooks.core.naming import class_name
from dtype_hooks.core.nodes import Node, tensors_of
from dtype_hooks.report.tables import MAX_ROWS, render_table

COLUMNS = ("node", "class", "autocast", "from", "#parameters", "#buffers")


def nodes_line(nodes: Sequence[Node], device_type: str, phases: Sequence[str]) -> str:
    """``AutocastHook: 3 nodes on cpu in train, val, test: (model) bfloat16, head float16, neck off``."""
    shown = ", ".join(f"{node.name} {_dtype(node)}" for node in nodes[:6])
    more = f" and {len(nodes) - 6} more" if len(nodes) > 6 else ""
    return f"AutocastHook: {len(nodes)} node{'s' * (len(nodes) != 1)} on {device_type} in {', '.join(phases)}: {shown}{more}"


def nodes_table(nodes: Sequence[Node], max_rows: int = MAX_ROWS, width: int | None = None) -> str:
    """One row for each node; parameters and buffers are those of its subtree without nested nodes."""
    rows = [_row(node, list(nodes)) for node in nodes]
    return render_table("AutocastHook: what each node autocasts in", COLUMNS, rows, max_rows, width)


def _row(node: Node, nodes: list[Node]) -> tuple[str, ...]:
    tensors = list(tensors_of(node, nodes))
    parameters = [t for t in tensors if isinstance(t, nn.Parameter)]
    buffers = len(tensors) - len(parameters)
    count = f"{sum(p.numel() for p in parameters):,}"
    return (node.name, class_name(node.module), _dtype(node), node.source, count, f"{buffers}")


def _dtype(node: Node) -> str:
    return "off" if node.dtype is None else dtype_name(node.dtype)
