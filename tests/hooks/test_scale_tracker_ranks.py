"""ScaleTracker on two ranks: training is untouched, rank 0's rows are those of one process, nobody hangs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from processes import launch
from stored_runs import Rows
from tracked_runs import SGD, Plain, row_of, rows_of, tracked

AT = 3


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return launch("tracked_worker.py", tmp_path_factory.mktemp("ranks"), ranks=2)


def both(ranks: list[dict], name: str) -> list[Any]:
    for rank in ranks:
        assert "error" not in rank[name] or not str(rank[name]["error"]).partition(":")[0].endswith("Error")
    return [rank[name] for rank in ranks]


@pytest.mark.parametrize("tracker", ["functions", "aten", "watched"])
@pytest.mark.parametrize("run", ["sgd", "adamw bf16", "accumulation"])
def test_training_under_ddp_is_bitwise_that_of_a_run_without(run: str, tracker: str, ranks: list[dict]):
    for rank in both(ranks, "bitwise"):
        assert rank[f"{run} {tracker}"] == rank[f"{run} without"]


def one_process(folder: Path, counts: int) -> list[dict[str, Any]]:
    loader = {
        "batch_size": 8,
        "dataset": Rows(),
        "sampler": {"type": "DefaultSampler", "shuffle": False},
        "collate_fn": {"type": "default_collate"},
    }
    optim = {"type": "OptimWrapper", "optimizer": SGD, "accumulative_counts": counts}
    runner = tracked(folder, {"interval": 1}, Plain, iters=4, train_dataloader=loader, optim_wrapper=optim)
    runner.train()
    return rows_of(runner)


@pytest.mark.parametrize(("name", "counts"), [("rows", 1), ("accumulated rows", 2)])
def test_rank_0s_rows_are_those_of_one_process_with_the_whole_batch(
    name: str, counts: int, ranks: list[dict], tmp_path: Path
):
    """S21. Where accumulation leaves gradients unreduced, those of parameters are left out."""
    ours, other_rank = both(ranks, name)
    assert ours == other_rank  # one file, written by rank 0
    whole = {(row["iter"], row["name"], row["direction"]): row for row in one_process(tmp_path, counts)}
    assert len(ours) == len({(row["iter"], row["name"], row["direction"]) for row in ours})
    left_out = set(whole) - {(row["iter"], row["name"], row["direction"]) for row in ours}
    unreduced = {
        key
        for key, row in whole.items()
        if row["kind"] == "parameter" and row["direction"] == "backward" and row["iter"] % counts
    }
    assert left_out == unreduced
    for row in ours:
        one = whole[row["iter"], row["name"], row["direction"]]
        assert row["order"] == one["order"]
        for column in ("zeros", "nans", "infs"):
            assert row[column] == one[column]
        if one["shape"] == []:
            ranks_with_one = (
                2 if row["direction"] == "backward" else 1
            )  # each has a loss, of which the mean is taken
            assert row["mean"] * ranks_with_one == pytest.approx(one["mean"], rel=1e-5)
            continue
        assert row["numel"] == one["numel"]
        for column in ("mean", "std", "rms", "amax", "amin"):
            # to 1e-6 of the tensor's own scale, as float32 sums of other lengths round
            if one[column] is None:  # nothing but zeros
                assert row[column] is None
            else:
                assert row[column] == pytest.approx(one[column], abs=2e-6 * one["rms"]), (row["name"], column)
        on_ranks = 2 if row["direction"] == "backward" and row["kind"] == "activation" else 1
        if row["direction"] == "backward":
            assert row["grad_scale"] == one["grad_scale"] * on_ranks


def test_ranks_that_run_different_parts_are_both_in_the_rows(ranks: list[dict]):
    rows, _ = both(ranks, "branches")
    for direction in ("forward", "backward"):
        assert row_of(rows, "own.0:linear", direction)["numel"] == 4 * 16
        assert row_of(rows, "own.1:linear", direction)["numel"] == 4 * 16
        assert row_of(rows, "stem:linear", direction)["numel"] == 8 * 16
        assert row_of(rows, "own.1.weight", direction)["numel"] == 16 * 16


@pytest.mark.parametrize("how", ["sampled", "watched"])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_one_rank_made_is_named_with_the_rank_and_training_goes_on(
    where: str, how: str, ranks: list[dict]
):
    first, second = both(ranks, f"{where} 1 {how} warn")
    bare = both(ranks, f"{where} 1 without warn")
    said = "run again, recorded" if how == "watched" else "recorded"
    text = {
        "forward": "32 NaN from 'log' outside of the model's submodules (':log'), forward, from finite inputs",
        "backward": "in the gradient of ':abs' from the backward of 'sqrt'",
    }[where]
    lines = [line for line in first["log"].splitlines() if f"ScaleTracker at iteration {AT} " in line]
    assert len(lines) == 1
    assert f"ScaleTracker at iteration {AT} ({said}), rank 1: " in lines[0]
    assert text in lines[0]
    for rank, without in zip((first, second), bare, strict=True):
        assert rank["state"] == without["state"]
        assert rank["losses"] == without["losses"]


def test_a_loss_that_is_bad_on_one_rank_alone_has_all_run_again(ranks: list[dict]):
    first, _ = both(ranks, "loss 1 watched warn")
    assert "(run again, recorded), rank 1: 1 NaN from 'log'" in first["log"]


@pytest.mark.parametrize("how", ["sampled", "watched"])
def test_raise_stops_every_rank_with_the_same_message_after_the_checkpoint(how: str, ranks: list[dict]):
    for rank in both(ranks, f"forward 1 {how} raise"):
        assert f"ScaleTracker at iteration {AT} " in rank["error"]
        assert ", rank 1: 32 NaN from 'log'" in rank["error"]
        assert rank["checkpoint"]
        assert rank["iteration"] == AT


def test_what_every_rank_made_is_said_of_all(ranks: list[dict]):
    for rank in both(ranks, "backward 0 1 watched raise"):
        assert "(run again, recorded), on all 2 ranks: " in rank["error"]


def test_a_bad_gradient_of_a_parameter_alone_is_known_by_rank_only_when_run_again(ranks: list[dict]):
    sampled, _ = both(ranks, "weights 1 sampled warn")
    assert "(recorded), on all ranks, whose gradients are averaged: " in sampled["log"]
    watched, _ = both(ranks, "weights 1 watched warn")
    assert "(run again, recorded), rank 1: " in watched["log"]
    assert "in the gradient of 'head.weight'" in watched["log"]


def test_the_three_hooks_go_together_in_any_order(ranks: list[dict]):
    found = both(ranks, "together")
    for rank in found:
        without = rank.pop("autocast overrider")
        assert len(rank) == 6
        for order, one in rank.items():
            assert one["state"] == without["state"], order
            assert one["losses"] == without["losses"], order
    for one in found[0].values():
        assert one["dtypes"]["bn:batch_norm"] == "float32"
        assert one["dtypes"]["stem:linear"] == "float16"
