from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

from dtype_hooks.hooks.checkpoints import allow_mmengine_checkpoints

SMALL_GPT = {
    "model.dim": 64,
    "model.num_layers": 2,
    "model.num_heads": 2,
    "train_dataloader.batch_size": 16,
    "train_cfg.max_iters": 30,
}
SMALL_RESNET = {"model.channels": (16, 32), "train_cfg.max_iters": 60}


def logged(runner: Runner, name: str) -> list[float]:
    """The values of one name in the run's scalars.json, in the order they were logged."""
    lines = (Path(runner.log_dir) / "vis_data" / "scalars.json").read_text().splitlines()
    return [entry[name] for entry in map(json.loads, lines) if name in entry]


def checkpoints_of(runner: Runner) -> set[str]:
    return {path.name for path in Path(runner.work_dir).glob("*.pth")}


def weights_are_equal(one: Runner, other: Runner) -> bool:
    states = one.model.state_dict(), other.model.state_dict()
    return states[0].keys() == states[1].keys() and all(
        torch.equal(states[0][name], states[1][name]) for name in states[0]
    )


def test_gpt_learns_within_thirty_iterations_and_logs_beside_the_baselines(train):
    runner = train("gpt_pydoc.py", SMALL_GPT)

    train_losses, (val_bpc,) = logged(runner, "loss")[:-1], logged(runner, "bpc")[-1:]
    assert len(train_losses) == 30
    assert train_losses[0] == pytest.approx(4.57, abs=0.1)
    assert val_bpc < logged(runner, "unigram_bpc")[0]
    assert logged(runner, "bigram_bpc")[0] < logged(runner, "unigram_bpc")[0]
    assert checkpoints_of(runner) == {"iter_30.pth"}


def test_gpt_in_the_python_style_trains_to_the_same_weights(train):
    short = {**SMALL_GPT, "train_cfg.max_iters": 3}

    classic = train("gpt_pydoc.py", short, work_dir="classic")
    lazy = train("gpt_pydoc_lazy.py", short, work_dir="lazy")

    assert weights_are_equal(classic, lazy)


def test_norms_and_head_compute_in_float32_under_the_config(train):
    dtypes = {}

    runner = train("gpt_pydoc.py", {**SMALL_GPT, "train_cfg.max_iters": 1})
    for name in ("blocks.0.attn", "blocks.0.norm1", "head"):
        runner.model.get_submodule(name).register_forward_hook(
            lambda module, inputs, output, name=name: dtypes.update({name: output.dtype})
        )
    runner.model(torch.zeros(1, 8, dtype=torch.int64))

    # The overrides outlive the training: without them the head gives bfloat16.
    assert dtypes == {"blocks.0.attn": torch.bfloat16, "blocks.0.norm1": torch.float32, "head": torch.float32}


def test_each_block_computes_in_the_dtype_that_the_config_names(train):
    dtypes = {}
    names = {f"blocks.{i}.{part}": i for i in range(3) for part in ("attn.qkv", "mlp.up")}
    options = {**SMALL_GPT, "model.num_layers": 3}

    runner = train("gpt_pydoc_nodes.py", options)
    for name in (*names, "head"):
        runner.model.get_submodule(name).register_forward_hook(
            lambda module, inputs, output, name=name: dtypes.update({name: output.dtype})
        )
    runner.model(torch.zeros(1, 8, dtype=torch.int64))

    wanted = (torch.bfloat16, torch.float16, torch.float32)
    assert {name: dtypes[name] for name in names} == {name: wanted[i] for name, i in names.items()}
    assert dtypes["head"] is torch.float32
    assert logged(runner, "bpc")[-1] < logged(runner, "unigram_bpc")[0]


@HOOKS.register_module()
class InfiniteGradient(Hook):
    """Makes the gradient infinite behind one layer in one iteration, which counts from 1."""

    def __init__(self, iteration: int, layer: str) -> None:
        self.iteration, self.layer = iteration, layer

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter + 1 == self.iteration:
            layer = runner.model.get_submodule(self.layer)
            self.handle = layer.register_forward_hook(
                lambda module, inputs, output: output.register_hook(lambda g: g * torch.inf) and None
            )

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        if runner.iter + 1 == self.iteration:
            self.handle.remove()


def test_gpt_in_float16_ends_where_float32_does_through_an_overflow(train):
    full = train("gpt_pydoc.py", {**SMALL_GPT, "custom_hooks": []}, "full")
    path = Path(__file__).parents[2] / "configs" / "gpt_pydoc_fp16.py"
    overflow = {"type": "InfiniteGradient", "iteration": 20, "layer": "blocks.0.norm1"}
    hooks = [*Config.fromfile(path).custom_hooks, overflow]
    half = train("gpt_pydoc_fp16.py", {**SMALL_GPT, "custom_hooks": hooks, "log_level": "INFO"}, "half")

    assert logged(half, "bpc")[-1] == pytest.approx(logged(full, "bpc")[-1], rel=0.02)
    assert logged(half, "skipped_steps")[18:21] == [0, 1, 1]
    assert logged(half, "grad_scale")[18:21] == [65536, 32768, 32768]
    (path,) = Path(half.log_dir).glob("*.log")
    (line,) = [line for line in path.read_text().splitlines() if "step skipped" in line]
    assert "at iteration 20: step skipped, the gradients of 4 of 29 parameters were not finite" in line
    names = (
        "token_embedding.weight",
        "position_embedding.weight",
        "blocks.0.norm1.weight",
        "blocks.0.norm1.bias",
    )
    assert f"{', '.join(map(repr, names))}; the scale is now 32768" in line


def test_digits_are_told_apart_within_sixty_iterations(train):
    runner = train("digits_resnet.py", {**SMALL_RESNET, "param_scheduler.T_max": 60})

    losses = logged(runner, "loss")
    assert losses[0] > 2.0
    assert losses[-1] < 0.5
    assert logged(runner, "accuracy")[-1] > 90
    assert checkpoints_of(runner) == {"iter_60.pth"}
    assert runner.test()["accuracy"] > 90


@pytest.mark.parametrize(
    ("name", "options"), [("gpt_pydoc.py", SMALL_GPT), ("digits_resnet.py", SMALL_RESNET)]
)
def test_resumed_training_ends_in_the_weights_of_an_unbroken_one(train, name, options):
    unbroken = train(name, {**options, "train_cfg.max_iters": 5}, work_dir="unbroken")

    train(name, {**options, "train_cfg.max_iters": 2}, work_dir="broken")
    with allow_mmengine_checkpoints():
        resumed = train(name, {**options, "train_cfg.max_iters": 5, "resume": True}, work_dir="broken")

    assert resumed.iter == 5
    assert weights_are_equal(unbroken, resumed)


def test_gpt_with_its_scales_on_record_writes_file_and_pictures(train):
    runner = train(
        "gpt_pydoc_scales.py", {**SMALL_GPT, "train_cfg.max_iters": 4, "custom_hooks.2.interval": 2}, "scales"
    )

    folder = Path(runner.log_dir)
    rows = [json.loads(line) for line in (folder / "scales.jsonl").read_text().splitlines()]
    assert {row["iter"] for row in rows} == {2, 4}
    assert {row["grad_scale"] for row in rows if row["direction"] == "backward"} == {65536.0}
    assert {"blocks.0.attn:scaled_dot_product_attention", "head:linear"} <= {row["name"] for row in rows}
    assert (folder / "scales" / "layers_activation.png").stat().st_size > 10_000
