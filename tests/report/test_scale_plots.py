"""Pictures of scales: what is drawn is what the rows say, and the names can be read."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from itertools import pairwise

import numpy as np
import pytest
from matplotlib.colors import to_hex
from scale_rows import recorded_rows, scale_row

from dtype_hooks.core.number_formats import DEFAULT_FORMATS, NUMBER_FORMATS
from dtype_hooks.report.scale_axes import choose_labels, execution_order, shorten, time_cells
from dtype_hooks.report.scale_plots import (
    VERMILLION,
    history_figure,
    layers_figure,
    save_plots,
    save_png,
    to_rgb,
)

NAN = math.nan


@pytest.fixture(scope="module")
def recorded():
    """The rows of a real step, of 13 activations."""
    return recorded_rows(2, iteration=300)


def points(axes, label: str) -> list[tuple[int, float]]:
    """What is drawn under a label of the legend."""
    lines = [line for line in axes.get_lines() if line.get_label() == label]
    return [(int(x), float(y)) for line in lines for x, y in zip(*line.get_data(), strict=True)]


def bands(axes) -> dict[str, list[tuple[float, float]]]:
    """The bands behind the data, as (bottom, top) by what the legend calls them."""
    found: dict[str, list[tuple[float, float]]] = {}
    for patch in axes.patches:
        box = patch.get_bbox()
        found.setdefault(patch.get_label(), []).append((box.y0, box.y1))
    return found


def texts(axis) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def test_std_and_amax_of_each_row_are_drawn_where_its_tensor_stands(recorded):
    figure = layers_figure(recorded)
    names = execution_order(row for row in recorded if row["kind"] == "activation")

    for axes, direction in ((figure.axes[0], "forward"), (figure.axes[2], "backward")):
        rows = [row for row in recorded if (row["kind"], row["direction"]) == ("activation", direction)]
        for column in ("std", "amax"):
            expected = {(names.index(row["name"]), row[column]) for row in rows if row[column]}
            assert set(points(axes, column)) == expected
            assert len(expected) > 8
    assert texts(figure.axes[2].xaxis) == [shorten(name) for name in names]


def test_the_axis_is_log2_with_units_titles_and_all_data_inside(recorded):
    figure = layers_figure(recorded)

    for axes, title in ((figure.axes[0], "forward"), (figure.axes[2], "backward (gradients)")):
        assert axes.get_title(loc="left") == title
        assert "log2" in axes.get_ylabel()
        assert (axes.get_yscale(), axes.yaxis.get_transform().base) == ("log", 2)
        assert {math.log2(tick) % 1 for tick in axes.get_yticks()} == {0}
        low, high = axes.get_ylim()
        assert all(low < y < high for column in ("std", "amax") for _, y in points(axes, column))
    assert "iteration 300" in figure.get_suptitle()
    assert figure.axes[2].get_xlabel() == "13 tensors in order of execution"


def test_the_first_formats_ranges_lie_behind_the_data_at_their_edges(recorded):
    axes = layers_figure(recorded).axes[0]
    low, high = axes.get_ylim()

    assert bands(axes) == {
        "lost in float16": [(low, 2.0**-25), (65504.0, high)],
        "subnormal in float16": [(2.0**-25, 2.0**-14)],
    }


def test_bands_that_are_far_off_are_not_drawn_across_the_data(recorded):
    figure = layers_figure(recorded, ["bfloat16", "float16"])

    assert bands(figure.axes[0]) == {}
    low, high = figure.axes[0].get_ylim()
    assert 2.0**-60 < low < high < 2.0**60


@pytest.mark.parametrize("values", [[1e30, 1e29], [1e-30, 1e-29]])
def test_data_beyond_every_edge_of_a_format_lie_in_what_is_lost(values):
    axes = layers_figure([scale_row("m:add", values)], ["float8_e4m3fn"]).axes[0]

    assert bands(axes) == {"lost in float8_e4m3fn": [axes.get_ylim()]}
    assert all(low < y < high for _, y in points(axes, "amax") for low, high in [axes.get_ylim()])


def test_each_format_stands_beside_the_panels_with_its_ranges_and_its_name(recorded):
    figure = layers_figure(recorded)

    for rail in (figure.axes[1], figure.axes[3]):
        drawn: dict[str, list[tuple[float, float]]] = {}
        for bars in rail.containers:
            box = bars[0].get_bbox()
            drawn.setdefault(bars.get_label(), []).append((box.y0, box.y1))
        normal = [(each.smallest_normal, each.max) for each in DEFAULT_FORMATS]
        subnormal = [(each.smallest_subnormal, each.smallest_normal) for each in DEFAULT_FORMATS]
        assert np.allclose(drawn["a format's normal range"], normal, rtol=1e-6, atol=0)
        assert np.allclose(drawn["its subnormals"], subnormal, rtol=1e-6, atol=0)
        assert rail.get_ylim() == figure.axes[figure.axes.index(rail) - 1].get_ylim()
    assert texts(figure.axes[3].xaxis) == [each.name for each in DEFAULT_FORMATS]


def test_gradients_are_drawn_as_they_existed():
    row = scale_row("m:add", [1.0, -1.0], direction="backward", grad_scale=1024.0)
    axes = layers_figure([row]).axes[2]

    assert points(axes, "amax") == [(0, 1024.0)]
    assert points(axes, "std") == [(0, 1024.0 * row["std"])]
    assert axes.get_title(loc="left") == "backward (gradients times their scale, 1024)"


def test_what_a_log_axis_cannot_show_has_marks_at_the_edge():
    rows = [
        scale_row("m:ordinary", order=0),
        scale_row("m:zeros", [0.0, 0.0], order=1),
        scale_row("m:one_element", [3.0], order=2),
        scale_row("m:all_nan", [NAN, NAN], order=3),
        scale_row("m:a_nan", [NAN, 1.0, 2.0], order=4),
        scale_row("m:empty", [], order=5),
    ]
    axes = layers_figure(rows).axes[0]

    assert [x for x, _ in points(axes, "std is 0")] == [1, 2]
    assert [x for x, _ in points(axes, "holds NaN or Inf")] == [3, 4]
    assert [x for x, _ in points(axes, "std")] == [0, 4]
    assert [x for x, _ in points(axes, "amax")] == [0, 2, 4]


def test_of_several_samples_the_last_is_drawn():
    rows = [scale_row("m:add", [float(number)] * 2, iter=number) for number in (1, 2, 3)]

    assert points(layers_figure(rows).axes[0], "amax") == [(0, 3.0)]


def labels_fit(figure, axis) -> bool:
    """Whether no two neighbouring names touch, as rendered."""
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in axis.get_ticklabels() if label.get_text()]
    across = (lambda box: (box.x0, box.x1)) if axis.axis_name == "x" else (lambda box: (box.y0, box.y1))
    spans = sorted(map(across, boxes))
    return all(end <= start for (_, end), (start, _) in pairwise(spans))


@pytest.mark.parametrize(
    ("count", "least", "what"),
    [(5, 5, ":linear"), (50, 50, ":linear"), (200, 60, ".out_proj"), (3400, 60, "model.layers.")],
)
def test_names_do_not_touch_however_many_layers_there_are(count, least, what):
    rows = [scale_row("model.layers.0.self_attn.out_proj:linear", order=0)]
    rows = [
        rows[0] | {"name": f"model.layers.{i // 17}.self_attn.out_proj{i % 17}:linear", "order": i}
        for i in range(count)
    ]

    for figure, axis in (
        ((layers := layers_figure(rows)), layers.axes[2].xaxis),
        ((history := history_figure(rows)), history.axes[0].yaxis),
    ):
        assert labels_fit(figure, axis)
        shown = texts(axis)
        assert least <= len(shown) <= count
        assert all(what in text for text in shown)
        assert ("named" in axis.get_label_text()) == (len(shown) < count)


def test_all_names_are_chosen_where_there_is_room():
    names = ["a:x", "a:y", "b.c:z"]
    assert choose_labels(names, 3) == [(0, "a:x"), (1, "a:y"), (2, "b.c:z")]
    assert choose_labels([], 10) == []


def test_where_there_is_no_room_the_outer_modules_are_named_first():
    names = [f"model.layers.{i}.mlp:{op}" for i in range(40) for op in ("linear", "gelu", "add")]

    chosen = choose_labels(names, 40)
    assert chosen == [(3 * i, f"model.layers.{i}") for i in range(40)]
    half = choose_labels(names, 20)
    assert half == [(6 * i, f"model.layers.{2 * i}") for i in range(20)]


def test_room_that_modules_leave_is_given_to_their_tensors():
    names = [f"one:op{i}" for i in range(100)]

    assert choose_labels(names, 50) == [(i, f"one:op{i}") for i in range(0, 100, 2)]


def test_long_names_keep_their_numbers_and_their_end():
    deep = "module.model.layers.11.self_attn.q_proj:linear"
    assert shorten("head:linear") == "head:linear"
    assert shorten(deep) == "m.m.layers.11.self_attn.q_proj:linear"
    assert shorten(deep, 36) == "m.m.l.11.self_attn.q_proj:linear"
    long = shorten("m.11." + "x" * 60 + ":linear")
    assert len(long) == 40
    assert long.startswith("m.11.")
    assert long.endswith("x:linear")


def cells(axes) -> np.ma.MaskedArray:
    """The values of a heat map, tensors downwards."""
    return axes.collections[0].get_array()


def history(numbers=(100, 200, 300), **rows_by_name) -> list[dict]:
    return [
        scale_row(f"m:{name}", values(number) if callable(values) else values, order=order, iter=number)
        for number in numbers
        for order, (name, values) in enumerate(rows_by_name.items())
    ]


def test_a_heat_map_shows_log2_of_the_std_and_the_share_that_is_lost():
    rows = history(grows=lambda number: [number, -number], lost=[1e-9, 1.0, 1.0, 1.0])
    figure = history_figure(rows, number_format="float16")

    stds = [[row["std"] for row in rows if row["name"] == name] for name in ("m:grows", "m:lost")]
    assert np.allclose(cells(figure.axes[0]), np.log2(stds))
    shares = cells(figure.axes[1])
    assert np.allclose(shares[1], 0.25)
    assert (shares[0] < 0).all()  # none: drawn white, below the colours
    assert texts(figure.axes[0].yaxis) == ["m:grows", "m:lost"]
    assert figure.axes[0].get_ylim() == (1.5, -0.5)  # the first on top
    assert figure.axes[0].get_xlabel() == "iteration"
    assert "float16" in figure.axes[1].get_title(loc="left")


def test_a_heat_map_of_amax_and_of_gradients_free_of_their_scale():
    rows = [{**row, "direction": "backward", "grad_scale": 512.0} for row in history(a=[4.0, -2.0])]

    assert np.allclose(cells(history_figure(rows, "backward", column="amax").axes[0]), 2.0)


def test_zero_missing_and_nan_are_told_apart():
    rows = history(fine=[1.0, -1.0], zero=[0.0, 0.0], bad=[NAN, NAN], part=[NAN, 1.0, 2.0])
    rows = [row for row in rows if (row["name"], row["iter"]) != ("m:fine", 200)]
    axes = history_figure(rows).axes[0]

    values, alarm = (np.ma.filled(mesh.get_array(), np.nan) for mesh in axes.collections[:2])
    low = axes.collections[0].norm.vmin
    assert np.isnan(values[0]).tolist() == [False, True, False]
    assert (values[1] < low).all()
    assert to_hex(axes.collections[0].cmap(axes.collections[0].norm(values[1, 0]))) == "#ffffff"
    assert np.isnan(values[2]).all()
    assert np.isnan(alarm[:2]).all()
    assert (alarm[2:] == 1).all()
    assert to_hex(axes.collections[1].to_rgba(1.0)) == VERMILLION.lower()


def test_one_sample_and_a_recording_without_iterations_are_one_column():
    for rows, number in ((history(numbers=[700], a=[1.0, -1.0]), 700), (recorded_rows(1), 0)):
        figure = history_figure(rows)
        assert cells(figure.axes[0]).shape[1] == 1
        assert list(figure.axes[0].get_xticks()) == [number]
        to_rgb(figure)


def test_a_run_of_thousands_of_samples_is_thinned():
    row = scale_row("m:add")
    rows = [{**row, "iter": number} for number in range(1, 5001)]

    assert cells(history_figure(rows).axes[0]).shape == (1, 1000)


@pytest.mark.parametrize(
    ("samples", "edges", "slots"),
    [
        ([10], [9.5, 10.5], [10]),
        ([], [0, 1], [None]),
        ([10, 20, 30], [5, 15, 25, 35], [10, 20, 30]),
        ([10, 20, 50, 60], [5, 15, 25, 45, 55, 65], [10, 20, None, 50, 60]),
        ([10, 20, 30, 130, 230], [5, 15, 25, 80, 180, 280], [10, 20, 30, 130, 230]),
        ([10, 20, 30, 100], [5, 15, 25, 35, 95, 105], [10, 20, 30, None, 100]),
        ([10, 500], [-235, 255, 745], [10, 500]),
    ],
)
def test_missing_samples_leave_a_gap_but_another_interval_does_not(samples, edges, slots):
    assert time_cells(samples) == (edges, slots)


def test_tensors_that_are_not_in_every_sample_stand_where_they_ran():
    def sample(number, names):
        return [scale_row(f"m:{name}", order=order, iter=number) for order, name in enumerate(names)]

    rows = [*sample(1, "acd"), *sample(2, "abcd"), *sample(3, "xacde"), *sample(4, "c")]

    assert execution_order(rows) == [f"m:{name}" for name in "xabcde"]
    axes = history_figure(rows).axes[0]
    assert (~np.ma.getmaskarray(cells(axes))).astype(int).tolist() == [
        [0, 0, 1, 0],
        [1, 1, 1, 0],
        [0, 1, 0, 0],
        [1, 1, 1, 1],
        [1, 1, 1, 0],
        [0, 0, 1, 0],
    ]


def test_pictures_of_nothing_are_drawn():
    for figure in (
        layers_figure([]),
        history_figure([]),
        layers_figure([scale_row("m:a", direction="backward")]),
    ):
        assert to_rgb(figure).std() > 0


def test_an_array_for_a_visualizer_and_a_png_are_the_same_picture(tmp_path):
    figure = layers_figure([scale_row("m:add")])
    image = to_rgb(figure)

    height, width = (round(inches * figure.dpi) for inches in figure.get_size_inches()[::-1])
    assert (image.dtype, image.ndim, image.flags.c_contiguous) == (np.uint8, 3, True)
    assert image.shape == pytest.approx((height, width, 3), abs=1)
    assert len(np.unique(image.reshape(-1, 3), axis=0)) > 10
    save_png(figure, tmp_path / "layers.png")
    from PIL import Image

    assert np.array_equal(np.asarray(Image.open(tmp_path / "layers.png").convert("RGB")), image)


def test_all_pictures_of_a_run_are_written(tmp_path):
    rows = [row for number in (100, 200) for row in recorded_rows(1, iteration=number)]
    written = save_plots(rows, tmp_path / "new" / "pictures", ["float16"])

    assert sorted(path.name for path in written) == [
        "history_activation_backward.png",
        "history_activation_forward.png",
        "history_parameter_backward.png",
        "history_parameter_forward.png",
        "layers_activation.png",
        "layers_parameter.png",
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_a_single_recording_has_no_history(tmp_path):
    written = save_plots([scale_row("m:add"), scale_row("m:add", direction="backward")], tmp_path)

    assert [path.name for path in written] == ["layers_activation.png"]


def test_pictures_are_made_in_threads_at_the_same_time():
    rows = history(a=[1.0, -1.0], b=[0.5, 0.25])
    alone = to_rgb(history_figure(rows))
    images: list[np.ndarray] = []
    threads = [threading.Thread(target=lambda: images.append(to_rgb(history_figure(rows)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(images) == 3
    assert all(np.array_equal(image, alone) for image in images)


SCRIPT = """
import sys
sys.modules["mmengine"] = None
import dtype_hooks.report.scale_plots as plots
assert "matplotlib" not in sys.modules, "imported too early"
sys.modules["matplotlib"] = None
try:
    plots.layers_figure([])
except ImportError as error:
    print(type(error).__name__, error)
del sys.modules["matplotlib"]
plots.to_rgb(plots.history_figure([]))
print("pyplot" if "matplotlib.pyplot" in sys.modules else "objects alone")
"""


def test_matplotlib_is_imported_when_drawing_and_pyplot_never():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)

    said, drawn = done.stdout.splitlines()
    assert said.startswith("MissingDependencyError pictures of scales: got no usable matplotlib")
    assert "Run: pip install matplotlib" in said
    assert drawn == "objects alone"


def test_every_format_can_be_drawn():
    assert layers_figure([scale_row("m:add")], list(NUMBER_FORMATS)) is not None
    to_rgb(layers_figure([scale_row("m:add", [1e-300, 1e300])], ["float32"]))
