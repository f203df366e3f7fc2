"""tools/scales.py by its command line, on files as runs leave them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from scale_rows import recorded_rows, scale_row, write_rows

from dtype_hooks.report.scale_plots import layers_figure, save_png
from dtype_hooks.report.scales_file import select_rows

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "scales.py"


def load_tool():
    spec = importlib.util.spec_from_file_location("scales_tool", TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


@pytest.fixture(scope="module")
def samples():
    """Two samples of a real model."""
    return [recorded_rows(2, iteration=number, seed=number) for number in (100, 200)]


@pytest.fixture
def run(tmp_path, samples):
    """The work_dir of a run that was stopped and resumed."""
    write_rows(tmp_path / "gpt" / "20260101_000000" / "scales.jsonl", [*samples[0], *samples[1]])
    overflows = scale_row("model.layers.1.self_attn:softmax", [1e5, 1.0], order=99, iter=200)
    write_rows(tmp_path / "gpt" / "20260102_000000" / "scales.jsonl", [*samples[1], overflows])
    return tmp_path / "gpt"


@pytest.fixture
def scales(capsys, monkeypatch):
    """Run the command line; return exit code, stdout, stderr."""
    monkeypatch.setenv("COLUMNS", "80")
    tool = load_tool()

    def call(*words) -> tuple[int, str, str]:
        code = tool.main([str(word) for word in words])
        return code, *capsys.readouterr()

    return call


def test_the_last_sample_of_a_work_dir_by_each_format(scales, run):
    code, out, err = scales(run)

    assert (code, err) == (0, "")
    tables = out.split("\n\n")
    assert [table.partition(":")[0] for table in tables[:4]] == [
        "float16",
        "bfloat16",
        "float8_e4m3fn",
        "float8_e5m2",
    ]
    assert "iteration 200" in tables[0]
    first = next(line for line in tables[0].splitlines() if line.startswith("| model"))
    assert "model.layers.1.self_attn:softmax" in first
    assert "50.0%" in first
    assert max(map(len, out.splitlines())) <= 80


def test_options_choose_the_format_the_sample_and_how_many(scales, run):
    _, out, _ = scales(run, "--format", "float8_e4m3fn", "--iter", "100", "--top", "3")

    assert out.startswith("float8_e4m3fn: 3 of ")
    assert "iteration 100" in out
    assert out.count("\n| model") == 3


def test_all_samples_at_once_show_each_tensor_at_its_worst(scales, run):
    _, out, _ = scales(run / "20260102_000000", "--iter", "all", "--format", "float16")
    assert "iteration 200" in out
    _, out, _ = scales(run, "--iter", "all", "--format", "float16")
    assert "iterations 100 to 200" in out


def test_filters_are_by_module_op_direction_and_kind(scales, run):
    words = (
        "--module",
        r"layers\.0",
        "--op",
        "^linear$",
        "--direction",
        "backward",
        "--kind",
        "activation",
        "--list",
    )
    _, out, _ = scales(run, *words)

    names = [line.split("|")[1].strip() for line in out.splitlines() if line.startswith("| model")]
    assert names == ["model.layers.0.self_attn:linear", "model.layers.0.mlp.0:linear"]


def test_two_runs_are_compared(scales, run, tmp_path, samples):
    rows = [{**row, "std": row["std"] and 8 * row["std"]} for row in samples[1] if row["name"] != ":square"]
    other = write_rows(tmp_path / "other.jsonl", rows)

    code, out, _ = scales(run, "--compare", other, "--top", "2", "--direction", "forward")

    assert code == 0
    assert f"A: {run}, iteration 200" in out
    assert f"B: {other}, iteration 200" in out
    assert "+3.0" in out
    assert "only in A, 2 tensors: :square (fwd), model.layers.1.self_attn:softmax (fwd)" in " ".join(
        out.split()
    )


def test_pictures_are_written_and_named(scales, run, tmp_path):
    code, out, _ = scales(
        run, "--kind", "activation", "--direction", "forward", "--plots", tmp_path / "pictures"
    )

    assert code == 0
    names = {"history_activation_forward.png", "layers_activation.png"}
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == names
    assert all(name in out.splitlines()[-1] for name in names)


def test_the_picture_of_layers_is_that_of_the_sample_asked_for(scales, run, tmp_path, samples):
    scales(run, "--kind", "activation", "--direction", "forward", "--iter", "100", "--plots", tmp_path)

    rows = select_rows(samples[0], direction="forward")
    save_png(layers_figure(rows), tmp_path / "expected.png")
    assert (tmp_path / "layers_activation.png").read_bytes() == (tmp_path / "expected.png").read_bytes()


def test_a_recording_without_iterations_is_shown(scales, tmp_path):
    path = write_rows(tmp_path / "mine.jsonl", recorded_rows(1))

    code, out, _ = scales(path, "--list")
    assert (code, "iteration" in out) == (0, False)
    assert "model.layers.0.self_attn:linear" in out


def test_a_cut_line_is_a_warning_and_the_rest_is_shown(scales, tmp_path, samples):
    path = write_rows(tmp_path / "scales.jsonl", samples[0], '{"schema": 1, "it')

    code, out, err = scales(path, "--top", "1")
    assert code == 0
    assert (
        err
        == f"warning: {path}: line {len(samples[0]) + 1} cut off, as by a crash while writing; left out, the others are read\n"
    )
    assert "iteration 100" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format", "fp16"], "--format: got 'fp16'; expected one of 'float16', .* Did you mean 'float16'?"),
        (
            ["--iter", "150"],
            "--iter: got '150'; expected last, all, or the iteration of a sample; there are 2: 100, 200",
        ),
        (
            ["--iter", "all", "--compare", "x"],
            "--iter: got 'all'; expected one sample to --compare; write --iter last",
        ),
        (["--module", "("], "--module: got '('; expected a regular expression"),
        (
            ["--module", "self_atn"],
            "--module: got 'self_atn'; .* in one of 10 modules; nearest: 'model.layers.0.self_attn'",
        ),
        (["--op", "conv"], "--op: got 'conv'; expected what is found in one of"),
        (["--kind", "kernel"], "--kind: got 'kernel'; .* one of 2 kinds; nearest: 'activation', 'parameter'"),
        (["--direction", "up"], "argument --direction: invalid choice: 'up'"),
        (["--top", "0"], "argument --top: got '0'; expected a whole number from 1"),
        (["--compare", "/no/such"], "scales: got '/no/such', which does not exist"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
    ],
)
def test_what_is_wrong_with_the_command_line_is_one_line(scales, run, words, message):
    code, out, err = scales(run, *words)

    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    before, *after = message.split(".*")
    assert before in err
    assert all(part.strip() in err for part in after)


def test_what_is_wrong_with_files_is_one_line(scales, tmp_path):
    empty = write_rows(tmp_path / "scales.jsonl", [])
    newer = write_rows(tmp_path / "newer.jsonl", [scale_row("m:add", schema=2)])
    good = write_rows(tmp_path / "good.jsonl", [scale_row("m:add")])

    for words, message in (
        ([tmp_path], "got no rows; expected those of a sample; wait for the run's first one"),
        ([newer], "got schema 2 in line 1; expected at most 1"),
        ([TOOL], "got no JSON in line 1; expected rows that ScaleTracker or Scales.save wrote"),
        ([good, "--plots", empty], "got 'File exists'; expected a path to read or write; mend it"),
        ([], "the following arguments are required: RUN_OR_FILE; see --help"),
    ):
        code, out, err = scales(*words)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err


def test_the_command_runs_without_mmengine_from_anywhere_into_a_closed_pipe(run, tmp_path):
    """As ``| head`` closes it; sitecustomize makes mmengine absent."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['mmengine'] = None\n")
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{sys.executable} {TOOL} {run} --iter all --list | true"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
