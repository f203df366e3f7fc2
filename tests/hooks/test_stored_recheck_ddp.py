"""Errors and drift on one of two ranks: decided by both together. No rank waits for one that has raised.

The trainings are in tests/helpers/stored_recheck_worker.py. Where a rank does wait, gloo's timeout makes it an error.
"""

from __future__ import annotations

import pytest
from processes import launch
from stored_recheck_worker import DRIFTS, VARIANTS


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return launch("stored_recheck_worker.py", tmp_path_factory.mktemp("recheck_ddp"), ranks=2)


@pytest.mark.parametrize("drift", DRIFTS)
def test_what_moved_on_one_rank_is_put_back_and_both_go_on_as_if_nothing_had_happened(ranks, drift):
    for rank in ranks:
        assert "error" not in rank[f"restore_{drift}"]
        assert rank[f"restore_{drift}"]["state"] == rank["quiet"]["state"]
    assert (
        ranks[0][f"restore_{drift}"]["state"]["parameters"]
        == ranks[1][f"restore_{drift}"]["state"]["parameters"]
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_so_it_is_with_other_wrappers_and_optimizers(ranks, variant):
    for rank in ranks:
        assert "error" not in rank[f"{variant}_restore"]
        assert rank[f"{variant}_restore"]["state"] == rank[f"{variant}_quiet"]["state"]


def test_the_table_in_the_log_of_rank_0_says_which_rank_it_was(ranks):
    log = ranks[0]["restore_move_dtype"]["log"]
    rows = [line for line in log.splitlines() if "dtype moved" in line]
    assert [row.split()[1] for row in rows] == ["1", "1"]
    assert log.count("changed since they were put in place") == 1


@pytest.mark.parametrize("drift", DRIFTS)
def test_with_raise_both_raise_at_the_same_iteration(ranks, drift):
    for rank in ranks:
        result = rank[f"raise_{drift}"]
        assert result["error"].startswith("DriftError: DtypeOverrider at iteration 4: got")
        assert "on rank 1" in result["error"]
        assert result["iteration"] == 4


def test_with_warn_both_go_on(ranks):
    for rank in ranks:
        assert rank["warn"]["iteration"] == 6
    assert "Left as found" in ranks[0]["warn"]["log"]


@pytest.mark.parametrize(
    ("scenario", "said"),
    [
        ("start_other_names", r"SelectionError: DtypeOverrider.patterns: 'head' matched none"),
        ("start_scripted", "OverrideError: DtypeOverrider: head.forward: got a scripted module"),
    ],
)
def test_an_error_on_one_rank_at_the_start_is_raised_on_both(ranks, scenario, said):
    first, second = (rank[scenario]["error"] for rank in ranks)
    assert second.startswith(said)
    assert first.startswith(f"DtypeHooksError: rank 1: {said}")


def test_the_processes_train_on_after_such_errors(ranks):
    for rank in ranks:
        assert rank["after_the_errors"]["state"] == rank["quiet"]["state"]
