"""Models of the transformers package with norms and a tied head, or whole blocks, stored in bf16."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from processes import launch

pytest.importorskip("transformers")

from stored_transformers_worker import MODELS, trained


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("transformers")
    phases = ("straight", "resumed")
    return SimpleNamespace(
        **{phase: launch("stored_transformers_worker.py", folder, phase, ranks=2) for phase in phases}
    )


@pytest.mark.parametrize("model", MODELS)
def test_alone_it_trains_and_resumes_like_a_model_cast_before(tmp_path, model):
    with_hook = trained(tmp_path, model, "hook")
    assert with_hook == trained(tmp_path, model, "before")
    assert with_hook == trained(tmp_path, model, "hook", resume=True)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_train_like_one_model_cast_before_it_was_wrapped(on_two_ranks, model):
    for rank in on_two_ranks.straight:
        with_hook = rank[f"{model}_hook"]
        assert with_hook == rank[f"{model}_before"]
        stored = {name for name, text in with_hook["parameters"].items() if text.startswith("bfloat16 ")}
        assert 0 < len(stored) < len(with_hook["parameters"])
    first, second = (rank[f"{model}_hook"] for rank in on_two_ranks.straight)
    assert first["parameters"] == second["parameters"]
    assert first["optimizer"] == second["optimizer"]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_two_fresh_ranks_resume_bit_for_bit(on_two_ranks, model):
    for straight, resumed in zip(on_two_ranks.straight, on_two_ranks.resumed, strict=True):
        assert resumed[f"{model}_hook"] == straight[f"{model}_hook"]
        assert resumed[f"{model}_before"] == straight[f"{model}_hook"]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_the_naive_cast_in_before_train_stops_or_trains_otherwise(on_two_ranks, model):
    naive, before = (on_two_ranks.straight[0][f"{model}_{kind}"] for kind in ("naive", "before"))
    assert "error" not in before
    assert "error" in naive or naive["parameters"] != before["parameters"]
