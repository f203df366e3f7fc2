"""Stored dtypes and resuming: k + m iterations equal k, save, a fresh process, m; alone and on two ranks.

The trainings are in tests/helpers/stored_resume_worker.py, with a learning rate that warms up and an EMA of weights and
buffers. Everything is compared bit for bit.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from processes import launch
from stored_resume_worker import M, saved
from stored_runs import OPTIMIZERS


def both_phases(folder, ranks):
    straight = launch("stored_resume_worker.py", folder, "straight", ranks=ranks)
    resumed = launch("stored_resume_worker.py", folder, "resumed", ranks=ranks)
    return SimpleNamespace(folder=folder, straight=straight, resumed=resumed)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return both_phases(tmp_path_factory.mktemp("resume"), 1)


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    return both_phases(tmp_path_factory.mktemp("resume_ddp"), 2)


@pytest.fixture(params=["alone", "on_two_ranks"])
def runs(request):
    return request.getfixturevalue(request.param)


def without_log(result):
    assert "error" not in result
    return {key: value for key, value in result.items() if key != "rounded"}


def comparable(result, rank):
    """Without what is not in a checkpoint, which rank 0 writes: other ranks' averages of their own statistics."""
    if rank == 0:
        return result
    return result | {"ema": {name: text for name, text in result["ema"].items() if "running" not in name}}


@pytest.mark.parametrize("kind", ["hook", "nobody"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_resumed_training_goes_on_as_if_it_had_not_stopped(runs, optimizer, kind):
    for rank, (straight, resumed) in enumerate(zip(runs.straight, runs.resumed, strict=True)):
        expected = straight[f"{kind}_{optimizer}"]
        result = without_log(resumed[f"{kind}_{optimizer}_from_{kind}"])
        assert expected["ema"]
        assert expected["optimizer"]
        assert comparable(result, rank) == comparable(expected, rank)


@pytest.mark.parametrize("written_by", ["hook", "nobody"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_checkpoint_is_resumed_as_by_a_model_cast_before(runs, optimizer, written_by):
    """From a float32 checkpoint too: weights, optimizer states and EMA are rounded the same way."""
    for resumed in runs.resumed:
        with_hook = without_log(resumed[f"hook_{optimizer}_from_{written_by}"])
        assert with_hook == without_log(resumed[f"before_{optimizer}_from_{written_by}"])
        assert with_hook["parameters"]["norm.weight"].startswith("bfloat16 ")
        assert with_hook["ema"]["module.norm.weight"].startswith("bfloat16 ")
        states = {n: text for n, text in with_hook["optimizer"].items() if n.startswith("norm.weight.")}
        assert all(text.startswith("bfloat16 ") for n, text in states.items() if not n.endswith(".step"))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_checkpoint_of_stored_dtypes_is_resumed_without_them(runs, optimizer):
    for resumed in runs.resumed:
        result = without_log(resumed[f"nobody_{optimizer}_from_hook"])
        assert {text.split()[0] for text in result["parameters"].values()} == {"float32"}


@pytest.mark.parametrize("written_by", ["hook", "nobody"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_naive_cast_in_before_train_stops_or_trains_otherwise(runs, optimizer, written_by):
    naive = runs.resumed[0][f"naive_{optimizer}_from_{written_by}"]
    before = runs.resumed[0][f"before_{optimizer}_from_{written_by}"]
    assert "error" in naive or naive["optimizer"] != before["optimizer"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_ranks_go_on_with_the_same_parameters_and_states(on_two_ranks, optimizer):
    for written_by in ("hook", "nobody"):
        first, second = (rank[f"hook_{optimizer}_from_{written_by}"] for rank in on_two_ranks.resumed)
        for what in ("parameters", "optimizer"):
            assert first[what] == second[what]


@pytest.mark.parametrize("written_by", ["hook", "nobody"])
def test_flexible_runner_which_loads_before_before_run_resumes_all_the_same(alone, written_by):
    with_hook = alone.resumed[0][f"flexible_hook_from_{written_by}"]
    assert without_log(with_hook) == without_log(alone.resumed[0][f"flexible_before_from_{written_by}"])
    assert with_hook["optimizer"]["norm.weight.exp_avg"].startswith("bfloat16 ")
    if written_by == "hook":
        assert without_log(with_hook) == without_log(alone.straight[0]["flexible_hook"])


def test_weights_alone_are_loaded_as_by_a_model_cast_before(alone):
    assert without_log(alone.resumed[0]["loaded_hook"]) == without_log(alone.resumed[0]["loaded_before"])


@pytest.mark.parametrize(
    ("run", "times"),
    [
        ("hook_adamw_from_nobody", 1),
        ("hook_sgd_from_nobody", 1),
        ("flexible_hook_from_nobody", 1),
        ("loaded_hook", 1),
        ("hook_adamw_from_hook", 0),
        ("flexible_hook_from_hook", 0),
        ("nobody_adamw_from_hook", 0),
    ],
)
def test_rounding_what_a_float32_checkpoint_holds_is_said_once(alone, run, times):
    assert alone.resumed[0][run]["rounded"] == times


def test_the_resumed_processes_did_resume(runs):
    """Not trained anew: the checkpoint is of iteration K, and the log says from where it went on."""
    log = (runs.folder / "stored_resume_worker_resumed.log").read_text()
    assert f"Advance dataloader {M} steps" in log
    assert "resumed epoch: 0, iter: 3" in log
    assert saved(runs.folder, "hook_adamw").endswith("iter_3.pth")
