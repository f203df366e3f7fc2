"""Loss scaling across processes: k + m iterations equal k, save, a fresh process, m; and two ranks that agree.

The trainings are in tests/helpers/scaled_worker.py: a scale that overflows, grows and meets planted Infs on both sides of the
checkpoint. Everything is compared bit for bit.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from processes import launch
from scaled_worker import RUNS, M, scenarios


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scaled")
    with torch.random.fork_rng():
        straight = {name: run() for name, run in scenarios("straight", folder).items()}
    return SimpleNamespace(
        folder=folder, straight=[straight], resumed=launch("scaled_worker.py", folder, "resumed")
    )


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scaled_ddp")
    straight = launch("scaled_worker.py", folder, "straight", ranks=2)
    resumed = launch("scaled_worker.py", folder, "resumed", ranks=2)
    return SimpleNamespace(folder=folder, straight=straight, resumed=resumed)


class TestResume:
    @pytest.mark.parametrize("name", RUNS)
    def test_a_fresh_process_goes_on_as_if_nothing_had_been(self, alone, name):
        straight, resumed = alone.straight[0][name], alone.resumed[0][name]

        assert straight == resumed
        assert straight["optimizer"]
        assert straight["scaler"]["skipped_steps"] > 2
        assert straight["fresh"] == 0

    @pytest.mark.parametrize("name", [name for name in RUNS if name != "flexible"])
    def test_two_ranks_go_on_as_well_with_the_same_weights_and_scale(self, ranks, name):
        results = [run[rank][name] for run in (ranks.straight, ranks.resumed) for rank in range(2)]

        assert results == [results[0]] * 4
        assert results[0]["scaler"]["skipped_steps"] > 2

    def test_the_resumed_processes_did_resume(self, alone, ranks):
        for runs in (alone, ranks):
            log = (runs.folder / "scaled_worker_resumed.log").read_text()
            assert f"Advance dataloader {M} steps" in log

    def test_a_checkpoint_without_the_key_starts_afresh_and_says_so_once(self, alone):
        assert alone.resumed[0]["without the key"]["fresh"] == 1

    @pytest.mark.parametrize("name", ["weights", "flexible weights"])
    def test_where_only_weights_are_loaded_the_scaler_is_new_and_nothing_is_said(self, alone, name):
        result = alone.resumed[0][name]

        assert result["fresh"] == 0
        assert result["scaler"]["skipped_steps"] == 0  # the checkpoint has some


class TestTwoRanks:
    @pytest.mark.parametrize("way", ["clip", "two"])
    @pytest.mark.parametrize("optimizer", ["sgd", "adamw_fused"])
    def test_no_bit_changes_under_ddp(self, ranks, way, optimizer):
        results = [rank[f"same {way} {optimizer}"] for rank in ranks.straight]

        assert all(result["scaled"] == result["unscaled"] == results[0]["scaled"] for result in results)
        assert all(result["scale"] > 2 for result in results)

    @pytest.mark.parametrize("way", ["under ddp", "not synced", "not wrapped", "fused"])
    def test_an_inf_on_one_rank_skips_the_step_on_all_and_is_named(self, ranks, way):
        """Also in a micro-batch that is not reduced, and where nothing reduces the gradients."""
        results = [rank[f"inf {way}"] for rank in ranks.straight]

        for result in results:
            assert result["scale"] == [4.0, 4.0, 1]
            assert result["finite"]
        (line,) = results[0]["named"]  # rank 0 logs
        assert "at loss scale 8: 'head.bias'; the scale is now 4" in line

    def test_no_bit_changes_under_fsdp2_and_an_inf_on_one_rank_skips_on_all(self, ranks):
        for rank in ranks.straight:
            assert rank["sharded"]["weights"] == rank["sharded unscaled"]["weights"]
            assert rank["sharded inf"]["scale"] == [4.0, 4.0, 1, True]

    def test_too_many_skips_on_one_rank_stop_both(self, ranks):
        first, second = (rank["endless"] for rank in ranks.straight)

        assert first == second
        assert first["iter"] == 6
        assert (
            "got 4 iterations in a row with non-finite gradients, at the last in 'stem.weight';"
            in first["message"]
        )

    def test_a_float16_parameter_on_one_rank_stops_both_before_the_start(self, ranks):
        first, second = (rank["half on one"]["message"] for rank in ranks.straight)

        assert first == f"rank 1: LossScaleError: {second}"
        assert "2 trained parameters stored in float16 ('head.weight', 'head.bias')" in second
