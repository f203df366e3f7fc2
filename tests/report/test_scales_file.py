"""Finding, reading and joining the files of a run's scales."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from scale_rows import recorded_rows, scale_row, write_rows
from torch import nn

from dtype_hooks.errors import ConfigError
from dtype_hooks.report.scales_file import (
    find_files,
    formats_of,
    iterations,
    join,
    last_sample,
    read_rows,
    read_run,
    select_rows,
)
from dtype_hooks.scales.recorder import track_scales


def at(number: int, name: str = "a:add", direction: str = "forward", std: float = 1.0):
    return scale_row(name, direction=direction, iter=number, std=std)


def seen(rows) -> list[tuple[int, str, float]]:
    return [(row["iter"], row["name"], row["std"]) for row in rows]


def test_what_a_recording_saves_is_read_as_its_rows(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    with track_scales(model) as scales:
        model(torch.ones(2, 4)).sum().backward()
    scales.save(tmp_path / "mine.jsonl")

    assert read_rows(tmp_path / "mine.jsonl") == scales.rows()
    assert read_run(tmp_path / "mine.jsonl") == scales.rows()


@pytest.mark.parametrize("cut", [1, 40, -2])
def test_a_line_cut_off_by_a_crash_is_left_out_with_one_warning(tmp_path, cut):
    rows = [at(100), at(100, "b:mul")]
    path = write_rows(tmp_path / "scales.jsonl", rows, json.dumps(at(200))[:cut])

    with pytest.warns(UserWarning, match=r"scales\.jsonl: line 3 cut off") as caught:
        assert read_rows(path) == rows
    assert len(caught) == 1


def test_lines_cut_off_inside_the_file_are_one_warning_and_cost_no_other_row(tmp_path):
    path = tmp_path / "scales.jsonl"
    lines = [json.dumps(at(number)).encode() for number in (100, 200, 300, 400)]
    path.write_bytes(
        b"\n".join([lines[0], lines[1][:50], lines[2], lines[3] + b"\n", b"\xc3", b"\0\0\0", b""])
    )

    with pytest.warns(UserWarning, match="line 2 and 2 more cut off") as caught:
        assert iterations(read_rows(path)) == [100, 300, 400]
    assert len(caught) == 1


def test_an_empty_file_has_no_rows_and_warns_of_nothing(tmp_path):
    path = write_rows(tmp_path / "scales.jsonl", [])

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_rows(path) == []
        assert read_run(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "import torch\n",
            "got no JSON in line 1; expected rows that ScaleTracker or Scales.save wrote; name a",
        ),
        ('{"lr": 0.1, "iter": 1}\n', "got no schema, order, name, module, op, kind, direction in line 1"),
        ("[1, 2]\n", "got no schema, order"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path, text, message):
    path = tmp_path / "other.jsonl"
    path.write_text(text)

    with pytest.raises(ConfigError) as error:
        read_rows(path)
    assert f"{path}: " in str(error.value)
    assert message in str(error.value)


@pytest.mark.parametrize("schema", [2, 99, None, "1"])
def test_rows_of_a_newer_schema_are_refused_and_say_what_to_do(tmp_path, schema):
    path = write_rows(tmp_path / "scales.jsonl", [at(1), {**at(2), "schema": schema}])

    with pytest.raises(ConfigError, match=rf"got schema {schema!r} in line 2; expected at most 1; .* update"):
        read_rows(path)


def test_a_file_a_log_dir_and_a_work_dir_are_found(tmp_path):
    first = write_rows(tmp_path / "20260101_000000" / "scales.jsonl", [at(1)])
    last = write_rows(tmp_path / "20260203_000000" / "scales.jsonl", [at(2)])
    (tmp_path / "20260304_000000").mkdir()

    assert find_files(first) == find_files(first.parent) == [first]
    assert find_files(tmp_path) == [first, last]


def test_what_holds_no_scales_is_refused_and_the_nearest_name_is_said(tmp_path):
    (tmp_path / "gpt_small").mkdir()

    with pytest.raises(
        ConfigError, match=r"gpt_small', which holds none; expected .*; train with the hook ScaleTracker"
    ):
        find_files(tmp_path / "gpt_small")
    with pytest.raises(ConfigError, match=r"gpt_smal', which does not exist; .*nearest in .*: 'gpt_small'"):
        find_files(tmp_path / "gpt_smal")
    with pytest.raises(ConfigError, match=r"does not exist; .*mend the path"):
        find_files(tmp_path / "no" / "where")


def test_a_resumed_run_takes_over_from_its_first_sample_on():
    """The first went to 400, and was resumed from 200: what it saw after that has been thrown away."""
    first = [at(number, name, std=1.0) for number in (100, 200, 300, 400) for name in ("a:add", "b:mul")]
    resumed = [at(number, std=2.0) for number in (300, 500)]

    assert seen(join([first, resumed])) == [
        (100, "a:add", 1.0),
        (100, "b:mul", 1.0),
        (200, "a:add", 1.0),
        (200, "b:mul", 1.0),
        (300, "a:add", 2.0),
        (500, "a:add", 2.0),
    ]


def test_a_file_that_was_resumed_into_has_no_doubles_and_nothing_that_was_thrown_away():
    rows = [at(100), at(200), at(300), at(400), at(200, std=2.0), at(300, std=2.0)]

    assert seen(join([rows])) == [(100, "a:add", 1.0), (200, "a:add", 2.0), (300, "a:add", 2.0)]


def test_both_directions_of_a_tensor_are_kept_and_of_one_written_twice_the_last():
    rows = [at(100), at(100, direction="backward"), at(100, std=3.0)]

    assert [(row["direction"], row["std"]) for row in join([rows])] == [("forward", 3.0), ("backward", 1.0)]


def test_a_work_dir_is_read_as_one_run(tmp_path):
    write_rows(tmp_path / "20260101_000000" / "scales.jsonl", [at(100), at(200)], '{"sch')
    write_rows(tmp_path / "20260102_000000" / "scales.jsonl", [at(200, std=2.0), at(300, std=2.0)])

    with pytest.warns(UserWarning, match="line 3 cut off"):
        rows = read_run(tmp_path)
    assert seen(rows) == [(100, "a:add", 1.0), (200, "a:add", 2.0), (300, "a:add", 2.0)]
    assert [row["iter"] for row in last_sample(rows)] == [300]


def test_formats_are_those_of_the_columns():
    rows = recorded_rows(1)
    assert formats_of(rows) == ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
    assert formats_of([{"name": "a", "std": 1.0}]) == []
    assert formats_of([{"mine_overflow": 0.0}, {"float16_overflow": 0.0}]) == ["mine", "float16"]


def test_rows_are_selected_by_every_argument_given():
    rows = recorded_rows(2)

    attention = select_rows(rows, module=r"layers\.1\.self_attn$", direction="backward", kind="activation")
    assert [row["name"] for row in attention] == ["model.layers.1.self_attn:linear"]
    weights = select_rows(rows, op="^weight$", kind="parameter", direction="forward")
    assert {row["op"] for row in weights} == {"weight"}
    assert len(weights) == 6
    assert select_rows(rows) == rows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"module": "("}, "module: got '('; expected a regular expression"),
        ({"direction": "up"}, "direction: got 'up'; expected one of 'forward', 'backward'"),
        ({"kind": "kernels"}, "kind: got 'kernels'; expected one of .* Did you mean 'kernel'"),
    ],
)
def test_a_selection_that_cannot_be_used_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        select_rows([], **arguments)
