"""From a config to a runner: what a training script does between ``Config.fromfile`` and ``runner.train()``."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed
from mmengine._strategy import DDPStrategy
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.dist import is_distributed
from mmengine.registry import MODEL_WRAPPERS, RUNNERS, STRATEGIES, Registry
from mmengine.runner import FlexibleRunner
from torch.nn.parallel import DistributedDataParallel

from dtype_hooks.errors import ConfigError

_RENDEZVOUS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def build_runner(cfg: Config) -> Any:
    """Build the runner of a config: mmengine's Runner, or what its ``runner_type`` names. Changes ``cfg`` in place.

    Where its ``launcher`` is set and not ``'none'``, :func:`prepare_distributed` comes first.

    Args:
        cfg: a config with ``model`` and ``work_dir``, which :func:`~dtype_hooks.hooks.config.prepare_config` has seen.

    Returns:
        The runner, ready for ``train()``.

    Raises:
        ConfigError: as for :func:`prepare_distributed`; mmengine's own errors pass through.
    """
    if _is_flexible(cfg) and cfg.get("env_cfg") is None:
        # FlexibleRunner's own default, which its from_cfg overwrites with None and then needs
        cfg["env_cfg"] = {"dist_cfg": {"backend": "nccl"}}
    if cfg.get("launcher", "none") != "none":
        prepare_distributed(cfg)
    return RUNNERS.build(cfg)


def prepare_distributed(cfg: Config) -> None:
    """Make mmengine's distributed start work without a GPU. Changes ``cfg`` in place; with a GPU it only checks.

    mmengine 0.10 fails twice on a CPU: its launcher calls ``torch.cuda.set_device``, and its DDP wrapper gets
    ``device_ids=[LOCAL_RANK]``. So the process group is started here, over gloo, which makes mmengine pass over its
    launcher; and the wrapper is told ``device_ids=None`` where the user has not said otherwise.

    Args:
        cfg: a config whose ``launcher`` is not ``'none'``.

    Raises:
        ConfigError: if the process was not started by a launcher, or by one that mmengine can only use with a GPU.
    """
    launcher = cfg["launcher"]
    if launcher == "pytorch" and not is_distributed():
        _check_rendezvous()
    if get_device() != "cpu":
        return
    if not is_distributed():
        _start_gloo(launcher, (cfg.get("env_cfg") or {}).get("dist_cfg") or {})
    if _is_flexible(cfg):
        _default_strategy(cfg)
    else:
        _default_wrapper(cfg)


def _check_rendezvous() -> None:
    missing = [name for name in _RENDEZVOUS if name not in os.environ]
    if missing:
        raise ConfigError(
            f"launcher: got 'pytorch' without {', '.join(missing)} in the environment; expected a process started by "
            "torchrun; start it as `torchrun --nproc-per-node 2 tools/train.py CONFIG`, or use --launcher none"
        )


def _start_gloo(launcher: str, dist_cfg: Any) -> None:
    if launcher != "pytorch":
        raise ConfigError(
            f"launcher: got {launcher!r} on a CPU; expected 'pytorch' or 'none' there; start the processes with torchrun"
        )
    timeout = dist_cfg.get("timeout")
    torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=timeout) if timeout else None)


def _default_wrapper(cfg: Config) -> None:
    """Give ``model_wrapper_cfg`` what Runner would take for it, but for the device."""
    if cfg.get("model_wrapper_cfg") is None:
        unused = cfg.get("find_unused_parameters", False)
        cfg["model_wrapper_cfg"] = {"broadcast_buffers": False, "find_unused_parameters": unused}
    _default_device_ids(cfg["model_wrapper_cfg"])


def _default_strategy(cfg: Config) -> None:
    """FlexibleRunner's DDPStrategy reads its own ``model_wrapper`` instead; FSDP's and others need a GPU."""
    if cfg.get("strategy") is None:
        cfg["strategy"] = {"type": "DDPStrategy"}
    strategy = cfg["strategy"]
    if _resolved(STRATEGIES, strategy["type"]) is DDPStrategy:
        strategy.setdefault("model_wrapper", {"broadcast_buffers": False})
        _default_device_ids(strategy["model_wrapper"])


def _default_device_ids(wrapper: Any) -> None:
    wrapper.setdefault("type", "MMDistributedDataParallel")
    if _is_subclass(_resolved(MODEL_WRAPPERS, wrapper["type"]), DistributedDataParallel):
        wrapper.setdefault("device_ids", None)


def _is_flexible(cfg: Config) -> bool:
    return _is_subclass(_resolved(RUNNERS, cfg.get("runner_type")), FlexibleRunner)


def _is_subclass(kind: Any, base: type) -> bool:
    return isinstance(kind, type) and issubclass(kind, base)


def _resolved(registry: Registry, kind: Any) -> Any:
    """The class of a ``type``, which is a name or the class itself."""
    return registry.get(kind) if isinstance(kind, str) else kind
