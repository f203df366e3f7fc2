"""Scales as tables: which tensors are near the edge of a number format, all of a sample, two runs beside one another.

Everything takes rows, as :meth:`dtype_hooks.scales.record.Scales.rows` gives them and
:func:`dtype_hooks.report.scales_file.read_rows` reads them. Columns that are absent or null are shown as ``n/a``.
"""

from __future__ import annotations

import math
import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from dtype_hooks.core.number_formats import NUMBER_FORMATS
from dtype_hooks.report.scales_file import Row, formats_of, iteration, iterations
from dtype_hooks.report.tables import MAX_ROWS, MIN_WIDTH, render_table

NEGLIGIBLE = 0.0005
"""A smaller share of values that round to zero is shown as ``<0.1%`` and ranks as none: rounding itself costs more."""

NEAR_BITS = 4.0
"""A tensor with no value lost and at least this many bits to both edges is not near one."""

MIN_NAME = 36
"""Columns are left out before names are folded into less."""

LEGEND = (
    "over, under, subn.: share of the values that overflow, round to zero, land in subnormals in the format. "
    "to max: bits from the largest magnitude up to the format's largest number; to min: bits from the rms down to its "
    "smallest normal one. Order: overflow, values lost to zero, then the fewest bits to either edge."
)


@dataclass(frozen=True)
class Column:
    """A column of a table that fits itself into a width.

    Attributes:
        heading: As :func:`render_table` takes it: ``#`` before it for numbers.
        cell: Makes a row's cell.
        spare: 0 for a column that is always shown; of the others the highest is left out first.
    """

    heading: str
    cell: Callable[[Row], str]
    spare: int = 0


def edge_report(
    rows: Sequence[Row], formats: Sequence[str] | None = None, top: int = 20, width: int | None = None
) -> str:
    """The tables of a sample: what is not finite, then for each format the tensors closest to its edges.

    Args:
        rows: Of one sample; or of several, of which each tensor is shown at its worst, with the iteration.
        formats: Names of formats that the rows tell of; all of them by default.
        top: How many tensors each table shows at most.
        width: In characters; the terminal's by default, 80 where there is none.
    """
    parts = [nonfinite_table(rows, top, width)] if any(map(_nonfinite, rows)) else []
    parts += [
        edge_table(rows, name, top, width) for name in (formats_of(rows) if formats is None else formats)
    ]
    if any("| tensor" in part for part in parts):
        parts.append(_filled(LEGEND + _scale_note(rows), width))
    return "\n\n".join(parts) or "no tensors recorded, or no number format asked for"


def edge_table(rows: Sequence[Row], number_format: str, top: int = 20, width: int | None = None) -> str:
    """The ``top`` tensors closest to an edge of one format; one line where no tensor is near one.

    See :func:`edge_rank` for the order. :data:`LEGEND` explains the columns. Tensors without a finite nonzero
    value are left out: zero has no edge; and those of one element: a loss and its gradient, which carry the loss scale and
    are float32 in every recipe, would fill the top.
    """
    measured = (row for row in rows if row.get("amax") and row.get("numel", 0) > 1)
    ranked = _first_of_each(sorted(measured, key=lambda row: edge_rank(row, number_format)))
    if not ranked:
        return f"{number_format}: no tensor of several elements with a nonzero value{at_iteration(rows)}"
    if not is_near(ranked[0], number_format):
        least = ranked[0]
        return _filled(
            f"{number_format}: none of {len(ranked):,} tensors near an edge{at_iteration(rows)}; the closest is {least['name']} "
            f"({least['direction']}), {_bits(to_max(least, number_format))} bits below the largest number, "
            f"{_bits(to_min(least, number_format))} above the smallest normal one",
            width,
        )
    title = f"{number_format}: {_of(top, ranked)} closest to its edges{at_iteration(rows)}"
    return _fitted_table(title, _with_iter(rows, _edge_columns(number_format)), ranked[:top], width)


def edge_rank(row: Row, number_format: str) -> tuple[float, ...]:
    """The place of a tensor among those of a sample, for one format: the lower, the closer to an edge.

    1. Tensors that overflow, the largest share of values first: a single Inf spoils a step.
    2. Tensors of which at least :data:`NEGLIGIBLE` of the nonzero values round to zero, the largest share first; where
       that is equal (all of them, say), those farthest below.
    3. The others by the bits that are left to the nearer edge: from amax up to the largest number, or from the rms
       down to the smallest normal one, below which precision goes.

    NaN and Inf have a table of their own, since they are no matter of the format: masks of ``-inf`` would fill the top.
    """
    overflow = row.get(f"{number_format}_overflow") or 0.0
    underflow = row.get(f"{number_format}_underflow") or 0.0
    up, down = (_last_if_none(edge(row, number_format)) for edge in (to_max, to_min))
    if underflow >= NEGLIGIBLE:
        return (-overflow, -underflow, down)
    return (-overflow, 0.0, min(up, down))


def is_near(row: Row, number_format: str) -> bool:
    """Whether values are lost, or fewer than :data:`NEAR_BITS` are left to an edge."""
    overflow, underflow, bits = edge_rank(row, number_format)
    return overflow < 0 or underflow < 0 or bits < NEAR_BITS


def to_max(row: Row, number_format: str) -> float | None:
    """Bits from the largest magnitude up to the format's largest number; negative beyond it, None where unknown."""
    known = NUMBER_FORMATS.get(number_format)
    return _log2_ratio(magnitude(row, "amax"), known.max) if known else None


def to_min(row: Row, number_format: str) -> float | None:
    """Bits from the rms down to the format's smallest normal number; negative below it, None where unknown."""
    known = NUMBER_FORMATS.get(number_format)
    return _log2_ratio(known.smallest_normal, magnitude(row, "rms")) if known else None


def magnitude(row: Row, column: str) -> float | None:
    """A statistic of the tensor as it existed: a gradient's times ``grad_scale``, of which the columns are free."""
    value = row.get(column)
    return None if value is None else value * (row.get("grad_scale") or 1.0)


def nonfinite_table(rows: Sequence[Row], top: int = 20, width: int | None = None) -> str:
    """The tensors that hold NaN, then those that hold Inf only; among them first what came to be first.

    That is parameters, then results in order of execution, then gradients against it: the first NaN is the culprit,
    or right after it. Inf alone is often meant, as in an attention mask. Of several samples each tensor is shown at the
    first where it has them.
    """
    by_time = sorted(
        filter(_nonfinite, rows), key=lambda row: (not row["nans"], iteration(row), made_at(row))
    )
    found = _first_of_each(by_time)
    columns = [
        Column("tensor", lambda row: row["name"]),
        Column("pass", _pass),
        Column("#NaN", lambda row: f"{row['nans']:,}"),
        Column("#Inf", lambda row: f"{row['infs']:,}"),
        Column("#of", lambda row: f"{row['numel']:,}"),
        Column("#finite amax", lambda row: short(row.get("amax")), spare=1),
        Column("dtype", lambda row: row["dtype"], spare=2),
    ]
    title = f"NaN or Inf: {_of(top, found)}, the first to have them first{at_iteration(rows)}"
    return _fitted_table(title, _with_iter(rows, columns), found[:top], width)


def made_at(row: Row) -> tuple[int, int]:
    """Sorts tensors by when they came to be: the backward runs against the order of execution."""
    backward = row["direction"] == "backward"
    return backward, -row["order"] if backward and row["kind"] != "kernel" else row["order"]


def scales_table(rows: Sequence[Row], max_rows: int = MAX_ROWS, width: int | None = None) -> str:
    """All tensors of one sample in order of execution, forward and backward beside one another."""
    pairs = _pairs(rows)
    columns = [
        Column("tensor", lambda pair: pair["name"]),
        Column("dtype", lambda pair: pair["dtype"], spare=1),
        *(
            Column(f"#{column} {arrow}", _of_direction(direction, column))
            for direction, arrow in (("forward", "->"), ("backward", "<-"))
            for column in ("std", "amax")
        ),
    ]
    title = f"scales: {len(pairs):,} tensors in order of execution{at_iteration(rows)}"
    caption = "-> of the tensor, <- of its gradient" + (", free of its scale" if _grad_scales(rows) else "")
    return _fitted_table(title, columns, pairs, width, caption, max_rows)


def operations_table(rows: Sequence[Row], width: int | None = None) -> str:
    """How often each function, or kernel, gave a result in each dtype in one sample, in the order of first use."""
    made = [row for row in rows if row["direction"] == "forward" and row["kind"] != "parameter"]
    counts = Counter((row["op"], row["dtype"]) for row in made)
    dtypes = list(dict.fromkeys(dtype for _, dtype in counts))
    ops = dict.fromkeys(op for op, _ in counts)
    title = f"functions by the dtype of their results: {len(made):,} tensors{at_iteration(rows)}"
    cells = [(op, *(counts[op, dtype] or "" for dtype in dtypes)) for op in ops]
    return render_table(title, ["function", *(f"#{dtype}" for dtype in dtypes)], cells, len(cells), width)


def comparison_table(
    first: Sequence[Row],
    second: Sequence[Row],
    number_format: str | None = None,
    top: int = 20,
    width: int | None = None,
) -> str:
    """Two samples beside one another, of two runs or two times: tensors that differ most first.

    A tensor is matched by name and direction. The order is that of how many bits its std has moved, then of what has
    changed in the shares of values that overflow or round to zero in ``number_format``; what became zero, or ceased
    to be, comes first of all.

    Args:
        first: The sample called A.
        second: The sample called B.
        number_format: A format that the rows tell of; by default the first that both do.
        top: How many tensors are shown at most.
        width: In characters; the terminal's by default, 80 where there is none.
    """
    if number_format is None:
        both = set(formats_of(second))
        number_format = next((name for name in formats_of(first) if name in both), None)
    a, b = _by_key(first), _by_key(second)
    pairs = [{**b[key], "A": a[key], "B": b[key]} for key in a if key in b]
    pairs.sort(key=lambda pair: _change_rank(pair, number_format))
    title = f"B against A: {_of(top, pairs)} of both, the most changed first"
    parts = [_fitted_table(title, _comparison_columns(number_format), pairs[:top], width)]
    if number_format:
        parts.append(_filled(f"over, under: percentage points more of the values in {number_format}", width))
    for label, these, others in (("A", a, b), ("B", b, a)):
        only = [row for key, row in these.items() if key not in others]
        if only:
            parts.append(_only_line(label, only, width))
    return "\n".join(parts)


def short(value: float | None) -> str:
    """Three significant digits, in as few characters as they need: ``1.23e-5``; ``n/a`` for None."""
    return "n/a" if value is None else re.sub(r"e([+-])0*(\d)", r"e\1\2", f"{value:.3g}").replace("e+", "e")


def percent(fraction: float | None) -> str:
    """A share of values, never rounded to none or all: ``0``, ``<0.1%``, ``3.2%``, ``>99.9%``, ``100%``."""
    if fraction is None:
        return "n/a"
    if fraction in (0, 1):
        return "100%" if fraction else "0"
    if fraction < NEGLIGIBLE:
        return "<0.1%"
    return ">99.9%" if fraction >= 1 - NEGLIGIBLE else f"{fraction:.1%}"


def _edge_columns(number_format: str) -> list[Column]:
    def share(which: str) -> Callable[[Row], str]:
        return lambda row: percent(row.get(f"{number_format}_{which}"))

    return [
        Column("tensor", lambda row: row["name"]),
        Column("pass", _pass),
        Column("#over", share("overflow")),
        Column("#under", share("underflow")),
        Column("#subn.", share("subnormal"), spare=1),
        Column("#to max", lambda row: _bits(to_max(row, number_format))),
        Column("#to min", lambda row: _bits(to_min(row, number_format))),
        Column("#amax", lambda row: short(magnitude(row, "amax")), spare=2),
        Column("#rms", lambda row: short(magnitude(row, "rms")), spare=3),
        Column("dtype", lambda row: row["dtype"], spare=4),
    ]


def _comparison_columns(number_format: str | None) -> list[Column]:
    def change(which: str) -> Callable[[Row], str]:
        return lambda pair: _points(_difference(pair, f"{number_format}_{which}"))

    columns = [
        Column("tensor", lambda pair: pair["name"]),
        Column("pass", _pass),
        Column("#std A", lambda pair: short(pair["A"].get("std"))),
        Column("#std B", lambda pair: short(pair["B"].get("std"))),
        Column("#log2 B/A", lambda pair: _bits(std_change(pair["A"], pair["B"]), sign="+")),
    ]
    if number_format:
        columns += [
            Column("#over", change("overflow"), spare=2),
            Column("#under", change("underflow"), spare=1),
        ]
    return columns


def std_change(a: Row, b: Row) -> float | None:
    """``log2(std of b / std of a)``: infinite where one is zero, 0 where both are, None where one is unknown.

    Of single elements, which have no std, it is the rms.
    """
    column = "rms" if a.get("numel") == b.get("numel") == 1 else "std"
    old, new = a.get(column), b.get(column)
    if old is None or new is None:
        return None
    if old == 0 or new == 0:
        return 0.0 if old == new else math.copysign(math.inf, new - old)
    return math.log2(new) - math.log2(old)


def _change_rank(pair: Row, number_format: str | None) -> tuple[float, ...]:
    change = std_change(pair["A"], pair["B"])
    if change is None:
        lost = (pair["A"].get("std") is None) != (pair["B"].get("std") is None)
        change = math.inf if lost else 0.0
    shares = (_difference(pair, f"{number_format}_{which}") or 0.0 for which in ("overflow", "underflow"))
    return (-abs(change), *(-abs(share) for share in shares), pair["order"])


def _difference(pair: Row, column: str) -> float | None:
    old, new = pair["A"].get(column), pair["B"].get(column)
    return None if old is None or new is None else new - old


def _only_line(label: str, rows: Sequence[Row], width: int | None, shown: int = 5) -> str:
    passes: dict[str, list[str]] = {}
    for row in rows:
        passes.setdefault(row["name"], []).append(_pass(row))
    names = [f"{name} ({', '.join(each)})" for name, each in passes.items()]
    more = f", and {len(names) - shown:,} more" if len(names) > shown else ""
    return _filled(f"only in {label}, {_counted(len(names))}: {', '.join(names[:shown])}{more}", width)


def _by_key(rows: Iterable[Row]) -> dict[tuple[str, str], Row]:
    return {(row["name"], row["direction"]): row for row in rows}


def _pairs(rows: Iterable[Row]) -> list[Row]:
    """One dict a tensor, in order of execution, with its rows under their direction."""
    pairs: dict[str, Row] = {}
    for row in sorted(rows, key=lambda row: row["order"]):
        pair = pairs.setdefault(row["name"], {"name": row["name"], "dtype": row["dtype"]})
        pair[row["direction"]] = row
    return list(pairs.values())


def _of_direction(direction: str, column: str) -> Callable[[Row], str]:
    return lambda pair: short(pair[direction].get(column)) if direction in pair else ""


def _nonfinite(row: Row) -> bool:
    return bool(row.get("nans") or row.get("infs"))


def _pass(row: Row) -> str:
    return "bwd" if row["direction"] == "backward" else "fwd"


def _bits(value: float | None, sign: str = "") -> str:
    return "n/a" if value is None else f"{value:{sign}.1f}"


def _points(difference: float | None) -> str:
    """A difference of shares, in percentage points."""
    return "n/a" if difference is None else f"{100 * difference:+.1f}" if difference else "0"


def _log2_ratio(small: float | None, large: float | None) -> float | None:
    """``log2(large / small)``, None unless both are positive; a ratio of its own could overflow."""
    return math.log2(large) - math.log2(small) if small and large else None


def _last_if_none(bits: float | None) -> float:
    return math.inf if bits is None else bits


def _counted(count: int) -> str:
    return f"{count:,} tensor{'s' * (count != 1)}"


def _of(top: int, rows: Sequence[Row]) -> str:
    """``20 of 433 tensors``, or ``5 tensors`` where that is all."""
    return f"{top:,} of {_counted(len(rows))}" if len(rows) > top else _counted(len(rows))


def at_iteration(rows: Iterable[Row]) -> str:
    """``, iteration 300``; ``, iterations 100 to 2,500`` of several samples; nothing for a single recording."""
    numbers = iterations(rows)
    if not numbers or not numbers[-1]:
        return ""
    return (
        f", iterations {numbers[0]:,} to {numbers[-1]:,}"
        if len(numbers) > 1
        else f", iteration {numbers[0]:,}"
    )


def _first_of_each(rows: Sequence[Row]) -> list[Row]:
    """The first row of each tensor and direction."""
    first: dict[tuple[str, str], Row] = {}
    for row in rows:
        first.setdefault((row["name"], row["direction"]), row)
    return list(first.values())


def _with_iter(rows: Sequence[Row], columns: list[Column]) -> list[Column]:
    """The columns, with one of the iteration where there are several."""
    if len(iterations(rows)) < 2:
        return columns
    return [*columns[:2], Column("#iter", lambda row: f"{iteration(row):,}"), *columns[2:]]


def _grad_scales(rows: Iterable[Row]) -> list[float]:
    return sorted({row["grad_scale"] for row in rows if row.get("grad_scale") not in (None, 1)})


def _scale_note(rows: Iterable[Row]) -> str:
    scales = _grad_scales(rows)
    return (
        f" Gradients are taken as they existed, times {' or '.join(f'{scale:g}' for scale in scales)}."
        if scales
        else ""
    )


def _width(width: int | None) -> int:
    return max(width or shutil.get_terminal_size((80, 24)).columns, MIN_WIDTH)


def _filled(text: str, width: int | None) -> str:
    return textwrap.fill(text, _width(width), subsequent_indent="  ", break_on_hyphens=False)


def _fitted_table(
    title: str,
    columns: Sequence[Column],
    rows: Sequence[Row],
    width: int | None,
    caption: str | None = None,
    max_rows: int | None = None,
) -> str:
    """A table whose first column, of names, is folded after a dot or colon, and whose spare columns give way to it."""
    shown = rows[:max_rows]
    cells = {column.heading: [column.cell(row) for row in shown] for column in columns}
    kept = _that_fit(cells, {column.heading: column.spare for column in columns}, _width(width))
    names, *others = (cells[heading] for heading in kept)
    if _needed(kept, cells) > _width(width):
        room = _width(width) - _needed([h for h in kept[1:] if not _is_constant(cells[h])], cells) - 3
        names = [fold_name(name, max(room, 8)) for name in names]
    table = [list(row) for row in zip(names, *others, strict=True)]
    if len(rows) > len(shown):
        more = f"... and {len(rows) - len(shown):,} more of {len(rows):,}"
        caption = f"{more}\n{caption}" if caption else more
    return render_table(title, kept, table, max(len(table), 1), _width(width), caption)


def _that_fit(cells: dict[str, list[str]], spare: dict[str, int], width: int) -> list[str]:
    """Leave spare columns out while the names would not have :data:`MIN_NAME` beside what varies."""
    kept = list(cells)
    name = min(max(map(len, cells[kept[0]]), default=0), MIN_NAME)
    while _needed([h for h in kept[1:] if not _is_constant(cells[h])], cells) + name + 3 > width:
        first = max(kept, key=lambda heading: spare[heading])
        if not spare[first]:
            break
        kept.remove(first)
    return kept


def _needed(headings: Sequence[str], cells: dict[str, list[str]]) -> int:
    """Characters that columns take up, unfolded."""
    return 1 + sum(3 + max(map(len, [heading.lstrip("#"), *cells[heading]])) for heading in headings)


def _is_constant(cells: Sequence[str]) -> bool:
    """Whether the column is one that :func:`render_table` writes above a table that is too wide."""
    return len(cells) > 1 and len(set(cells)) == 1


def fold_name(name: str, width: int) -> str:
    """Break a dotted name into lines, after a dot or before a colon where one is near enough."""
    lines = []
    while len(name) > width:
        cut = max(name.rfind(".", 0, width) + 1, name.rfind(":", 1, width + 1))
        cut = cut if cut > width // 3 else width
        lines.append(name[:cut])
        name = name[cut:]
    return "\n".join([*lines, name])
