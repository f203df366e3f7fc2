"""``scales.jsonl``: a row a tensor a sample, flushed, whole after a resume, and no reason for training to stop."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from mmengine.hooks import Hook
from mmengine.registry import VISBACKENDS
from mmengine.runner import FlexibleRunner, Runner
from mmengine.visualization import BaseVisBackend
from processes import HELPERS, ROOT
from stored_runs import state_of
from tracked_runs import Plain, log_of, row_of, rows_of, tracked

from dtype_hooks.hooks.checkpoints import allow_mmengine_checkpoints
from dtype_hooks.scales.record import SCHEMA


def lines_of(runner: Any) -> list[str]:
    return (Path(runner.log_dir) / "scales.jsonl").read_text().splitlines(keepends=True)


def finished(work_dir: Path, iters: int, log_dir: str, **kwargs: Any) -> Any:
    """A run whose log_dir gets another name, as if it had begun in another second."""
    runner = tracked(work_dir, {"interval": 2}, Plain, iters=iters, **{"save_at": 5, **kwargs})
    with allow_mmengine_checkpoints():
        runner.train()
    Path(runner.log_dir).rename(work_dir / log_dir)
    return runner


def test_one_row_a_tensor_and_sample_with_the_documented_columns(tmp_path: Path):
    runner = tracked(tmp_path, {"interval": 2}, Plain, iters=4)
    runner.train()
    rows = [json.loads(line) for line in lines_of(runner)]
    assert len({(row["iter"], row["name"], row["direction"]) for row in rows}) == len(rows)
    formats = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
    of_formats = [f"{name}_{what}" for name in formats for what in ("underflow", "subnormal", "overflow")]
    assert list(rows[0]) == [
        *(
            "schema",
            "iter",
            "order",
            "name",
            "module",
            "op",
            "occurrence",
            "output",
            "kind",
            "dtype",
            "shape",
        ),
        *("device", "direction", "numel", "zeros", "nans", "infs", "mean", "std", "rms", "amax", "amin"),
        *of_formats,
        "grad_scale",
    ]
    assert {row["schema"] for row in rows} == {SCHEMA}
    one = row_of([row for row in rows if row["iter"] == 2], "stem:linear", "backward")
    assert (one["module"], one["op"], one["kind"], one["shape"]) == ("stem", "linear", "activation", [4, 16])


def test_pandas_reads_it_in_one_line(tmp_path: Path):
    pandas = pytest.importorskip("pandas")
    runner = tracked(tmp_path, {"interval": 2}, Plain, iters=4)
    runner.train()
    frame = pandas.read_json(Path(runner.log_dir) / "scales.jsonl", lines=True)
    assert len(frame) == len(rows_of(runner))
    assert set(frame["iter"]) == {2, 4}


def test_each_sample_is_there_before_the_next_iteration(tmp_path: Path):
    seen: list[int] = []

    class Look(Hook):
        def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
            seen.append(len(lines_of(runner)))

    runner = tracked(tmp_path, {"interval": 2, "patterns": "head", "formats": []}, Plain, [Look()], iters=5)
    runner.train()
    sample = len(rows_of(runner)) // 2
    assert seen == [0, 0, sample, sample, 2 * sample]


@pytest.mark.parametrize("runner_type", [Runner, FlexibleRunner])
def test_a_resumed_run_has_the_whole_file_without_gaps_or_doubles(runner_type: type, tmp_path: Path):
    """From a checkpoint between two samples; the first run went further than it."""
    straight = finished(tmp_path / "straight", 10, "a", runner_type=runner_type)
    expected = (tmp_path / "straight" / "a" / "scales.jsonl").read_text()
    first = finished(tmp_path / "resumed", 8, "20200101_000000", runner_type=runner_type)
    again = finished(
        tmp_path / "resumed",
        10,
        "b",
        runner_type=runner_type,
        resume=True,
        load_from=str(tmp_path / "resumed" / "iter_5.pth"),
    )
    assert (tmp_path / "resumed" / "b" / "scales.jsonl").read_text() == expected
    assert state_of(again)["parameters"] == state_of(straight)["parameters"]
    assert Path(first.work_dir) == Path(again.work_dir)


def test_without_a_path_the_latest_checkpoint_of_the_work_dir_is_gone_on_from(tmp_path: Path):
    finished(tmp_path, 6, "20200101_000000")
    again = tracked(tmp_path, {"interval": 2}, Plain, iters=10, resume=True)
    with allow_mmengine_checkpoints():
        again.train()
    assert sorted({row["iter"] for row in rows_of(again)}) == [2, 4, 6, 8, 10]
    assert len(lines_of(again)) % 5 == 0


def test_a_line_that_a_crash_has_cut_is_left_out(tmp_path: Path):
    finished(tmp_path, 5, "20200101_000000")
    path = tmp_path / "20200101_000000" / "scales.jsonl"
    whole = path.read_text()
    path.write_text(whole + whole[:300])
    again = finished(tmp_path, 8, "b", resume=True, load_from=str(tmp_path / "iter_5.pth"))
    assert (tmp_path / "b" / "scales.jsonl").read_text().startswith(whole)
    assert len(set((tmp_path / "b" / "scales.jsonl").read_text().splitlines())) == 2 * len(whole.splitlines())
    assert again.iter == 8


def test_a_crash_that_cut_only_the_end_of_a_line_costs_no_row(tmp_path: Path):
    finished(tmp_path, 4, "20200101_000000", save_at=4)
    path = tmp_path / "20200101_000000" / "scales.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-1])
    finished(tmp_path, 6, "b", resume=True, load_from=str(tmp_path / "iter_4.pth"))
    assert (tmp_path / "b" / "scales.jsonl").read_text().startswith(f"{whole}{{")


def test_the_file_that_reaches_furthest_is_gone_on_with_whichever_is_newer(tmp_path: Path):
    finished(tmp_path, 6, "20200101_000000")
    shorter = tracked(tmp_path, {"interval": 2}, Plain, iters=2)  # a run from the beginning, given up
    shorter.train()
    Path(shorter.log_dir).rename(tmp_path / "20200102_000000")
    again = finished(tmp_path, 8, "b", resume=True, load_from=str(tmp_path / "iter_5.pth"))
    rows = [json.loads(line) for line in (tmp_path / "b" / "scales.jsonl").read_text().splitlines()]
    assert sorted({row["iter"] for row in rows}) == [2, 4, 6, 8]
    assert again.iter == 8


def test_weights_alone_or_another_runs_checkpoint_begin_a_new_file(tmp_path: Path):
    finished(tmp_path, 6, "20200101_000000")
    checkpoint = str(tmp_path / "iter_5.pth")
    loaded = tracked(tmp_path, {"interval": 2}, Plain, iters=4, load_from=checkpoint)
    with allow_mmengine_checkpoints():
        loaded.train()
    assert sorted({row["iter"] for row in rows_of(loaded)}) == [2, 4]
    Path(loaded.log_dir).rename(tmp_path / "20200103_000000")
    other = tracked(tmp_path / "other", {"interval": 2}, Plain, iters=8, load_from=checkpoint, resume=True)
    with allow_mmengine_checkpoints():
        other.train()
    assert sorted({row["iter"] for row in rows_of(other)}) == [6, 8]


def test_a_checkpoint_in_a_folder_of_its_own_is_the_runs_too(tmp_path: Path):
    hook = {"type": "CheckpointHook", "interval": 5, "by_epoch": False, "out_dir": str(tmp_path / "out")}
    first = tracked(tmp_path / "work", {"interval": 2}, Plain, iters=6)
    first.register_hook(dict(hook))
    first.train()
    Path(first.log_dir).rename(tmp_path / "work" / "20200101_000000")
    (checkpoint,) = (tmp_path / "out").glob("*/iter_5.pth")
    again = tracked(
        tmp_path / "work", {"interval": 2}, Plain, iters=8, load_from=str(checkpoint), resume=True
    )
    again.register_hook(dict(hook))
    with allow_mmengine_checkpoints():
        again.train()
    assert sorted({row["iter"] for row in rows_of(again)}) == [2, 4, 6, 8]


@pytest.fixture
def small_files() -> Any:
    """A disk on which no file gets longer than 100 KB: what is too much is written in part, and then an error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@VISBACKENDS.register_module()
class FullOfScales(BaseVisBackend):
    """Takes what others log."""

    experiment = None

    def _init_env(self) -> None:
        pass

    def add_scalars(self, scalars: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if any(name.startswith("scales/") for name in scalars):
            raise OSError(28, "No space left on device")


def test_a_visualizer_that_cannot_write_is_one_warning_and_the_file_goes_on(tmp_path: Path):
    visualizer = {
        "type": "Visualizer",
        "vis_backends": [{"type": "FullOfScales", "save_dir": str(tmp_path)}],
        "name": "full",
    }
    runner = tracked(tmp_path, {"interval": 1}, Plain, iters=3, visualizer=visualizer)
    runner.train()
    log = log_of(runner)
    assert (
        log.count("the visualizer cannot write ([Errno 28] No space left on device); training goes on") == 1
    )
    assert {row["iter"] for row in rows_of(runner)} == {1, 2, 3}


@pytest.mark.usefixtures("small_files")
def test_a_full_disk_stops_the_writing_and_says_so_once_and_training_goes_on(tmp_path: Path):
    runner = tracked(tmp_path, {"interval": 1}, Plain, iters=20)
    runner.train()
    assert runner.iter == 20
    log = log_of(runner)
    assert log.count("cannot be written ([Errno 27] File too large); training goes on") == 1
    with pytest.warns(UserWarning, match="cut off"):
        assert {row["iter"] for row in rows_of(runner)} <= set(range(1, 20))


def test_a_log_dir_that_cannot_be_written_is_one_warning_and_no_summary(tmp_path: Path):
    class Blocks(Hook):
        def before_train(self, runner: Any) -> None:
            (Path(runner.log_dir) / "scales.tmp").mkdir()

    runner = tracked(tmp_path, {"interval": 1}, Plain, [Blocks()], iters=3)
    runner.train()
    log = log_of(runner)
    assert log.count("cannot be written ([Errno 21] Is a directory") == 1
    assert "no summary" not in log
    assert "samples in" not in log


def test_scales_are_summed_up_in_a_process_that_is_interrupted(tmp_path: Path):
    """Ctrl-C: pictures, a table, and every sample so far."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT), str(HELPERS)])),
    }
    with (tmp_path / "out.txt").open("w") as out:
        command = [sys.executable, str(HELPERS / "interrupted_worker.py"), str(tmp_path)]
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out)
        try:
            until = time.monotonic() + 120
            while not (tmp_path / "ready").exists() and time.monotonic() < until:
                assert process.poll() is None, (tmp_path / "out.txt").read_text()[-3000:]
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            assert process.wait(120) != 0
        finally:
            process.kill()
    (path,) = tmp_path.glob("*/scales.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    iterations = sorted({row["iter"] for row in rows})
    assert iterations == list(range(5, 5 * len(iterations) + 1, 5))
    text = (tmp_path / "out.txt").read_text()
    assert "KeyboardInterrupt" in text
    assert f"ScaleTracker: {len(iterations)} samples in" in text
    assert list((path.parent / "scales").glob("*.png"))
