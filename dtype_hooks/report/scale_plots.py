"""The scales of a model as pictures: each layer at one time, and all layers over training time.

Figures are made through matplotlib's objects alone: no pyplot, no display, no global state, in any thread. matplotlib
is imported when the first one is drawn. Colours are those of Okabe and Ito and of viridis and cividis, which readers with
any kind of colour vision can tell apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dtype_hooks.core.number_formats import NUMBER_FORMATS, NumberFormat
from dtype_hooks.errors import MissingDependencyError
from dtype_hooks.report.scale_axes import choose_labels, execution_order, shorten, thinned, time_cells
from dtype_hooks.report.scales import at_iteration, magnitude
from dtype_hooks.report.scales_file import (
    DIRECTIONS,
    KINDS,
    Row,
    formats_of,
    iteration,
    iterations,
    last_sample,
    select_rows,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

DPI = 110
FONT = 9
SMALL = 7
"""Font sizes in points: of titles and axes, and of the names of tensors."""

BLUE, VERMILLION, BLACK = "#0072B2", "#D55E00", "#000000"
LOST, SUBNORMAL, NORMAL = "0.80", "0.91", "#BFD9E8"
"""Where a format loses values, where it holds them as subnormals, and its normal range."""

MARGIN_BITS = 24
"""A picture shows a format's edge if it is at most so far from the data."""

MAX_SAMPLES = 1000
"""A heat map of more samples shows every second, third, ... of them: it has no more pixels."""


def layers_figure(
    rows: Sequence[Row],
    formats: Sequence[str] | None = None,
    kind: str = "activation",
    title: str | None = None,
) -> Figure:
    """Draw std and amax of each tensor in order of execution, forward above and backward below, on a log2 axis.

    The ranges of the formats stand at the right as bands, normal and, hatched, subnormal; those of the first one lie
    behind the data as well: grey is where it loses values, light grey where it holds them as subnormals. Gradients are
    drawn as they existed, times their scale, as the bands are about those. A std of 0 has a mark at the lower edge,
    NaN or Inf one at the upper.

    Args:
        rows: Of one sample; of several the last is drawn.
        formats: Names of number formats, by default those that the rows tell of. The first lies behind the data.
        kind: Which tensors: ``"activation"``, ``"parameter"`` or ``"kernel"``.
        title: Above the picture.
    """
    rows = select_rows(last_sample(rows), kind=kind)
    names = execution_order(rows)
    bands = [NUMBER_FORMATS[name] for name in formats_or_all(rows, formats) if name in NUMBER_FORMATS]
    width = min(max(5 + 0.13 * len(names), 8.0), 16.0)
    figure = _new_figure(width, 8.5)
    ratios = [width - 0.8, 0.26 * max(len(bands), 1)]
    axes = figure.subplots(2, 2, sharex="col", sharey="row", width_ratios=ratios, squeeze=False)
    for (panel, rail), direction in zip(axes, ("forward", "backward"), strict=True):
        _draw_panel(panel, select_rows(rows, direction=direction), names, bands[:1])
        _draw_rail(rail, bands)
        panel.set_title(_panel_title(rows, direction), loc="left", fontsize=FONT)
        panel.set_ylabel("magnitude (log2 scale)", fontsize=FONT)
    _name_tensors(axes[1, 0].xaxis, names, width * 0.8, rotation=90)
    for panel in axes[:, 0]:
        panel.grid(axis="x", color="0.9", linewidth=0.5)
    axes[1, 0].set_xlim(-0.7, max(len(names), 1) - 0.3)
    _add_legend(figure, axes.flat)
    figure.suptitle(title or f"Scales of {kind}s{at_iteration(rows)}", fontsize=FONT + 2)
    return figure


def history_figure(
    rows: Sequence[Row],
    direction: str = "forward",
    number_format: str | None = None,
    column: str = "std",
    kind: str = "activation",
    title: str | None = None,
) -> Figure:
    """Draw heat maps over training time: iterations from left to right, tensors in order of execution downwards.

    The left one shows log2 of ``column``, gradients free of their scale; the right one the share of values that round to zero
    in a format, of the gradients as they existed. Where nothing was recorded the map is grey, where it is zero
    white, and where there were NaN vermillion.

    Args:
        rows: Of any number of samples, at any distance; a tensor need not be in all of them.
        direction: ``"forward"`` or ``"backward"``.
        number_format: Name of the format, by default the first that the rows tell of. Without any the right map is left out.
        column: ``"std"``, ``"rms"``, ``"amax"`` or ``"amin"``.
        kind: Which tensors: ``"activation"``, ``"parameter"`` or ``"kernel"``.
        title: Above the picture.
    """
    rows = select_rows(rows, direction=direction, kind=kind)
    names = execution_order(rows)
    number_format = number_format or next(iter(formats_of(rows)), None)
    height = min(max(2.5 + 0.14 * len(names), 4.5), 14.0)
    figure = _new_figure(13.0 if number_format else 8.0, height)
    panels = figure.subplots(1, 2 if number_format else 1, sharey=True, squeeze=False)[0]
    what = "gradient" if direction == "backward" else "tensor"
    _draw_map(panels[0], rows, names, column, f"log2 of {column} of the {what}")
    if number_format:
        share = f"{number_format}_underflow"
        _draw_map(
            panels[1], rows, names, share, f"share of nonzero values that round to zero in {number_format}"
        )
    _name_tensors(panels[0].yaxis, names, height * 0.8, rotation=0)
    panels[0].set_ylim(max(len(names), 1) - 0.5, -0.5)
    _explain_colours(figure)
    figure.suptitle(title or f"Scales of {kind}s over training, {direction}", fontsize=FONT + 2)
    return figure


def save_plots(
    rows: Sequence[Row], folder: str | Path, formats: Sequence[str] | None = None, at: int | None = None
) -> list[Path]:
    """Write all pictures of a run into ``folder``, which is made if need be.

    For each kind of tensors that there is: ``layers_activation.png``; and of more than one sample
    ``history_activation_forward.png`` and ``history_activation_backward.png``.

    Args:
        rows: Of all samples.
        folder: Where they go; pictures of these names that are there are replaced.
        formats: As in :func:`layers_figure`; the heat maps show the first.
        at: The iteration of the pictures of layers, the last by default.

    Returns:
        The paths written.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, figure in _figures(rows, formats_or_all(rows, formats), at):
        written.append(folder / f"{name}.png")
        save_png(figure, written[-1])
    return written


def _figures(rows: Sequence[Row], formats: Sequence[str], at: int | None) -> Iterator[tuple[str, Figure]]:
    sample = last_sample(rows) if at is None else [row for row in rows if iteration(row) == at]
    for kind in KINDS:
        if any(row["kind"] == kind for row in sample):
            yield f"layers_{kind}", layers_figure(sample, formats, kind)
    if len(iterations(rows)) < 2:
        return
    for kind, direction in product(KINDS, DIRECTIONS):
        if any(row["kind"] == kind and row["direction"] == direction for row in rows):
            shown = formats[0] if formats else None
            yield f"history_{kind}_{direction}", history_figure(rows, direction, shown, kind=kind)


def save_png(figure: Figure, path: str | Path, dpi: int = DPI) -> None:
    """Write a figure as a PNG file."""
    figure.savefig(path, dpi=dpi, format="png")


def to_rgb(figure: Figure) -> np.ndarray:
    """Render a figure: uint8, height x width x 3, as mmengine's ``Visualizer.add_image`` takes it."""
    canvas: Any = figure.canvas
    canvas.draw()
    return np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[..., :3])


def formats_or_all(rows: Sequence[Row], formats: Sequence[str] | None) -> list[str]:
    """``formats``, by default all that the rows tell of."""
    return formats_of(rows) if formats is None else list(formats)


def _new_figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            f"pictures of scales: got no usable matplotlib ({error}); expected matplotlib >= 3.8. "
            "Run: pip install matplotlib; or make none."
        ) from error
    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


# Each layer at one time


def _draw_panel(
    axes: Axes, rows: Sequence[Row], names: Sequence[str], behind: Sequence[NumberFormat]
) -> None:
    place = {name: at for at, name in enumerate(names)}
    size = min(max(700 / max(len(names), 1), 1.2), 6.0)
    drawn = [value for column in ("std", "amax") for _, value in _points(rows, place, column)]
    low, high = _limits(drawn, behind)
    axes.set_yscale("log", base=2)
    axes.set_ylim(low, high)
    _set_powers_of_two(axes)
    for each in behind:
        _draw_bands(axes, each)
    spans = [(place[row["name"]], magnitude(row, "std"), magnitude(row, "amax")) for row in rows]
    at, bottom, top = _transposed([span for span in spans if span[1] and span[2]], 3)
    axes.vlines(at, bottom, top, color="0.5", linewidth=min(size / 5, 0.6), zorder=2)
    _scatter(axes, _points(rows, place, "amax"), "amax", VERMILLION, "^", size)
    _scatter(axes, _points(rows, place, "std"), "std", BLUE, "o", size)
    zero = [place[row["name"]] for row in rows if row.get("std") == 0]
    nonfinite = [place[row["name"]] for row in rows if row.get("nans") or row.get("infs")]
    _mark_edge(axes, zero, 0.025, "std is 0", {"marker": "o", "markerfacecolor": "white", "color": BLUE})
    _mark_edge(axes, nonfinite, 0.965, "holds NaN or Inf", {"marker": "x", "color": BLACK})
    axes.grid(axis="y", color="0.85", linewidth=0.5)
    axes.set_axisbelow(True)
    if not rows:
        axes.text(0.5, 0.5, "none recorded", transform=axes.transAxes, ha="center", fontsize=FONT)


def _scatter(
    axes: Axes, points: Sequence[tuple[int, float]], label: str, colour: str, marker: str, size: float
) -> None:
    axes.plot(
        *_transposed(points, 2), linestyle="", marker=marker, markersize=size, color=colour, label=label
    )


def _mark_edge(axes: Axes, places: Sequence[int], height: float, label: str, style: dict[str, Any]) -> None:
    if places:
        across = axes.get_xaxis_transform()
        axes.plot(
            places, [height] * len(places), linestyle="", markersize=4, label=label, transform=across, **style
        )


def _points(rows: Iterable[Row], place: dict[str, int], column: str) -> list[tuple[int, float]]:
    values = ((place[row["name"]], magnitude(row, column)) for row in rows)
    return [(at, value) for at, value in values if value]


def _limits(values: Sequence[float], behind: Sequence[NumberFormat]) -> tuple[float, float]:
    """The y axis: the data, and the edges of the format behind it that are not far off."""
    bits = [math.log2(value) for value in values] or [0.0]
    low, high = min(bits), max(bits)
    for each in behind:
        for edge in (math.log2(each.zero_at), math.log2(each.max)):
            if low - MARGIN_BITS <= edge <= high + MARGIN_BITS:
                low, high = min(low, edge), max(high, edge)
    # float64 ends at 2^-1074 and 2^1024
    return 2.0 ** max(math.floor(low) - 2, -1074), 2.0 ** min(math.ceil(high) + 2, 1023)


def _set_powers_of_two(axes: Axes, most: int = 12) -> None:
    low, high = (math.log2(limit) for limit in axes.get_ylim())
    step = next(step for step in (1, 2, 4, 8, 16, 32, 64, 128, 256) if (high - low) / step <= most)
    exponents = range(math.ceil(low / step) * step, math.floor(high) + 1, step)
    axes.set_yticks(
        [2.0**exponent for exponent in exponents], [f"$2^{{{exponent}}}$" for exponent in exponents]
    )
    axes.yaxis.minorticks_off()
    axes.tick_params(axis="y", labelsize=FONT - 1)


def _draw_bands(axes: Axes, number_format: NumberFormat) -> None:
    low, high = axes.get_ylim()
    known = number_format
    bands = (
        (0.0, known.zero_at, LOST, f"lost in {known.name}"),
        (known.zero_at, known.smallest_normal, SUBNORMAL, f"subnormal in {known.name}"),
        (known.max, math.inf, LOST, f"lost in {known.name}"),
    )
    for bottom, top, colour, what in bands:
        if bottom < high and top > low:
            axes.axhspan(max(bottom, low), min(top, high), color=colour, linewidth=0, zorder=0, label=what)


def _draw_rail(axes: Axes, formats: Sequence[NumberFormat]) -> None:
    """The ranges of the formats as bands beside a panel, on its y axis."""
    limits = axes.get_ylim()
    for at, each in enumerate(formats):
        _draw_range(
            axes, at, each.smallest_normal, each.max, facecolor=NORMAL, label="a format's normal range"
        )
        subnormal = {"facecolor": "white", "hatch": "////", "label": "its subnormals"}
        _draw_range(axes, at, each.smallest_subnormal, each.smallest_normal, **subnormal)
    axes.set_ylim(limits)
    axes.set_xlim(-0.6, max(len(formats), 1) - 0.4)
    axes.set_xticks(range(len(formats)), [each.name for each in formats], rotation=90, fontsize=SMALL)
    axes.tick_params(length=0, labelleft=False)
    axes.spines[:].set_visible(False)


def _draw_range(axes: Axes, at: int, bottom: float, top: float, **style: Any) -> None:
    # one bar a call: of several at once matplotlib adds and subtracts the first one's bottom, and loses small heights
    axes.bar(at, top - bottom, bottom=bottom, width=0.8, edgecolor="0.35", linewidth=0.6, **style)


def _panel_title(rows: Sequence[Row], direction: str) -> str:
    if direction == "forward":
        return "forward"
    scales = sorted({row["grad_scale"] for row in rows if row.get("grad_scale") not in (None, 1)})
    return "backward (gradients" + (
        f" times their scale, {' or '.join(f'{s:g}' for s in scales)})" if scales else ")"
    )


def _add_legend(figure: Figure, panels: Iterable[Axes]) -> None:
    found: dict[str, Any] = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    columns = 4 if figure.get_figwidth() < 12 else len(found)
    figure.legend(
        found.values(),
        found.keys(),
        loc="outside lower center",
        ncols=columns,
        fontsize=FONT - 1,
        frameon=False,
    )


# All layers over training time


def _draw_map(axes: Axes, rows: Sequence[Row], names: Sequence[str], column: str, label: str) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import ListedColormap, Normalize, PowerNorm

    is_share = column.endswith("_underflow")
    samples = thinned(iterations(rows), MAX_SAMPLES)
    edges, slots = time_cells(samples)
    values = _grid(rows, names, slots, lambda row: row.get(column))
    nans = _grid(rows, names, slots, lambda row: 1.0 if row.get("nans") else None)
    colours = colormaps["cividis_r" if is_share else "viridis"].with_extremes(under="white")
    low, high = (0.0, 1.0) if is_share else _range_of_log2(values)
    # the root of a share, so that one in a hundred is seen beside all of them
    norm = PowerNorm(0.5, low, high) if is_share else Normalize(low, high)
    shown = values if is_share else np.log2(np.where(values > 0, values, np.nan))
    shown = np.ma.masked_invalid(np.where(values == 0, low - 1, shown))
    axes.set_facecolor(LOST)
    rows_at = np.arange(len(values) + 1) - 0.5
    mesh = axes.pcolormesh(edges, rows_at, shown, cmap=colours, norm=norm)
    # with edges, so that a row thinner than a pixel is seen
    red, alarm = ListedColormap([VERMILLION]), np.ma.masked_invalid(nans)
    axes.pcolormesh(edges, rows_at, alarm, cmap=red, edgecolors="face", linewidth=0.7)
    bar = axes.figure.colorbar(mesh, ax=axes, extend="min", extendfrac=0.02, pad=0.01, aspect=40)
    bar.ax.tick_params(labelsize=FONT - 1)
    if is_share:
        bar.set_ticks([0, 0.01, 0.1, 0.25, 0.5, 1], labels=["0", "1%", "10%", "25%", "50%", "100%"])
    axes.set_title(label, loc="left", fontsize=FONT)
    _name_iterations(axes, samples)


def _grid(
    rows: Iterable[Row],
    names: Sequence[str],
    slots: Sequence[int | None],
    value: Callable[[Row], float | None],
) -> np.ndarray:
    """Values by tensor and cell, NaN where there is none."""
    down, across = ({key: at for at, key in enumerate(keys)} for keys in (names, slots))
    grid = np.full((max(len(names), 1), len(slots)), np.nan)
    for row in rows:
        found = value(row)
        if found is not None and iteration(row) in across:
            grid[down[row["name"]], across[iteration(row)]] = found
    return grid


def _range_of_log2(values: np.ndarray) -> tuple[float, float]:
    positive = values[values > 0]
    if not positive.size:
        return 0.0, 1.0
    low, high = float(np.log2(positive.min())), float(np.log2(positive.max()))
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _name_iterations(axes: Axes, samples: Sequence[int]) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel("iteration", fontsize=FONT)
    axes.tick_params(axis="x", labelsize=FONT - 1)
    if len(samples) <= 5:
        axes.set_xticks(samples)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def _explain_colours(figure: Figure) -> None:
    from matplotlib.patches import Patch

    patches = [
        Patch(facecolor="white", edgecolor="0.5", label="zero"),
        Patch(facecolor=LOST, edgecolor="0.5", label="not recorded, or no value that counts"),
        Patch(facecolor=VERMILLION, edgecolor="0.5", label="holds NaN"),
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, fontsize=FONT - 1, frameon=False)


# Both


def _name_tensors(axis: Axis, names: Sequence[str], inches: float, rotation: int) -> None:
    """Name as many tensors as fit on ``inches`` of the axis, and say so where it is not all."""
    labels = choose_labels(names, int(inches * 72 / (SMALL * 1.3)))
    axis.set_ticks([at for at, _ in labels], [shorten(text) for _, text in labels])
    axis.set_tick_params(labelsize=SMALL, rotation=rotation, length=2)
    some = "" if len(labels) == len(names) else f", {len(labels)} of them named"
    axis.set_label_text(f"{len(names):,} tensors in order of execution{some}", fontsize=FONT)


def _transposed(points: Sequence[Sequence[Any]], columns: int) -> list[Sequence[Any]]:
    return list(zip(*points, strict=True)) or [()] * columns
