"""The recorder that the other tests rely on sees what runs, where, and in which dtype."""

from __future__ import annotations

import pytest
import torch
from dtype_recorder import record_dtypes
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

BF16, F32 = torch.bfloat16, torch.float32


def net():
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)))


def test_operators_are_attributed_to_the_innermost_module_in_forward_and_backward():
    model = net()
    with record_dtypes(model) as calls:
        model(torch.randn(2, 4)).sum().backward()
    forward = [(c.op, c.module) for c in calls.of(backward=False) if c.op in ("addmm", "native_layer_norm")]
    assert forward == [("addmm", "0"), ("native_layer_norm", "1.0"), ("addmm", "1.1")]
    assert {c.module for c in calls.of("mm", backward=True)} == {"0", "1.1"}
    assert {c.module for c in calls.of("native_layer_norm_backward")} == {"1.0"}
    assert [c.op for c in calls.of("addmm", "1")] == ["addmm"]


def test_casts_of_autocast_are_seen_where_they_happen():
    model = net()
    with record_dtypes(model) as calls, torch.autocast("cpu", BF16):
        model(torch.randn(2, 4))
    assert calls.dtypes("addmm") == {BF16}
    casts = calls.of("_to_copy", "0")
    assert casts
    assert all(c.inputs == (F32,) and c.outputs == (BF16,) for c in casts)


def test_recomputation_in_the_backward_is_attributed():
    model = net()
    with record_dtypes(model) as calls, set_checkpoint_early_stop(False):
        checkpoint(model, torch.randn(2, 4, requires_grad=True), use_reentrant=False).sum().backward()
    assert [c.module for c in calls.of("addmm", backward=False)] == ["0", "1.1"]
    assert {c.module for c in calls.of("addmm", backward=True)} == {"0", "1.1"}


def test_gradients_are_the_same_and_nothing_stays_behind():
    model, x, plain_call = net(), torch.randn(2, 4), nn.Module.__call__
    model(x).sum().backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with record_dtypes(model):
        model(x).sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True))
    with pytest.raises(KeyError), record_dtypes(model):
        raise KeyError
    assert nn.Module.__call__ is plain_call


def test_a_question_about_a_call_that_never_was_fails():
    model = net()
    with record_dtypes(model) as calls:
        model(torch.randn(2, 4))
    with pytest.raises(AssertionError, match="no addmm in 'head'"):
        calls.dtypes("addmm", "head")
