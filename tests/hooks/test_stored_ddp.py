"""Stored dtypes under DDP: two ranks, each with its own data, against a model that was cast before it was wrapped.

The trainings are in tests/helpers/stored_ddp_worker.py; one torchrun start runs them all.
"""

from __future__ import annotations

import pytest
from processes import launch
from stored_ddp_worker import SCENARIOS, TWO


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return launch("stored_ddp_worker.py", tmp_path_factory.mktemp("ddp"), ranks=2)


def test_the_ranks_are_given_different_data(ranks):
    assert ranks[0]["data"] != ranks[1]["data"]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_rank_trains_like_one_whose_model_was_cast_before_it_was_wrapped(ranks, scenario):
    for rank in ranks:
        result = rank[scenario]
        assert result["hook"] == result["before"]
        assert result["hook"]["optimizer"]
        if scenario == "ema":
            assert result["hook"]["ema"]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_parameters_are_stored_in_the_dtype_and_so_are_optimizer_states(ranks, scenario):
    patterns = SCENARIOS[scenario].get("patterns", TWO)
    dtype = SCENARIOS[scenario].get("dtype", "bfloat16")
    result = ranks[0][scenario]["hook"]
    for what in ("parameters", "optimizer"):
        for name, text in result[what].items():
            if not name.endswith(".step"):
                expected = dtype if any(pattern in name for pattern in patterns) else "float32"
                assert text.startswith(f"{expected} "), name


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_ranks_keep_the_same_parameters_and_optimizer_states(ranks, scenario):
    first, second = (rank[scenario]["hook"] for rank in ranks)
    assert first["parameters"] == second["parameters"]
    assert first["optimizer"] == second["optimizer"]


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_naive_cast_in_before_train_stops_or_trains_otherwise(ranks, scenario):
    """So that the tests above are known to see it."""
    naive, before = ranks[0][scenario]["naive"], ranks[0][scenario]["before"]
    assert "error" not in before
    assert "error" in naive or naive["parameters"] != before["parameters"]


def test_with_all_parameters_matched_the_naive_cast_lets_the_ranks_drift_apart(ranks):
    first, second = (rank["all_parameters"]["naive"] for rank in ranks)
    assert first["parameters"] != second["parameters"]


@pytest.mark.parametrize("scenario", ["gradients_one", "gradients_all"])
def test_gradients_are_the_same_on_all_ranks_in_every_iteration(ranks, scenario):
    first, second = (rank[scenario] for rank in ranks)
    assert len(first) == 2
    assert len(first[0]) == 10
    assert first == second


@pytest.mark.parametrize(
    ("scenario", "setting", "value"),
    [
        ("find_unused", "find_unused_parameters", True),
        ("static_graph", "static_graph", True),
        ("bucket_view", "gradient_as_bucket_view", True),
        ("bucket_view", "bucket_bytes_cap", int(0.0005 * 1024 * 1024)),
        ("no_broadcast", "broadcast_buffers", False),
    ],
)
def test_the_wrapper_keeps_its_settings(ranks, scenario, setting, value):
    assert ranks[0][scenario]["more"][setting] == value


def test_a_wrapper_class_of_the_users_own_keeps_its_argument_and_its_communication_hook(ranks):
    for rank in ranks:
        about = rank["own_wrapper"]["more"]
        assert about == {"class": "CompressingDDP", "own": "kept", "calls": about["calls"]}
        assert about["calls"] >= 6  # one bucket or more, in each of six iterations
        # what went through float16 is not what plain DDP trains
        assert rank["own_wrapper"]["hook"]["parameters"] != rank["plain"]["hook"]["parameters"]
        assert rank["comm_hook_of_a_hook"]["hook"]["parameters"] != rank["plain"]["hook"]["parameters"]
