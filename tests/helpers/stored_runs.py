"""Small trainings with stored dtypes, and what is left of one as text that two processes can compare."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from mmengine.hooks import EMAHook, Hook
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapperDict
from mmengine.runner import Runner
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

from dtype_hooks.hooks.runner import bare_model

_count = itertools.count()

ADAMW = {"type": "AdamW", "lr": 0.01, "foreach": True}
FUSED_ADAMW = {"type": "AdamW", "lr": 0.01, "fused": True}
SGD = {"type": "SGD", "lr": 0.05, "momentum": 0.9}
OPTIMIZERS = {"sgd": SGD, "adamw": ADAMW, "adamw_fused": FUSED_ADAMW}


class Rows(Dataset):
    """Eight numbers in, four out."""

    def __init__(self, rows: int = 128) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(rows, 8, generator=generator)
        self.y = torch.randn(rows, 4, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "y": self.y[index]}


class Net(BaseModel):
    """stem -> norm -> mid -> bn -> norm once more -> head, with a layer that nothing uses if asked."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.mid = nn.Linear(16, 16)
        self.bn = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 4)
        if unused:
            self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor, y: Tensor, mode: str = "loss") -> Any:
        h = self.norm(self.stem(x).relu())
        h = self.norm(self.bn(self.mid(h)).relu())
        loss = F.mse_loss(self.head(h), y)
        return {"loss": loss} if mode == "loss" else [loss]


def seeded(build: Callable[[], nn.Module] = Net, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return build()


def store(model: nn.Module, patterns: Sequence[str], dtype: torch.dtype, buffers: bool = False) -> None:
    """The reference: cast by hand what the rule would store, before anything has seen the model."""
    for name, module in model.named_modules():
        if any(pattern in name.replace("module.", "") for pattern in patterns):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
            for key, buffer in list(module._buffers.items()):
                if buffers and buffer.is_floating_point():
                    module._buffers[key] = buffer.to(dtype)


def overrider(patterns: Sequence[str], dtype: str = "bfloat16", **kwargs: Any) -> dict[str, Any]:
    return {"type": "DtypeOverrider", "patterns": list(patterns), "dtype": dtype, **kwargs}


class CastDataInBeforeTrain(Hook):
    """The naive way: right before training, behind the back of whatever has seen the parameters."""

    def __init__(self, patterns: Sequence[str], dtype: torch.dtype, buffers: bool = False) -> None:
        self.given = (patterns, dtype, buffers)

    def before_train(self, runner: Runner) -> None:
        store(bare_model(runner), *self.given)


class At(Hook):
    """Does something to the bare model after the training iterations in ``when``, which count from 1.

    Before DtypeOverrider's look at the same iteration, or ``late``, after it.
    """

    priority = "VERY_HIGH"

    def __init__(
        self, when: int | Sequence[int], act: Callable[[Any, Any], None], late: bool = False, rank: int = 0
    ) -> None:
        self.when = [when] if isinstance(when, int) else when
        self.act = act
        self.rank = rank
        if late:
            self.priority = "VERY_LOW"

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        if runner.iter + 1 in self.when and runner.rank == self.rank:
            self.act(bare_model(runner), runner)


def move_dtype(model: nn.Module, runner: Any) -> None:
    """What a library does that calls ``.float()`` on a part of the model."""
    model.norm.float()


def move_dtype_with_states(model: nn.Module, runner: Any) -> None:
    """The same, with optimizer states made to follow."""
    model.norm.float()
    for optimizer in _optimizers(runner):
        optimizer.load_state_dict(optimizer.state_dict())


def replace_parameter(model: nn.Module, runner: Any) -> None:
    """A new Parameter of the same values that the optimizer does not know."""
    model.norm.weight = nn.Parameter(model.norm.weight.detach().float())


def replace_parameter_everywhere(model: nn.Module, runner: Any) -> None:
    """A new Parameter of the same values that has the old one's place in the optimizer."""
    old = model.norm.weight
    replace_parameter(model, runner)
    for optimizer in _optimizers(runner):
        for group in optimizer.param_groups:
            group["params"] = [model.norm.weight if p is old else p for p in group["params"]]
        if old in optimizer.state:
            optimizer.state[model.norm.weight] = optimizer.state.pop(old)
        optimizer.load_state_dict(optimizer.state_dict())


def replace_module(model: nn.Module, runner: Any) -> None:
    """A new module of the same values, not overridden."""
    new = nn.LayerNorm(16)
    new.load_state_dict(model.norm.state_dict())
    model.norm = new


def delete_forward(model: nn.Module, runner: Any) -> None:
    del model.norm.__dict__["forward"]


def overwrite_forward(model: nn.Module, runner: Any) -> None:
    """Somebody's own method in the place of the override."""
    norm = model.norm
    norm.forward = lambda x: F.layer_norm(x, (16,), norm.weight.to(x.dtype), norm.bias.to(x.dtype))


def move_buffers(model: nn.Module, runner: Any) -> None:
    model.bn.float()


def stored_runner(
    work_dir: Path | str,
    model: nn.Module,
    hooks: Sequence[Any] = (),
    iters: int = 6,
    optimizer: dict | None = None,
    accumulate: int = 1,
    wrapper: dict | None = None,
    runner_type: type = Runner,
    save_at: int | None = None,
    cfg: dict | None = None,
    **kwargs: Any,
) -> Any:
    """A Runner over :class:`Rows`, on as many ranks as there are, each with its own batches."""
    distributed = torch.distributed.is_initialized() and kwargs.get("launcher") != "none"
    cfg = dict(cfg or {})
    if distributed and runner_type is Runner:
        cfg["model_wrapper_cfg"] = {
            "type": "MMDistributedDataParallel",
            "device_ids": None,
            **(wrapper or {}),
        }
    if runner_type is not Runner:
        kwargs["env_cfg"] = {}
    optim_wrapper = kwargs.pop("optim_wrapper", None) or {
        "type": "OptimWrapper",
        "optimizer": dict(optimizer or ADAMW),
        "accumulative_counts": accumulate,
    }
    checkpoint = {"type": "CheckpointHook", "interval": save_at, "by_epoch": False} if save_at else None
    return runner_type(
        model=model,
        work_dir=str(work_dir),
        train_dataloader=kwargs.pop("train_dataloader", None)
        or {
            "batch_size": 4,
            "dataset": Rows(),
            "sampler": {"type": "DefaultSampler", "shuffle": True, "seed": 3},
            "collate_fn": {"type": "default_collate"},
        },
        train_cfg={"by_epoch": False, "max_iters": iters, "val_interval": 10_000},
        optim_wrapper=optim_wrapper,
        custom_hooks=list(hooks),
        default_hooks={"checkpoint": checkpoint, "sampler_seed": None},
        launcher=kwargs.pop("launcher", "pytorch" if distributed else "none"),
        cfg=cfg,
        randomness={"seed": 0},
        experiment_name=f"stored_run_{next(_count)}",  # names are global to the process
        **kwargs,
    )


def digest(tensor: Tensor) -> str:
    """The dtype and a hash of the bits."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{str(tensor.dtype).removeprefix('torch.')} {hashlib.md5(raw).hexdigest()[:12]}"


def state_of(runner: Any) -> dict[str, dict[str, str]]:
    """Digests of ``parameters``, ``buffers``, ``optimizer`` states and ``ema``, by name."""
    model = bare_model(runner)
    names = {id(p): name.replace("module.", "") for name, p in model.named_parameters()}
    return {
        "parameters": {names[id(p)]: digest(p) for p in model.parameters()},
        "buffers": {name.replace("module.", ""): digest(b) for name, b in model.named_buffers()},
        "optimizer": {
            f"{names.get(id(p), 'not in the model')}.{key}": digest(value)
            for optimizer in _optimizers(runner)
            for p, state in optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        },
        "ema": {
            name: digest(value)
            for hook in runner.hooks
            if isinstance(hook, EMAHook)
            for name, value in hook.ema_model.state_dict().items()
        },
    }


def train(runner: Any) -> dict[str, Any]:
    """Train and return :func:`state_of`, or ``{"error": ...}`` where a RuntimeError of torch stopped it."""
    try:
        runner.train()
    except RuntimeError as error:
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    return state_of(runner)


def log_text(runner: Any) -> str:
    """What stands in the run's log file, lines joined that the log does not break itself."""
    (path,) = Path(runner.log_dir).glob("*.log")
    return path.read_text()


def _optimizers(runner: Any) -> Iterator[torch.optim.Optimizer]:
    wrapper = runner.optim_wrapper
    for each in wrapper.values() if isinstance(wrapper, OptimWrapperDict) else [wrapper]:
        yield each.optimizer
