"""The first NaN or Inf of a run, by name: in recorded steps, and between them by running the batch again."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper, OptimWrapperDict
from stored_runs import digest, state_of
from torch import Tensor, nn
from torch.nn import functional as F
from tracked_runs import (
    ADAMW,
    SGD,
    Losses,
    Net,
    Plain,
    left_of,
    log_of,
    seeded,
    tracked,
)

from dtype_hooks.errors import NonFiniteError

NAN = float("nan")
AT = 3
"""The iteration in which something bad is planted."""

BOTH = {
    "sampled": {"interval": 1},
    "watched": {"interval": 0, "watch_nonfinite": True},
    "sampled and watched": {"interval": 1, "watch_nonfinite": True},
}


class Planted(Net):
    """In its third step of training something is planted: ``where`` says what."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.steps = where, torch.zeros((), dtype=torch.int64)
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, y: Tensor, mode: str = "loss") -> Any:
        self.step += 1
        now = int(self.step) == AT
        h = self.bn(self.stem(x))
        if now and self.where == "forward":
            h = h + (h * 0 - 1).log()
        if now and self.where == "backward":
            h = h + (h * 0).abs().sqrt()
        h = self.block(h)
        losses = {"loss": F.mse_loss(self.head(h), y)}
        if now and self.where == "loss":
            losses["loss_log"] = (h.mean() * 0 - 1).log()
        if now and self.where == "loss alone":
            losses["loss_log"] = torch.tensor(-1.0).log()
        return losses


class BadBatch(Hook):
    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter + 1 == AT:
            data_batch["x"][1, 2] = NAN


class BadWeights(Hook):
    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter + 1 == AT:
            with torch.no_grad():
                runner.model.head.weight[0, 0] = NAN


PLANTED: dict[str, tuple[list[Hook], str]] = {
    "forward": (
        [],
        "32 NaN from 'log' outside of the model's submodules (':log'), forward, from finite inputs",
    ),
    "backward": (
        [],
        "in the gradient of ':abs' from the backward of 'sqrt' outside of the model's submodules",
    ),
    "loss": ([], "1 NaN from 'log' outside of the model's submodules (':log'), forward, from finite inputs"),
    "loss alone": (
        [],
        "1 NaN from 'log' outside of the model's submodules (':log'), forward, from finite inputs",
    ),
    "bad batch": (
        [BadBatch()],
        "1 NaN in what the model was called with, ':input[x]': the batch was bad already",
    ),
    "bad weights": (
        [BadWeights()],
        "1 NaN in the parameter 'head.weight' before the step: the weights were bad",
    ),
}


def planted(work_dir: Path, where: str, tracker: dict[str, Any], **kwargs: Any) -> Any:
    hooks = [*PLANTED[where][0], *kwargs.pop("hooks", ())]
    return tracked(work_dir, tracker, lambda: Planted(where), hooks, **{"iters": 4, **kwargs})


@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize("where", PLANTED)
def test_it_is_named_where_it_came_from_and_training_goes_on_as_without(where: str, how: str, tmp_path: Path):
    losses, without = Losses(), Losses()
    runner = planted(tmp_path / "with", where, BOTH[how], hooks=[losses])
    runner.train()
    left = left_of(runner, losses)
    bare = tracked(tmp_path / "without", None, lambda: Planted(where), [*PLANTED[where][0], without], iters=4)
    bare.train()
    assert json.dumps(left) == json.dumps(left_of(bare, without))
    log = log_of(runner)
    assert log.count(f"ScaleTracker at iteration {AT} ") == 1
    assert PLANTED[where][1] in log


@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize("where", ["forward", "backward", "bad batch", "bad weights"])
def test_raise_stops_with_that_message_and_watched_weights_are_those_before_the_step(
    where: str, how: str, tmp_path: Path
):
    weights: list[dict] = []

    class Keep(Hook):
        priority = "LOWEST"

        def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
            weights.append(state_of(runner))

    runner = planted(tmp_path, where, {**BOTH[how], "on_nonfinite": "raise"}, hooks=[Keep()], optimizer=ADAMW)
    with pytest.raises(NonFiniteError) as caught:
        runner.train()
    assert PLANTED[where][1] in str(caught.value)
    assert str(caught.value).endswith("Training stops: on_nonfinite='raise'.")
    assert runner.iter == AT - 1
    after = state_of(runner)
    if "watched" in how:
        assert after["parameters"] == weights[-1]["parameters"]
        assert after["optimizer"] == weights[-1]["optimizer"]
    assert "step" not in runner.optim_wrapper.optimizer.__dict__


@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize("by_epoch", [False, True])
def test_a_checkpoint_that_is_due_is_written_before_it_is_raised(how: str, by_epoch: bool, tmp_path: Path):
    checkpoint = {"type": "CheckpointHook", "interval": 1 if by_epoch else AT, "by_epoch": by_epoch}
    runner = planted(tmp_path, "forward", {**BOTH[how], "on_nonfinite": "raise"})
    from mmengine.runner import EpochBasedTrainLoop
    from tracked_runs import Rows

    runner.register_hook(checkpoint)
    if by_epoch:
        loader = torch.utils.data.DataLoader(Rows(4 * AT), batch_size=4)
        runner._train_loop = EpochBasedTrainLoop(runner, loader, max_epochs=2)
    with pytest.raises(NonFiniteError, match="'log'"):
        runner.train()
    assert runner.iter == (AT if by_epoch else AT - 1)
    assert (tmp_path / ("epoch_1.pth" if by_epoch else f"iter_{AT}.pth")).is_file()


def test_at_the_last_iteration_a_checkpoint_by_epoch_is_still_written(tmp_path: Path):
    runner = planted(tmp_path, "forward", {"interval": 1, "on_nonfinite": "raise"}, iters=AT)
    runner.register_hook({"type": "CheckpointHook", "interval": 1, "by_epoch": True})
    with pytest.raises(NonFiniteError, match="'log'"):
        runner.train()
    assert list(tmp_path.glob("epoch_*.pth"))


def test_each_is_told_once_and_bad_weights_once(tmp_path: Path):
    class Always(Plain):
        def forward(self, x: Tensor, y: Tensor, mode: str = "loss") -> Any:
            return {"loss": super().forward(x, y)["loss"] * (self.norm(self.stem(x)) * 0 - 1).log().sum()}

    runner = tracked(tmp_path, {"interval": 1, "watch_nonfinite": True}, Always, iters=5)
    runner.train()
    assert log_of(runner).count("from 'log'") == 1
    assert log_of(runner).count("the weights were bad already") == 1


@pytest.mark.parametrize("how", ["sampled", "watched"])
def test_ignore_says_nothing_and_looks_at_nothing(how: str, tmp_path: Path):
    runner = planted(tmp_path, "forward", {**BOTH[how], "on_nonfinite": "ignore"})
    runner.train()
    assert "ScaleTracker at iteration" not in log_of(runner)


def test_the_last_recorded_steps_are_in_a_file_and_the_message_names_it(tmp_path: Path):
    """S27."""
    runner = planted(tmp_path, "forward", {"interval": 1, "frames": 2, "on_nonfinite": "raise"})
    with pytest.raises(NonFiniteError) as caught:
        runner.train()
    path = Path(runner.log_dir) / f"nonfinite_{AT}.jsonl"
    assert f"The last 2 recorded steps: {path}" in str(caught.value)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {row["iter"] for row in rows} == {AT - 1, AT}
    assert {"stem.weight", "stem:linear", ":log"} <= {row["name"] for row in rows}
    assert "  from:\n    :sub " in str(caught.value)
    assert "  before it:\n" in str(caught.value)


# Loss scaling


class Overflows(Plain):
    """A gradient that passes float16's maximum when it is scaled."""

    def forward(self, x: Tensor, y: Tensor, mode: str = "loss") -> Any:
        h = self.head(F.gelu(self.norm(self.stem(x))))
        return {"loss": F.mse_loss(h.float(), y) * self.factor(h)}

    def factor(self, h: Tensor) -> Tensor | float:
        return 100.0


def scaled(scale: float) -> dict[str, Any]:
    return {"type": "AutocastHook", "dtype": "float16", "loss_scale": scale}


@pytest.mark.parametrize("how", BOTH)
@pytest.mark.parametrize("optimizer", [SGD, {**ADAMW, "fused": True}])
def test_a_scaled_gradient_that_overflows_is_routine(how: str, optimizer: dict[str, Any], tmp_path: Path):
    """A fused optimizer steps, and leaves the step out itself."""
    tracker = {**BOTH[how], "on_nonfinite": "raise"}
    runner = tracked(tmp_path, tracker, Overflows, [scaled(2.0**20)], iters=2, optimizer=optimizer)
    runner.train()
    assert "step skipped" in log_of(runner)
    assert "ScaleTracker at iteration" not in log_of(runner)


@pytest.mark.parametrize("how", BOTH)
def test_a_loss_that_is_not_finite_is_none(how: str, tmp_path: Path):
    class Bad(Overflows):
        def factor(self, h: Tensor) -> Tensor:
            return (h.float().mean() * 0).log()

    runner = tracked(tmp_path, BOTH[how], Bad, [scaled(2.0)], iters=2)
    runner.train()
    assert "1 Inf from 'log'" in log_of(runner)
    losses = Losses()
    without = tracked(tmp_path / "without", None, Bad, [scaled(2.0), losses], iters=2)
    without.train()
    assert state_of(runner) == state_of(without)


def test_a_gradient_that_overflows_at_a_loss_scale_of_one_is_told(tmp_path: Path):
    class Steep(Overflows):
        def factor(self, h: Tensor) -> float:
            return 1e9

    runner = tracked(tmp_path, {"interval": 1}, Steep, [scaled(1.0)], iters=1)
    runner.train()
    assert "in the gradient of 'head:linear' from the backward of 'float'" in log_of(runner)


# What is legal


def test_masks_from_anywhere_are_legal_when_a_softmax_consumes_them(tmp_path: Path):
    class Masked(Plain):
        def __init__(self) -> None:
            super().__init__()
            mask = torch.full((4, 4), float("-inf")).triu(1)
            self.register_buffer("mask", mask)
            self.kept = mask.clone()

        def forward(self, x: Tensor, y: Tensor, mode: str = "loss") -> Any:
            h = self.stem(x)
            for mask in (self.mask, self.kept, torch.full((4, 4), float("-inf")).triu(1)):
                h = h + F.softmax(h @ h.T + mask, -1) @ h
                scores = h @ h.T
                scores += mask
                h = h + F.softmax(scores.masked_fill(mask == float("-inf"), float("-inf")), -1) @ h
                h = h + F.scaled_dot_product_attention(h[None], h[None], h[None], attn_mask=mask)[0]
            return {"loss": F.mse_loss(self.head(self.norm(h)), y)}

    runner = tracked(
        tmp_path, {"interval": 1, "watch_nonfinite": True, "on_nonfinite": "raise"}, Masked, iters=2
    )
    runner.train()
    assert "not finite" not in log_of(runner)


def test_a_mask_given_with_the_batch_is_legal_and_one_that_reaches_the_loss_is_not(tmp_path: Path):
    class Given(Plain):
        leaks = False

        def train_step(self, data: Any, optim_wrapper: Any) -> Any:
            mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf"))
            loss = self(**data, mask=mask)
            optim_wrapper.update_params(loss)
            return {"loss": loss.detach()}

        def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
            h = self.stem(x)
            scores = h @ h.T + mask
            h = F.softmax(scores, -1) @ h
            loss = F.mse_loss(self.head(self.norm(h)), y)
            return loss + scores.sum() if self.leaks else loss

    class Leaks(Given):
        leaks = True

    runner = tracked(tmp_path / "a", {"interval": 1, "on_nonfinite": "raise"}, Given, iters=2)
    runner.train()
    runner = tracked(tmp_path / "b", {"interval": 1}, Leaks, iters=1)
    runner.train()
    assert "Inf in what the model was called with, ':input[mask]': the batch was bad already" in log_of(
        runner
    )


def test_with_patterns_what_was_not_recorded_is_not_called_finite(tmp_path: Path):
    class Bad(Plain):
        def forward(self, x: Tensor, y: Tensor, mode: str = "loss") -> Any:
            return super().forward((x * 0 - 1).log(), y)

    runner = tracked(tmp_path / "a", {"interval": 1, "patterns": "head"}, Bad, iters=1)
    runner.train()
    assert "from 'linear' in module 'head' ('head:linear'), forward, the first that was recorded" in log_of(
        runner
    )
    watched = {"interval": 0, "patterns": "head", "watch_nonfinite": True}
    runner = tracked(tmp_path / "b", watched, Bad, iters=1)
    runner.train()
    assert "from 'log' outside of the model's submodules (':log'), forward, from finite inputs" in log_of(
        runner
    )


# Models of every kind


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_micro_batch_that_was_bad_is_named_not_the_one_that_steps(where: str, tmp_path: Path):
    optim = {"type": "OptimWrapper", "optimizer": SGD, "accumulative_counts": 4}
    runner = planted(tmp_path, where, BOTH["watched"], optim_wrapper=optim, iters=4)
    runner.train()
    assert f"ScaleTracker at iteration {AT} (run again, recorded): " in log_of(runner)
    assert PLANTED[where][1] in log_of(runner)


class Pair(Plain):
    """Two optimizers, each with a step of its own, as in adversarial training; leaves are reached in several ways."""

    bad = 0

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Linear(4, 1)
        self.register_buffer("count", torch.zeros(()))

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        assert isinstance(optim_wrapper, OptimWrapperDict)
        self.count += 1
        fake = self.head(F.gelu(self.norm(self.stem(data["x"]))))
        critic = (self.critic(fake.detach()) - self.critic(data["y"])).square().mean()
        optim_wrapper["critic"].update_params(critic)
        loss = -self.critic(fake).mean()
        if int(self.count) == AT:
            loss = loss + (fake.mean() * 0).sqrt()
        own = dict(optim_wrapper.items())["generator"]
        own.zero_grad()
        own.backward(loss)
        for name, each in zip(optim_wrapper.keys(), optim_wrapper.values(), strict=True):
            if name == "generator":
                each.step()
        own.optimizer.step()
        return {"loss_critic": critic, "loss_generator": loss}


def pair_of(model: Any) -> OptimWrapperDict:
    generator = [*model.stem.parameters(), *model.norm.parameters(), *model.head.parameters()]
    return OptimWrapperDict(
        generator=OptimWrapper(torch.optim.Adam(generator, lr=0.01)),
        critic=OptimWrapper(torch.optim.SGD(model.critic.parameters(), lr=0.01)),
    )


def test_a_train_step_of_ones_own_with_several_optimizers_is_run_again_without_a_trace(tmp_path: Path):
    left = []
    for tracker in (None, BOTH["watched"]):
        model, losses = seeded(Pair), Losses()
        runner = tracked(
            tmp_path, tracker, lambda model=model: model, [losses], optim_wrapper=pair_of(model), iters=4
        )
        runner.train()
        left.append(json.dumps(left_of(runner, losses)))
        counts = [each._inner_count for each in runner.optim_wrapper.values()]
        assert counts == [4, 4]
    assert left[0] == left[1]
    assert "from the backward of 'sqrt'" in log_of(runner)


def failing(times: int) -> Callable[[], nn.Module]:
    class Once(Plain):
        runs = 0

        def forward(self, x: Tensor, y: Tensor, mode: str = "loss") -> Any:
            self.runs += 1
            if self.runs == times:
                raise RuntimeError("a generator that is used up")
            return {"loss": super().forward(x, y)["loss"] * (NAN if self.runs == 2 else 1)}

    return Once


def test_a_model_that_cannot_run_twice_is_told_with_the_gradients_and_trains_on(tmp_path: Path):
    runner = tracked(tmp_path, BOTH["watched"], failing(3), iters=2)
    runner.train()
    log = log_of(runner)
    assert "the batch could not be run again (RuntimeError: a generator that is used up)" in log
    assert "a gradient is not finite, and running the batch again did not show why" in log
    assert "gradients that are not finite: 'stem.weight', 'stem.bias', 'norm.weight'" in log


def test_a_batch_that_the_model_changes_is_not_run_again_in_another_state(tmp_path: Path):
    class Normalises(Plain):
        def forward(self, x: Tensor, y: Tensor, mode: str = "loss") -> Any:
            x.mul_(2)
            return {"loss": super().forward(x, y)["loss"] * NAN}

    runner = tracked(tmp_path, BOTH["watched"], Normalises, iters=1)
    runner.train()
    assert "could not be run again (the model changes its batch in place)" in log_of(runner)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_large_but_finite_gradients_are_finite(dtype: torch.dtype, tmp_path: Path):
    """Their sum is not."""
    largest = torch.finfo(dtype).max

    class Large(Plain):
        def forward(self, x: Tensor, y: Tensor, mode: str = "loss") -> Any:
            loss = super().forward(x, y)["loss"]
            self.head.weight.grad = torch.full_like(self.head.weight, largest)
            return {"loss": loss * 0}

    class Stored(Large):
        def __init__(self) -> None:
            super().__init__()
            self.to(dtype)

        def forward(self, x: Tensor, y: Tensor, mode: str = "loss") -> Any:
            return super().forward(x.to(dtype), y)

    runner = tracked(tmp_path, BOTH["watched"], Stored, iters=1, optimizer={"type": "SGD", "lr": 0.0})
    runner.train()
    assert "not finite" not in log_of(runner)


def test_a_buffer_that_the_step_replaces_is_put_back(tmp_path: Path):
    class Replaces(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("average", torch.ones(4))

        def forward(self, x: Tensor, y: Tensor, mode: str = "loss") -> Any:
            self.average = self.average * 0.5
            bad = NAN if float(self.average[0]) == 0.25 else 1.0
            return {"loss": super().forward(x, y)["loss"] * self.average.mean() * bad}

    runner = tracked(tmp_path, BOTH["watched"], Replaces, iters=3)
    runner.train()
    assert "1 NaN from 'mul' outside of the model's submodules" in log_of(runner)
    assert digest(runner.model.average) == digest(torch.full((4,), 0.125))
