"""FSDP and other wrappers: stored dtypes are refused, computing in a dtype works or is refused with the reason.

FSDP2 runs on gloo: tests/helpers/stored_fsdp_worker.py. FSDP1 cannot even be built without an accelerator ("FSDP needs
a non-CPU accelerator device"), so that only an instance without its constructor stands here for it.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from mmengine.registry import MODEL_WRAPPERS
from processes import launch
from stored_fsdp_worker import COMPUTING, REFUSED
from stored_runs import Net, overrider, seeded, stored_runner
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from dtype_hooks import override_dtype
from dtype_hooks.errors import OverrideError
from dtype_hooks.hooks.runner import check_storable


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return launch("stored_fsdp_worker.py", tmp_path_factory.mktemp("fsdp"), ranks=2)


@pytest.mark.parametrize("scenario", COMPUTING)
def test_fsdp2_computes_in_the_dtype_as_an_unsharded_model_does(ranks, scenario):
    """Outputs and averaged gradients; under a MixedPrecisionPolicy the parameters come in its dtype, as by ``.to()``."""
    for rank in ranks:
        result = rank[scenario]
        assert result["sharded"] == result["by_hand"]
        assert result["sharded"]["output"] != result["without"]
        assert result["stored"] == ["torch.float32"]


@pytest.mark.parametrize("scenario", REFUSED)
def test_fsdp2_units_below_a_matched_module_must_be_matched_as_well(ranks, scenario):
    """Else they would put their own parameters in place of the casts, and the raw error is about mat1 and mat2."""
    for rank in ranks:
        message = rank[scenario]["error"]
        assert message.startswith(
            "OverrideError: override_dtype: 0.forward: got a module with the FSDP2 unit 'norm'"
        )
        assert "Let the patterns match '0.norm' too" in message


@pytest.mark.parametrize("what", ["parameters", "buffers"])
def test_fsdp2_refuses_stored_dtypes(ranks, what):
    for rank in ranks:
        assert rank[f"storing_{what}"].startswith(
            "OverrideError: override_dtype.override_parameters: got a model"
        )
        assert "FSDP2" in rank[f"storing_{what}"]


def test_fsdp2_in_a_runner_trains_as_ddp_does(ranks):
    for rank in ranks:
        assert "error" not in rank["runner_computing"]
        assert rank["runner_computing"]["fsdp2"] == rank["runner_computing"]["ddp"]


def test_fsdp2_in_a_runner_refuses_stored_dtypes(ranks):
    for rank in ranks:
        message = rank["runner_storing"]["error"]
        assert message.startswith(
            "OverrideError: DtypeOverrider.override_parameters: got a model wrapped by FSDP2"
        )
        assert "computing in the dtype needs no stored cast" in message


class UnbuiltFSDP1(FullyShardedDataParallel):
    def __init__(self, module):
        nn.Module.__init__(self)
        self._use_orig_params = True
        self._fsdp_wrapped_module = module

    def forward(self, *args, **kwargs):
        return self._modules["_fsdp_wrapped_module"](*args, **kwargs)


@MODEL_WRAPPERS.register_module()
class OtherWrapper(nn.Module):
    """A wrapper registered in mmengine that is no DDP; DeepSpeed's is another."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def train_step(self, data, optim_wrapper):
        return self.module.train_step(data, optim_wrapper)


def test_other_wrappers_refuse_stored_dtypes_in_a_runner(tmp_path):
    model = OtherWrapper(seeded())
    runner = stored_runner(tmp_path, model, [overrider(["norm"], override_parameters=True)])
    with pytest.raises(
        OverrideError, match="got a model wrapped by OtherWrapper, which keeps parameters of one dtype"
    ):
        runner.train()
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_fsdp1_refuses_stored_dtypes_in_a_runner():
    with pytest.raises(OverrideError, match="got a model wrapped by FSDP1"):
        check_storable(
            SimpleNamespace(model=UnbuiltFSDP1(nn.Linear(4, 4))), "DtypeOverrider.override_parameters"
        )


def test_fsdp1_below_the_root_refuses_stored_dtypes():
    model = nn.Sequential(nn.Linear(4, 4), UnbuiltFSDP1(nn.Linear(4, 4)))
    with pytest.raises(OverrideError, match="sharded by FSDP1"):
        override_dtype(model, ["0"], dtype="bfloat16", override_parameters=True)
    assert model[0].weight.dtype is torch.float32


def test_a_wrapper_of_the_users_own_computes_in_the_dtype(tmp_path):
    model = OtherWrapper(seeded(Net))
    runner = stored_runner(tmp_path, model, [overrider(["norm"])], iters=1)
    runner.train()
    assert "forward" in model.module.norm.__dict__
