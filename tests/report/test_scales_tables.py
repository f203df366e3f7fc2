"""Scales as tables: which tensors come first, and that they can be read at 80 columns."""

from __future__ import annotations

import math

import pytest
import torch
from scale_rows import recorded_rows, scale_row
from torch import nn

from dtype_hooks.report.scales import (
    comparison_table,
    edge_report,
    edge_table,
    fold_name,
    nonfinite_table,
    operations_table,
    percent,
    scales_table,
    short,
    std_change,
    to_max,
    to_min,
)
from dtype_hooks.scales.recorder import track_scales

NAN, INF = math.nan, math.inf


def names(table: str) -> list[str]:
    """The first cell of each row; a folded one is put together again."""
    found: list[str] = []
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if not cells or cells[0] in ("tensor", ""):
            continue
        if any(cells[1:]):
            found.append(cells[0])
        else:
            found[-1] += cells[0]
    return found


def column(table: str, heading: str) -> list[str]:
    """The cells of a column, of rows that are not folded."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if "|" in line]
    at = lines[0].index(heading)
    return [line[at] for line in lines[1:]]


def test_overflow_comes_first_then_values_lost_to_zero_then_the_fewest_bits_to_an_edge():
    """float16: largest 65504, rounds to zero from 2^-25 down, smallest normal number 2^-14."""
    rows = [
        scale_row("m:middle", [1.0, -1.0]),
        scale_row("m:near_max", [60000.0, 1.0]),
        scale_row("m:tenth_overflows", [1e5] + 9 * [1.0]),
        scale_row("m:half_lost", [1e-9, 1.0]),
        scale_row("m:near_min", [2**-13, -(2**-13)]),
        scale_row("m:half_overflows", [1e5, 1.0]),
        scale_row("m:all_lost", [1e-9, 1e-10]),
        scale_row("m:subnormal", [2**-15, -(2**-15)]),
    ]

    assert names(edge_table(rows, "float16", width=100)) == [
        "m:half_overflows",
        "m:tenth_overflows",
        "m:all_lost",
        "m:half_lost",
        "m:subnormal",
        "m:near_max",
        "m:near_min",
        "m:middle",
    ]


def test_of_tensors_that_are_lost_as_a_whole_the_farthest_below_comes_first():
    rows = [scale_row("m:near", [1e-8, 1e-8]), scale_row("m:far", [1e-12, 1e-12])]

    assert names(edge_table(rows, "float16", width=100)) == ["m:far", "m:near"]


def test_a_negligible_share_of_lost_values_does_not_outrank_a_tensor_that_will_overflow():
    rows = [scale_row("m:one_in_4000", [1e-9] + 3999 * [1.0]), scale_row("m:near_max", [65000.0])]

    table = edge_table(rows, "float16", width=100)
    assert names(table) == ["m:near_max", "m:one_in_4000"]
    assert column(table, "under") == ["0", "<0.1%"]


def test_the_same_tensors_rank_by_each_format_of_its_own():
    rows = [scale_row("m:big", [60000.0, 1.0]), scale_row("m:small", [1e-6, 1e-6]), scale_row("m:one", [1.0])]

    assert names(edge_table(rows, "float8_e4m3fn", width=100))[0] == "m:big"
    assert names(edge_table(rows, "float8_e5m2", width=100)) == ["m:small", "m:big", "m:one"]


def test_bits_are_those_to_the_largest_number_and_above_the_smallest_normal_one():
    row = scale_row("m:add", [448.0, -448.0])

    assert to_max(row, "float8_e4m3fn") == 0.0
    assert to_min(row, "float8_e4m3fn") == pytest.approx(math.log2(448) + 6)
    assert to_max(row, "float16") == pytest.approx(math.log2(65504 / 448))
    assert to_max(scale_row("m:add", [0.0]), "float16") is None
    assert to_max(row, "float4_of_mine") is None


def test_gradients_are_taken_as_they_existed_and_it_is_said():
    free, scaled = 1e-6, 1024e-6
    row = scale_row("m:add", [scaled, -scaled], direction="backward")
    row |= {"grad_scale": 1024.0, "amax": free, "rms": free, "std": free}

    assert to_max(row, "float16") == pytest.approx(math.log2(65504 / scaled))
    assert to_min(row, "float16") == pytest.approx(math.log2(scaled * 2**14))
    assert "times 1024" in edge_report([row])
    assert "times" not in edge_report([{**row, "grad_scale": None}])
    assert "free of its scale" in scales_table([row])


def test_a_format_that_nothing_comes_near_is_one_sentence():
    text = edge_table(recorded_rows(2, iteration=300), "bfloat16", width=80)

    assert text.startswith("bfloat16: none of 45 tensors near an edge, iteration 300; the closest is")
    assert "|" not in text
    assert "over, under" not in edge_report(recorded_rows(1), ["bfloat16"])


def test_tensors_without_a_finite_nonzero_value_have_no_edge():
    rows = [scale_row("m:zeros", [0.0, 0.0]), scale_row("m:nans", [NAN, NAN]), scale_row("m:empty", [])]

    assert edge_table(rows, "float16") == "float16: no tensor of several elements with a nonzero value"
    assert names(edge_table([*rows, scale_row("m:big", [65000.0])], "float16", width=100)) == ["m:big"]


def test_a_loss_and_its_gradient_do_not_fill_the_top():
    loss = {**scale_row(":mean", [1e6, 1e6]), "numel": 1}
    assert names(edge_table([loss, scale_row("m:linear", [9e4, 1.0])], "float16")) == ["m:linear"]


def test_the_first_nan_stands_above_what_it_made():
    """In order of production: weights, results forward, gradients backward; Inf alone below all of them."""
    rows = [
        scale_row("m:mask", [-INF, 0.0], order=1),
        scale_row("m:late", [NAN, 1.0], order=4),
        scale_row("m:culprit", [NAN, 1.0], order=3),
        scale_row("m:culprit", [NAN, 1.0], order=3, direction="backward"),
        scale_row("m:late", [NAN, INF], order=4, direction="backward"),
        scale_row("m:fine", [1.0], order=2),
    ]

    table = nonfinite_table(rows, width=100)
    assert names(table) == ["m:culprit", "m:late", "m:late", "m:culprit", "m:mask"]
    assert column(table, "pass") == ["fwd", "fwd", "bwd", "bwd", "fwd"]
    assert column(table, "NaN") == ["1", "1", "1", "1", "0"]
    assert column(table, "Inf") == ["0", "0", "1", "0", "1"]
    bad_weight = scale_row("m.weight", [NAN], order=0)
    assert names(nonfinite_table([*rows, bad_weight], width=100))[0] == "m.weight"


def test_masks_of_inf_do_not_fill_the_top_of_a_format():
    masks = [scale_row(f"l.{i}:masked_fill", [-INF, 1.0], order=i) for i in range(30)]
    report = edge_report([*masks, scale_row("m:big", [65000.0], order=30)], ["float16"], top=3, width=100)

    infinite, float16, _ = report.split("\n\n")
    assert names(infinite) == [f"l.{i}:masked_fill" for i in range(3)]
    assert "3 of 30 tensors" in infinite
    assert names(float16)[0] == "m:big"


def test_of_several_samples_each_tensor_is_shown_at_its_worst():
    rows = [
        scale_row("m:a", [60000.0], iter=100),
        scale_row("m:b", [1.0], iter=100),
        scale_row("m:a", [1e5], iter=200),
        scale_row("m:b", [NAN, 1e4], iter=200),
        scale_row("m:a", [1.0], iter=300),
        scale_row("m:b", [NAN, 1e3], iter=300),
    ]
    report = edge_report(rows, ["float16"], width=100)

    nonfinite, float16, _ = report.split("\n\n")
    assert "iterations 100 to 300" in nonfinite
    assert (names(nonfinite), column(nonfinite, "iter")) == (["m:b"], ["200"])
    assert (names(float16), column(float16, "iter")) == (["m:a", "m:b"], ["200", "200"])


def test_a_report_at_80_columns():
    rows = [
        scale_row("backbone.layers.10.self_attn.out_proj:linear", [1e5, 1e4], order=7, iter=1500),
        scale_row("backbone.layers.10.post_attention_layernorm:layer_norm", [300.0, 1.0], order=8, iter=1500),
        scale_row("head:softmax", [1.0, 1e-9], order=9, iter=1500),
        scale_row("head:softmax", [2e-6, 2e-6], order=9, iter=1500, direction="backward"),
    ]

    assert edge_report(rows, ["float16", "bfloat16"], top=3, width=80) == "\n".join(
        [
            "float16: 3 of 4 tensors closest to its edges, iteration 1,500",
            "+-------------------------------+------+-------+-------+--------+--------+",
            "| tensor                        | pass |  over | under | to max | to min |",
            "+-------------------------------+------+-------+-------+--------+--------+",
            "| backbone.layers.10.self_attn. | fwd  | 50.0% |     0 |   -0.6 |   30.1 |",
            "| out_proj:linear               |      |       |       |        |        |",
            "| head:softmax                  | fwd  |     0 | 50.0% |   16.0 |   13.5 |",
            "| head:softmax                  | bwd  |     0 |     0 |   34.9 |   -4.9 |",
            "+-------------------------------+------+-------+-------+--------+--------+",
            "",
            "bfloat16: none of 4 tensors near an edge, iteration 1,500; the closest is",
            "  head:softmax (backward), 146.9 bits below the largest number, 107.1 above the",
            "  smallest normal one",
            "",
            "over, under, subn.: share of the values that overflow, round to zero, land in",
            "  subnormals in the format. to max: bits from the largest magnitude up to the",
            "  format's largest number; to min: bits from the rms down to its smallest normal",
            "  one. Order: overflow, values lost to zero, then the fewest bits to either",
            "  edge.",
        ]
    )


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_no_line_is_wider_than_asked_and_long_names_are_whole(width):
    deep = "module.model.decoder.layers.11.post_attention_layernorm"
    rows = [
        scale_row(f"{deep}:{op}", [1e5 * 3**i, 1e-9], order=i, direction=direction)
        for i, op in enumerate(["linear", "scaled_dot_product_attention", "mul.1[0]"])
        for direction in ("forward", "backward")
    ]
    for table in (
        edge_table(rows, "float16", width=width),
        scales_table(rows, width=width),
        comparison_table(rows, rows, width=width),
    ):
        assert max(map(len, table.splitlines())) <= width
        assert set(names(table)) == {row["name"] for row in rows}


def test_names_fold_between_their_parts():
    assert (
        fold_name("model.layers.10.self_attn.q_proj:linear", 26)
        == "model.layers.10.self_attn.\nq_proj:linear"
    )
    assert fold_name("model.layers.10.self_attn:softmax", 30) == "model.layers.10.self_attn\n:softmax"
    assert fold_name("a" * 25, 10) == "\n".join(["a" * 10, "a" * 10, "a" * 5])
    assert fold_name("short:add", 20) == "short:add"


def test_all_tensors_stand_in_order_of_execution_with_both_directions_beside_one_another():
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 1))
    with track_scales(model) as scales:
        model(torch.ones(3, 4)).sum().backward()
    rows = scales.rows()

    table = scales_table(rows[::-1], width=100)
    assert names(table) == [entry.name for entry in scales.entries]
    forward = {row["name"]: row for row in rows if row["direction"] == "forward"}
    backward = {row["name"]: row for row in rows if row["direction"] == "backward"}
    assert column(table, "std ->") == [short(forward[name]["std"]) for name in names(table)]
    assert column(table, "amax <-") == [
        short(backward[name]["amax"]) if name in backward else "" for name in names(table)
    ]
    assert "" in column(table, "amax <-")  # the input has no gradient


def test_a_long_list_is_cut_with_a_count():
    table = scales_table([scale_row(f"m.{i}:add", order=i) for i in range(2000)], max_rows=10, width=80)

    assert len(names(table)) == 10
    assert "... and 1,990 more of 2,000" in table


def test_rows_with_the_std_alone_are_shown():
    model = nn.Sequential(nn.Linear(4, 4))
    with track_scales(model, only_std=True) as scales:
        model(torch.randn(3, 4)).sum().backward()

    assert set(column(scales_table(scales.rows(), width=120), "amax ->")) == {"n/a"}
    assert "no number format" in edge_report(scales.rows())
    assert "+0.0" in comparison_table(scales.rows(), scales.rows())


def test_two_runs_are_compared_by_bits_with_the_most_changed_first():
    first = [
        scale_row("m:same", [1.0, -1.0], order=0),
        scale_row("m:grown", [1.0, -1.0], order=1),
        scale_row("m:shrunk", [1.0, -1.0], order=2),
        scale_row("m:died", [1.0, -1.0], order=3),
        scale_row("m:all_nan", [1.0, -1.0], order=4),
        scale_row("m:lost", [1e-3, -1e-3], order=5, direction="backward"),
    ]
    second = [
        scale_row("m:same", [1.0, -1.0], order=0),
        scale_row("m:grown", [8.0, -8.0], order=1),
        scale_row("m:shrunk", [1 / 16, -1 / 16], order=2),
        scale_row("m:died", [0.0, 0.0], order=3),
        scale_row("m:all_nan", [NAN, NAN], order=4),
        scale_row("m:lost", [1e-9, -1e-9], order=5, direction="backward"),
    ]

    table = comparison_table(first, second, "float16", width=100)
    assert names(table) == ["m:died", "m:all_nan", "m:lost", "m:shrunk", "m:grown", "m:same"]
    assert column(table, "log2 B/A") == ["-inf", "n/a", "-19.9", "-4.0", "+3.0", "+0.0"]
    assert column(table, "under") == ["n/a", "n/a", "+100.0", "0", "0", "0"]
    assert names(comparison_table(first, second, top=2, width=100)) == ["m:died", "m:all_nan"]


def test_a_comparison_matches_directions_and_names_what_one_run_lacks():
    first = [
        scale_row("m:a"),
        scale_row("m:a", direction="backward"),
        *(scale_row(f"old.{i}:x") for i in range(9)),
    ]
    second = [scale_row("m:a", [4.0, -4.0]), scale_row("new:y"), scale_row("new:y", direction="backward")]

    table = comparison_table(first, second, width=100)
    assert (names(table), column(table, "pass")) == (["m:a"], ["fwd"])
    assert "only in A, 10 tensors: m:a (bwd), old.0:x (fwd), old.1:x (fwd)" in table
    assert "and 5 more" in " ".join(table.split())
    assert "only in B, 1 tensor: new:y (fwd, bwd)" in table


@pytest.mark.parametrize(
    ("old", "new", "bits"),
    [
        (1.0, 8.0, 3.0),
        (0.0, 0.0, 0.0),
        (0.0, 1.0, INF),
        (1.0, 0.0, -INF),
        (None, 1.0, None),
        (5e-324, 1e308, 2097.2),
    ],
)
def test_the_change_of_a_std_is_in_bits(old, new, bits):
    change = std_change({"std": old}, {"std": new})
    assert change == (bits if bits is None else pytest.approx(bits, abs=0.1))


@pytest.mark.parametrize(
    ("fraction", "text"),
    [
        (None, "n/a"),
        (0.0, "0"),
        (1e-9, "<0.1%"),
        (0.0005, "0.1%"),
        (0.123, "12.3%"),
        (0.9999, ">99.9%"),
        (1.0, "100%"),
    ],
)
def test_shares_are_never_rounded_to_none_or_all(fraction, text):
    assert percent(fraction) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "n/a"),
        (0.0, "0"),
        (1.23456e-5, "1.23e-5"),
        (-4.5e38, "-4.5e38"),
        (1e100, "1e100"),
        (0.1, "0.1"),
    ],
)
def test_numbers_take_as_few_characters_as_they_need(value, text):
    assert short(value) == text


def test_no_rows_are_said_in_words():
    assert edge_report([]) == "no tensors recorded, or no number format asked for"
    assert "0 tensors" in scales_table([])
    assert "0 tensors" in comparison_table([], [])


def test_functions_are_counted_by_the_dtype_of_their_results():
    class ConvAndSum(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            return (self.conv(x).flatten(1) + torch.ones(1)).sum()

    model = ConvAndSum()
    with torch.autocast("cpu", torch.bfloat16), track_scales(model, level="aten") as scales:
        model(torch.ones(2, 3, 5, 5)).backward()
    table = operations_table(scales.rows(), width=80)
    cells = {
        line.split("|")[1].strip(): line.replace(" ", "")
        for line in table.splitlines()
        if line.startswith("|")
    }
    assert cells["function"] == "|function|float32|bfloat16|"
    assert cells["conv2d"] == "|conv2d||1|"
    assert cells["flatten"] == "|flatten||1|"
    assert cells["add"] == "|add|1||"
    assert cells["aten._to_copy"] == "|aten._to_copy||3|"  # input, weight, bias


def test_runs_are_compared_by_the_magnitude_of_single_elements():
    one, other = ({**scale_row(":mean", [value, value]), "numel": 1} for value in (1.0, 8.0))
    assert std_change(one, other) == 3.0
