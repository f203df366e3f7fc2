"""What a distributed start without a GPU needs of a config."""

import pytest
import torch
import torch.distributed
from mmengine.config import Config

from dtype_hooks.errors import ConfigError
from dtype_hooks.hooks.launch import prepare_distributed

RENDEZVOUS = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="what it changes, it changes without a GPU")


@pytest.fixture
def launched(monkeypatch):
    """One process, as torchrun would start it."""
    for name, value in RENDEZVOUS.items():
        monkeypatch.setenv(name, value)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def prepared(**values):
    cfg = Config({"launcher": "pytorch", **values})
    prepare_distributed(cfg)
    return cfg


def test_group_runs_over_gloo(launched):
    prepared(env_cfg={"dist_cfg": {"backend": "nccl", "timeout": 60}})
    assert torch.distributed.get_backend() == "gloo"


def test_wrapper_is_mmengines_own_but_for_the_device(launched):
    assert prepared(find_unused_parameters=True).model_wrapper_cfg == {
        "type": "MMDistributedDataParallel",
        "broadcast_buffers": False,
        "find_unused_parameters": True,
        "device_ids": None,
    }


def test_users_wrapper_only_gets_the_device(launched):
    wrapper = {"type": "MMSeparateDistributedDataParallel", "static_graph": True}
    assert prepared(model_wrapper_cfg=wrapper).model_wrapper_cfg == {**wrapper, "device_ids": None}


@pytest.mark.parametrize(
    "wrapper",
    [{"type": "MMDistributedDataParallel", "device_ids": [0]}, {"type": "MMFullyShardedDataParallel"}],
)
def test_users_device_and_other_wrappers_stay(wrapper, launched):
    assert prepared(model_wrapper_cfg=wrapper).model_wrapper_cfg == wrapper


def test_flexible_runner_is_told_by_its_strategy(launched):
    cfg = prepared(runner_type="FlexibleRunner")
    assert cfg.strategy.type == "DDPStrategy"
    assert cfg.strategy.model_wrapper.device_ids is None
    assert "model_wrapper_cfg" not in cfg


def test_process_that_torchrun_did_not_start_is_refused(launched, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(
        ConfigError,
        match=r"^launcher: got 'pytorch' without LOCAL_RANK in the environment; expected .*torchrun",
    ):
        prepared()
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("launcher", ["slurm", "mpi"])
def test_launchers_that_need_a_gpu_are_refused(launcher):
    with pytest.raises(
        ConfigError, match=f"^launcher: got '{launcher}' on a CPU; expected 'pytorch' or 'none'"
    ):
        prepared(launcher=launcher)
