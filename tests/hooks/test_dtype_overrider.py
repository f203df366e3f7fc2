"""DtypeOverrider through the life of a real Runner."""

from __future__ import annotations

import copy
import gc
import io
import logging
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dtype_recorder import record_dtypes
from mmengine.hooks import EMAHook, Hook
from mmengine.model import BaseModel
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from processes import launch
from small_runs import AutocastNet, HandCastNet, Losses, data, log_text, small_runner
from torch import nn
from torch.nn import functional as F

from dtype_hooks import ConfigError, DtypeOverrider, SelectionError, override_dtype
from dtype_hooks.core.installed import overrides_in
from dtype_hooks.core.overridden_method import OverriddenMethod
from dtype_hooks.hooks.checkpoints import allow_mmengine_checkpoints, checkpoint_globals

NORM_AND_HEAD = {"type": "DtypeOverrider", "patterns": ["norm", "head"], "dtype": "float32"}
FP32, BF16 = {torch.float32}, {torch.bfloat16}


@pytest.fixture(autouse=True)
def keep_global_state() -> Iterator[None]:
    """Runner seeds torch's generator for the whole process."""
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)
    assert not torch.is_autocast_enabled("cpu")


def hook_of(runner: Runner) -> DtypeOverrider:
    (hook,) = (hook for hook in runner.hooks if isinstance(hook, DtypeOverrider))
    return hook


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[k], b[k]) and a[k].dtype is b[k].dtype for k in a)


def seeded(cls: type[nn.Module], *args: Any) -> nn.Module:
    torch.manual_seed(0)
    return cls(*args)


def trained(work_dir: Path, model: nn.Module, hooks: list, **kwargs: Any) -> dict[str, torch.Tensor]:
    small_runner(work_dir, model, hooks, **kwargs).train()
    return weights(model)


class TestStages:
    def test_a_training_computes_the_matched_layers_in_float32_and_the_neighbours_in_bf16(self, tmp_path):
        runner = small_runner(tmp_path, hooks=[NORM_AND_HEAD])
        with record_dtypes(runner.model) as calls:
            runner.train()

        assert calls.dtypes("native_layer_norm", "norm") == FP32
        assert calls.dtypes("addmm", "head") == FP32
        assert calls.dtypes("addmm", "stem") == BF16
        assert calls.dtypes("mm", "head", backward=True) == FP32
        assert calls.dtypes("mm", "stem", backward=True) == BF16
        assert calls.dtypes("relu") == BF16  # between them: outputs are cast back

    def test_without_the_hook_the_same_layers_compute_in_bf16(self, tmp_path):
        runner = small_runner(tmp_path)
        with record_dtypes(runner.model) as calls:
            runner.train()

        assert calls.dtypes("addmm", "head") == BF16
        assert torch.bfloat16 in calls.dtypes("native_layer_norm", "norm")

    @pytest.mark.parametrize("accumulative_counts", [1, 3])
    @pytest.mark.parametrize(
        "optimizer", [{"type": "SGD", "lr": 0.1, "momentum": 0.9}, {"type": "AdamW", "lr": 0.01}]
    )
    def test_training_is_bitwise_that_of_casts_by_hand(self, tmp_path, optimizer, accumulative_counts):
        options = {
            "iters": 6,
            "optimizer": optimizer,
            "optim_options": {
                "accumulative_counts": accumulative_counts,
                "clip_grad": {"max_norm": 1.0},
            },
        }
        ours = trained(tmp_path, seeded(AutocastNet), [NORM_AND_HEAD], **options)
        by_hand = trained(tmp_path, seeded(HandCastNet), [], **options)
        without = trained(tmp_path, seeded(AutocastNet), [], **options)

        assert same_bits(ours, by_hand)
        assert not same_bits(ours, without)

    def test_before_train_alone_installs_on_a_built_runner(self, tmp_path):
        runner = small_runner(tmp_path)
        hook = HOOKS.build(NORM_AND_HEAD)

        hook.before_train(runner)

        assert [o.module for o in overrides_in(runner.model)] == [runner.model.norm, runner.model.head]
        with record_dtypes(runner.model) as calls:
            runner.model(torch.randn(2, 4))
        assert calls.dtypes("addmm", "head") == FP32

    @pytest.mark.parametrize("stage", ["before_run", "before_train", "before_val", "before_test"])
    def test_every_stage_installs_and_installing_again_changes_nothing(self, tmp_path, stage):
        runner = small_runner(tmp_path)
        hook = HOOKS.build(NORM_AND_HEAD)

        getattr(hook, stage)(runner)
        first = list(overrides_in(runner.model))
        for again in ("before_run", "before_train", "before_val", "before_test"):
            getattr(hook, again)(runner)

        assert [id(o) for o in overrides_in(runner.model)] == [id(o) for o in first]
        assert all(o.previous is None and len(o.claims) == 1 for o in first)
        assert log_text(runner).count("of 4 modules compute in float32") == 1

    def test_building_the_hook_and_the_runner_touches_no_model(self, tmp_path):
        runner = small_runner(tmp_path, hooks=[NORM_AND_HEAD])
        assert list(overrides_in(runner.model)) == []

    @pytest.mark.parametrize("kind", ["val", "test"])
    def test_a_run_of_validation_or_testing_alone_is_overridden(self, tmp_path, kind):
        model = seeded(AutocastNet)
        by_hand = small_runner(tmp_path, seeded(HandCastNet), train=False, **{kind: True})
        runner = small_runner(tmp_path, model, [NORM_AND_HEAD], train=False, **{kind: True})

        with record_dtypes(model) as calls:
            metrics = getattr(runner, kind)()

        assert calls.dtypes("native_layer_norm", "norm") == FP32
        assert calls.dtypes("addmm", "head") == FP32
        assert calls.dtypes("addmm", "stem") == BF16
        assert metrics == getattr(by_hand, kind)()

    def test_a_test_after_training_is_still_overridden_and_nothing_is_installed_twice(self, tmp_path):
        by_hand = small_runner(tmp_path, seeded(HandCastNet), test=True)
        by_hand.train()
        runner = small_runner(tmp_path, hooks=[NORM_AND_HEAD], test=True)
        runner.train()
        installed = [id(o) for o in overrides_in(runner.model)]

        with record_dtypes(runner.model) as calls:
            metrics = runner.test()

        assert calls.dtypes("addmm", "head") == FP32
        assert [id(o) for o in overrides_in(runner.model)] == installed
        assert metrics == by_hand.test()
        assert log_text(runner).count("modules compute in float32") == 1

    def test_remove_puts_the_plain_model_back(self, tmp_path):
        runner = small_runner(tmp_path, hooks=[NORM_AND_HEAD])
        before = {name: set(m.__dict__) for name, m in runner.model.named_modules()}
        runner.train()
        hook_of(runner).remove()
        hook_of(runner).remove()

        assert {name: set(m.__dict__) for name, m in runner.model.named_modules()} == before
        assert list(overrides_in(runner.model)) == []

    def test_the_users_forward_hooks_survive_and_run(self, tmp_path):
        runner = small_runner(tmp_path, hooks=[NORM_AND_HEAD])
        seen: list[torch.dtype] = []
        pre = runner.model.norm.register_forward_pre_hook(lambda m, args: seen.append(args[0].dtype))
        post = runner.model.norm.register_forward_hook(lambda m, args, out: seen.append(out.dtype))

        runner.train()

        assert seen == [torch.bfloat16] * 6  # in and out of three iterations, seen outside the override
        assert pre.id in runner.model.norm._forward_pre_hooks
        assert post.id in runner.model.norm._forward_hooks

    def test_a_forward_that_the_user_had_put_on_the_module_still_runs_and_comes_back(self, tmp_path):
        runner = small_runner(tmp_path, hooks=[NORM_AND_HEAD])
        norm = runner.model.norm
        seen: list[torch.dtype] = []

        def their_forward(x):
            seen.append(x.dtype)
            return nn.LayerNorm.forward(norm, x)

        norm.forward = their_forward
        runner.train()

        assert seen == [torch.float32] * 3
        hook_of(runner).remove()
        assert norm.__dict__["forward"] is their_forward


class ReplaceModel(Hook):
    """Puts another model into the runner, after everything else of its stage."""

    priority = "LOWEST"

    def __init__(self, stage: str) -> None:
        self.stage = stage

    def before_run(self, runner: Runner) -> None:
        if self.stage == "model":
            self.old, runner.model = runner.model, seeded(AutocastNet)
        else:
            self.old, runner.model.norm = runner.model.norm, nn.LayerNorm(16)


class TestReplacedModels:
    def test_a_model_replaced_between_before_run_and_before_train_gets_the_overrides(self, tmp_path):
        replace = ReplaceModel("model")
        runner = small_runner(tmp_path, hooks=[NORM_AND_HEAD, replace])
        runner.train()

        assert runner.model is not replace.old
        assert [o.module for o in overrides_in(runner.model)] == [runner.model.norm, runner.model.head]
        assert all(o.called for o in overrides_in(runner.model))
        assert list(overrides_in(replace.old)) == []
        assert log_text(runner).count("the runner's model was replaced") == 1

    def test_a_module_replaced_between_before_run_and_before_train_gets_the_override(self, tmp_path):
        replace = ReplaceModel("module")
        runner = small_runner(tmp_path, hooks=[NORM_AND_HEAD, replace])
        runner.train()

        assert runner.model.norm is not replace.old
        assert [o.module for o in overrides_in(runner.model)] == [runner.model.norm, runner.model.head]
        assert all(o.called for o in overrides_in(runner.model))
        assert "forward" not in replace.old.__dict__


class TestEMA:
    """EMAHook deep-copies the model in its before_run."""

    EMA: dict = {"type": "EMAHook", "momentum": 0.3}  # noqa: RUF012

    @pytest.mark.parametrize("overrider_first", [True, False])
    def test_the_copy_computes_with_its_own_weights_in_the_same_dtype(self, tmp_path, overrider_first):
        hooks = [NORM_AND_HEAD, self.EMA] if overrider_first else [self.EMA, NORM_AND_HEAD]
        runner = small_runner(tmp_path, hooks=hooks)
        runner.train()
        (ema,) = (hook.ema_model for hook in runner.hooks if isinstance(hook, EMAHook))
        copied = ema.module
        x = torch.randn(4, 4)

        with record_dtypes(copied) as calls:
            before = copied(x)
        with torch.no_grad():
            for parameter in runner.model.parameters():
                parameter.zero_()
        after = copied(x)

        assert calls.dtypes("native_layer_norm", "norm") == FP32
        assert calls.dtypes("addmm", "head") == FP32
        assert calls.dtypes("addmm", "stem") == BF16
        assert torch.equal(before, after)
        assert not torch.equal(before, runner.model(x))
        assert {o.module for o in overrides_in(copied)} == {copied.norm, copied.head}

    @pytest.mark.parametrize("overrider_first", [True, False])
    def test_its_validation_is_that_of_casts_by_hand_with_the_averaged_weights(
        self, tmp_path, overrider_first
    ):
        hooks = [NORM_AND_HEAD, self.EMA] if overrider_first else [self.EMA, NORM_AND_HEAD]
        losses = Losses()
        runner = small_runner(tmp_path, hooks=[*hooks, losses], val=True, val_interval=3)
        runner.train()
        (ema,) = (hook.ema_model for hook in runner.hooks if isinstance(hook, EMAHook))
        averaged = weights(ema.module)
        by_hand = HandCastNet()
        by_hand.load_state_dict(averaged)
        expected = [float(by_hand(x, y, mode="predict")[0]) for x, y in data()]

        assert losses.validations == [{"loss": sum(expected) / len(expected)}]
        assert not same_bits(averaged, weights(runner.model))


class Deep(AutocastNet):
    """A block in the middle, for checkpointing: its input needs a gradient, as the reentrant kind demands."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU())

    def predict(self, x):
        return self.head(self.block(self.norm(self.stem(x))))


@pytest.mark.filterwarnings("ignore:torch.utils.checkpoint")
class TestActivationCheckpointing:
    """mmengine's activation_checkpointing wraps module.forward after before_run."""

    @pytest.mark.parametrize("checkpointed", [["block"], ["block.1"], ["norm", "block.0", "head"]])
    @pytest.mark.parametrize("patterns", [["norm", "block$"], [r"block\.1", "norm", "head"]])
    def test_gradients_are_the_same_and_the_override_applies_in_the_recompute(
        self, tmp_path, checkpointed, patterns
    ):
        hook = {**NORM_AND_HEAD, "patterns": patterns}
        plain = trained(tmp_path, seeded(Deep), [hook])
        model = seeded(Deep)
        runner = small_runner(tmp_path, model, [hook], cfg={"activation_checkpointing": checkpointed})
        with record_dtypes(model) as calls:
            runner.train()

        assert same_bits(weights(model), plain)
        recomputed = calls.of("native_layer_norm", backward=True)
        assert len(recomputed) == 3
        assert {dtype for call in recomputed for dtype in call.dtypes} == FP32
        assert calls.dtypes("native_layer_norm", "block.1") == FP32


class Whole(BaseModel):
    """Layers that keep state or draw random numbers, all in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.conv = nn.Sequential(nn.Conv1d(8, 8, 3), nn.BatchNorm1d(8), nn.ReLU(inplace=True))
        self.rnn = nn.GRU(8, 8, batch_first=True)
        self.attention = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, 2)

    def forward(self, x, y=None, mode="tensor"):
        tokens = (x.abs() * 3).long().clamp(max=9)
        tokens = tokens.repeat(1, 2)
        x = self.conv(self.embed(tokens).transpose(1, 2)).transpose(1, 2)
        x = self.attention(self.rnn(x)[0])
        loss = F.mse_loss(self.head(self.drop(x)).mean(1), y)
        return {"loss": loss} if mode == "loss" else [loss]


class TestIdentity:
    """A rule that asks for what is done anyway changes no bit."""

    @pytest.mark.parametrize(
        "optimizer",
        [{"type": "SGD", "lr": 0.1, "momentum": 0.9, "nesterov": True}, {"type": "AdamW", "lr": 0.01}],
        ids=lambda optimizer: optimizer["type"],
    )
    @pytest.mark.parametrize("cast_inputs", ["first", "all"])
    def test_losses_and_weights_are_bitwise_those_of_a_run_without_the_hook(
        self, tmp_path, optimizer, cast_inputs
    ):
        rule = {"type": "DtypeOverrider", "patterns": ["."], "dtype": "float32", "cast_inputs": cast_inputs}
        results = []
        for hooks in ([], [rule]):
            model, losses = seeded(Whole), Losses()
            runner = small_runner(tmp_path, model, [*hooks, losses], iters=7, optimizer=optimizer)
            runner.train()
            results.append((losses.values, weights(model)))

        (plain_losses, plain_weights), (our_losses, our_weights) = results
        assert len(plain_losses) == 7
        assert our_losses == plain_losses
        assert same_bits(our_weights, plain_weights)
        assert sum(1 for _ in overrides_in(model)) > 10


class TestCheckpoints:
    CHECKPOINT: dict = {"checkpoint": {"type": "CheckpointHook", "by_epoch": False, "interval": 2}}  # noqa: RUF012

    @pytest.mark.parametrize(("saved_with", "loaded_with"), [(True, False), (False, True)])
    def test_plain_checkpoints_load_with_and_without_the_hook(self, tmp_path, saved_with, loaded_with):
        one = small_runner(
            tmp_path / "one", hooks=[NORM_AND_HEAD] * saved_with, iters=2, default_hooks=self.CHECKPOINT
        )
        one.train()
        file = tmp_path / "one" / "iter_2.pth"
        with checkpoint_globals():
            saved = torch.load(file)["state_dict"]
        with allow_mmengine_checkpoints():
            two = small_runner(
                tmp_path / "two",
                hooks=[NORM_AND_HEAD] * loaded_with,
                train=False,
                test=True,
                load_from=str(file),
            )
            metrics = two.test()

        assert list(saved) == list(AutocastNet().state_dict())
        assert same_bits(weights(two.model), weights(one.model))
        by_hand = (HandCastNet if loaded_with else AutocastNet)()
        by_hand.load_state_dict(saved)
        expected = [float(by_hand(x, y, mode="predict")[0]) for x, y in data()]
        assert metrics["loss"] == sum(expected) / len(expected)

    def test_a_resumed_run_ends_bitwise_where_the_straight_one_does(self, tmp_path):
        straight = trained(tmp_path / "straight", seeded(AutocastNet), [NORM_AND_HEAD], iters=4)
        small_runner(tmp_path / "a", hooks=[NORM_AND_HEAD], iters=2, default_hooks=self.CHECKPOINT).train()
        resumed = small_runner(
            tmp_path / "b",
            hooks=[NORM_AND_HEAD],
            iters=4,
            resume=True,
            load_from=str(tmp_path / "a" / "iter_2.pth"),
        )
        with allow_mmengine_checkpoints():
            resumed.train()

        assert same_bits(weights(resumed.model), straight)


class TestCompile:
    """Runner compiles train_step after before_run and before before_train."""

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_a_compiled_training_is_overridden_like_an_eager_one(self, tmp_path, backend):
        # Not AdamW: compiled, it rounds otherwise than eager, with the hook and without.
        sgd = {"optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9}}
        eager = trained(tmp_path, seeded(AutocastNet), [NORM_AND_HEAD], **sgd)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model, cfg = seeded(AutocastNet), {"compile": {"backend": backend}}
        runner = small_runner(tmp_path, model, [NORM_AND_HEAD], cfg=cfg, **sgd)
        runner.train()
        compiled = dict(torch._dynamo.utils.counters["frames"])
        torch._dynamo.reset()
        without = trained(tmp_path, seeded(AutocastNet), [], cfg={"compile": {"backend": backend}}, **sgd)

        assert compiled["ok"] > 0
        assert same_bits(weights(model), eager)
        assert not same_bits(without, eager)
        assert "never called" not in log_text(runner)
        assert "2 of 4 modules compute in float32" in log_text(runner)

    @pytest.mark.parametrize("exclude", [None, [r"block\.1"]])
    @pytest.mark.parametrize("breaks", [False, True])
    def test_a_model_that_opens_autocast_itself_compiles_and_has_the_gradients_of_eager(
        self, breaks, exclude
    ):
        """A raw toggle of autocast, traced inside such a region, makes dynamo fail: "Global state changed"."""

        def step(model, x, y):
            loss = model(x, y, mode="loss")["loss"]
            if breaks:
                torch._dynamo.graph_break()
            return loss * 2

        x, y = torch.randn(4, 4), torch.randn(4, 2)
        gradients = []
        for run in (step, torch.compile(step, backend="aot_eager", fullgraph=not breaks)):
            torch._dynamo.reset()
            model = seeded(Deep)
            handle = override_dtype(model, ["^block$", "head"], dtype="float32", exclude=exclude)
            run(model, x, y).backward()
            assert not torch.is_autocast_enabled("cpu")
            gradients.append({name: p.grad for name, p in model.named_parameters()})
            handle.remove()
        torch._dynamo.reset()

        assert same_bits(*gradients)


class TestNothingIsKeptAlive:
    def test_models_and_runners_of_three_runs_are_collected(self, tmp_path):
        """mmengine's singletons (logger, message hub, visualizer) hold none of them either."""
        alive: list[weakref.ref] = []
        for _ in range(3):
            runner = small_runner(tmp_path, hooks=[NORM_AND_HEAD, {"type": "EMAHook"}], val=True)
            runner.train()
            runner.val()
            alive += [weakref.ref(runner), weakref.ref(runner.model), weakref.ref(hook_of(runner))]
            del runner
        gc.collect()

        assert [ref() for ref in alive] == [None] * 9

    def test_nothing_that_is_installed_leads_to_a_hook_or_a_runner(self, tmp_path):
        runner = small_runner(tmp_path, hooks=[NORM_AND_HEAD], val=True)
        runner.train()
        found: dict[int, Any] = {}
        rest: list[Any] = list(overrides_in(runner.model))
        while rest:
            item = rest.pop()
            if id(item) in found or isinstance(item, (type, type(sys), type(seeded), torch.device)):
                continue  # classes, modules and functions of modules lead to the whole process
            found[id(item)] = item
            rest += gc.get_referents(item)

        kinds = [type(item) for item in found.values()]
        assert OverriddenMethod in kinds
        assert AutocastNet not in kinds or nn.LayerNorm in kinds
        assert not [kind for kind in kinds if issubclass(kind, (Hook, Runner))]

    def test_an_overridden_model_of_a_run_is_pickled_and_deep_copied(self, tmp_path):
        runner = small_runner(tmp_path, hooks=[NORM_AND_HEAD])
        runner.train()
        file = io.BytesIO()
        torch.save(runner.model, file)
        file.seek(0)
        x = torch.randn(3, 4)

        for again in (torch.load(file, weights_only=False), copy.deepcopy(runner.model)):
            with record_dtypes(again) as calls:
                y = again(x)
            assert torch.equal(y, runner.model(x))
            assert calls.dtypes("addmm", "head") == FP32


class AttentionNet(AutocastNet):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def predict(self, x):
        x = self.norm(self.stem(x))[None]
        return self.head(self.attention(x, x, x)[0][0])


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, x, scale=None):
        return x * self.weight if scale is None else x * self.weight * scale


class KeywordNet(AutocastNet):
    """Calls one module by keyword, one with a second tensor in another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.keyword = Scaled()
        self.second = Scaled()

    def predict(self, x):
        x = self.norm(self.stem(x))
        return self.head(self.second(self.keyword(x=x), scale=torch.ones(16, dtype=torch.bfloat16)))


class Messages(logging.Handler):
    """What a runner logs, before mmengine's own handlers leave out warnings that were given already."""

    def __init__(self, runner: Runner) -> None:
        super().__init__()
        self.texts: list[str] = []
        runner.logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def count(self, part: str) -> int:
        return sum(part in text for text in self.texts)


class TestReports:
    def test_one_line_always(self, tmp_path, capsys):
        runner = small_runner(tmp_path, hooks=[NORM_AND_HEAD])
        runner.train()

        line = "DtypeOverrider: 2 of 4 modules compute in float32 (patterns=['norm', 'head'])"
        assert log_text(runner).count(line) == 1
        assert capsys.readouterr().out.count(line) == 1
        assert "caught by" not in log_text(runner)
        assert " - WARNING - " not in without_mmengines_own(log_text(runner))

    def test_verbose_puts_the_table_into_the_log_file_and_on_the_console(self, tmp_path, capsys, monkeypatch):
        monkeypatch.setenv("COLUMNS", "80")
        runner = small_runner(tmp_path, hooks=[{**NORM_AND_HEAD, "verbose": True}])
        runner.train()

        table = "\n".join(
            [
                "DtypeOverrider: methods that compute in float32",
                "in every row: method forward, computes in float32, stored in float32",
                "+--------+-----------+-----------+------------+",
                "| module | class     | caught by | parameters |",
                "+--------+-----------+-----------+------------+",
                "| norm   | LayerNorm | norm      |         32 |",
                "| head   | Linear    | head      |         34 |",
                "+--------+-----------+-----------+------------+",
            ]
        )
        assert log_text(runner).count(table) == 1
        assert capsys.readouterr().out.count(table) == 1

    def test_a_pattern_that_matches_nothing_is_one_warning_with_the_nearest_names(self, tmp_path):
        runner = small_runner(tmp_path, hooks=[{**NORM_AND_HEAD, "patterns": ["norm", "haed"]}], test=True)
        messages = Messages(runner)
        runner.train()
        runner.test()

        warning = "DtypeOverrider.patterns: 'haed' matched none of 4 modules; nearest names: 'head'. Mend it or drop it."
        assert messages.count(warning) == 1
        assert f"WARNING - {warning}" in log_text(runner)
        assert "1 of 4 modules compute in float32" in log_text(runner)

    def test_strict_makes_it_an_error_at_the_start_and_leaves_nothing_behind(self, tmp_path):
        hook = {**NORM_AND_HEAD, "patterns": ["norm", "haed"], "strict": True}
        runner = small_runner(tmp_path, hooks=[hook])

        with pytest.raises(SelectionError) as error:
            runner.train()

        assert str(error.value) == (
            "DtypeOverrider.patterns: 'haed' matched none of 4 modules; nearest names: 'head'. "
            "Mend it, or drop strict=True."
        )
        assert list(overrides_in(runner.model)) == []
        assert runner.iter == 0

    def test_no_pattern_takes_nothing_and_warns_once(self, tmp_path):
        runner = small_runner(tmp_path, hooks=[{"type": "DtypeOverrider"}], test=True)
        messages = Messages(runner)
        runner.train()
        runner.test()

        assert messages.count("DtypeOverrider: no patterns and no class_patterns") == 1
        assert "0 of 4 modules compute in float32" in log_text(runner)
        assert list(overrides_in(runner.model)) == []

    @pytest.mark.parametrize("kind", ["train", "val", "test"])
    def test_a_method_that_nothing_calls_is_one_warning_after_the_first_iteration(self, tmp_path, kind):
        """F.multi_head_attention_forward reads the weights of out_proj and never calls it."""
        hook = {**NORM_AND_HEAD, "patterns": ["out_proj", "norm"]}
        runner = small_runner(
            tmp_path,
            seeded(AttentionNet),
            [hook],
            train=kind == "train",
            **{kind: True} if kind != "train" else {},
        )
        messages = Messages(runner)
        getattr(runner, kind)()

        warning = "DtypeOverrider: never called in the first iteration, so nothing was overridden there: attention.out_proj.forward."
        assert messages.count(warning) == 1
        assert messages.count("never called") == 1

    def test_what_the_first_calls_show_is_one_warning_each(self, tmp_path):
        hook = {**NORM_AND_HEAD, "patterns": ["keyword", "second"]}
        runner = small_runner(tmp_path, seeded(KeywordNet), [hook], iters=5)
        log = Messages(runner)
        runner.train()

        assert (
            log.count("Scaled.forward (keyword): the first positional argument is no positional argument")
            == 0
        )
        assert log.count("Scaled.forward (keyword)") == 1
        assert (
            log.count("Scaled.forward (second): argument 'scale' comes in as bfloat16 and is not cast") == 1
        )
        assert log.count("Set cast_inputs='all'") == 2

    def test_with_cast_inputs_all_both_are_overridden_and_nothing_is_warned_of(self, tmp_path):
        hook = {**NORM_AND_HEAD, "patterns": ["keyword", "second"], "cast_inputs": "all"}
        runner = small_runner(tmp_path, seeded(KeywordNet), [hook])
        with record_dtypes(runner.model) as calls:
            runner.train()

        assert "WARNING" not in without_mmengines_own(log_text(runner))
        assert calls.dtypes("mul", "keyword") == FP32
        assert calls.dtypes("mul", "second") == FP32


def without_mmengines_own(log: str) -> str:
    return "\n".join(line for line in log.splitlines() if "DtypeOverrider" in line or "Scaled" in line)


class TestTwoEntries:
    def test_the_same_method_in_two_dtypes_is_an_error_that_names_both(self, tmp_path):
        second = {**NORM_AND_HEAD, "patterns": ["^norm$"], "dtype": "float64"}
        runner = small_runner(tmp_path, hooks=[NORM_AND_HEAD, second])

        with pytest.raises(SelectionError) as error:
            runner.train()

        assert str(error.value) == (
            "DtypeOverrider: 'norm' (float32) and '^norm$' (float64) both claim 'norm.forward'. Narrow one of them."
        )

    def test_the_same_method_in_the_same_dtype_merges(self, tmp_path):
        second = {**NORM_AND_HEAD, "patterns": ["^norm$"], "dtype": torch.float32}
        merged = trained(tmp_path, seeded(AutocastNet), [NORM_AND_HEAD, second])
        single = trained(tmp_path, seeded(AutocastNet), [NORM_AND_HEAD])

        assert same_bits(merged, single)

    def test_a_rule_on_a_child_wins_inside_a_ruled_parent(self, tmp_path):
        model = seeded(Deep)
        hooks = [
            {"type": "DtypeOverrider", "patterns": ["^block$"], "dtype": "float32"},
            {"type": "DtypeOverrider", "patterns": [r"^block\.1$"], "dtype": "bfloat16"},
        ]
        runner = small_runner(tmp_path, model, hooks)
        with record_dtypes(model) as calls:
            runner.train()

        assert calls.dtypes("addmm", "block.0") == FP32
        assert calls.dtypes("gelu", "block.2") == FP32
        assert calls.of("native_layer_norm", "block.1")[0].inputs == (torch.bfloat16,) * 3


class TestTwoRanks:
    @pytest.fixture(scope="class")
    def ranks(self, tmp_path_factory):
        return launch("report_worker.py", tmp_path_factory.mktemp("ranks"), ranks=2)

    def test_only_rank_0_prints_the_line_the_table_and_the_warning(self, ranks):
        printed = [rank["trained"]["printed"] for rank in ranks]

        assert printed[0].count("DtypeOverrider: 1 of 4 modules compute in float32") == 1
        assert printed[0].count("DtypeOverrider: methods that compute in float32") == 1
        assert printed[0].count("DtypeOverrider.patterns: '^haed$' matched none of 4 modules") == 1
        assert "DtypeOverrider" not in printed[1]

    def test_every_rank_computes_as_asked_and_the_weights_stay_equal(self, ranks):
        for rank in ranks:
            assert rank["trained"]["wrapper"] == "MMDistributedDataParallel"
            assert rank["trained"]["norm"] == ["torch.float32"]
            assert rank["trained"]["head"] == ["torch.bfloat16"]
            assert rank["trained"]["keys"] == list(AutocastNet().state_dict())
        assert ranks[0]["trained"]["weights"] == ranks[1]["trained"]["weights"]

    def test_names_are_the_bare_models_under_no_wrapper_ddp_and_ddp_of_a_compiled_model(self, ranks):
        assert [rank["installed"] for rank in ranks] == [[["norm"], ["norm"], ["norm"]]] * 2


class TestArguments:
    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            (
                {"dtype": "fp61"},
                r"dtype: got 'fp61'; expected one of bfloat16, float16, float32, float64\. Did you mean 'fp64'\?",
            ),
            ({"dtype": torch.int8}, r"dtype: got torch\.int8; expected one of bfloat16.*\."),
            ({"dtype": 32}, r"dtype: got 32; expected one of bfloat16.*Did you mean 'fp32'\?"),
            ({"dtype": None}, r"dtype: got None; expected one of bfloat16.*\."),
            (
                {"patterns": ["norm", "he(ad"]},
                r"patterns: got 'he\(ad'; expected a regular expression \(.*\)\. Escape it.*",
            ),
            (
                {"patterns": 5},
                r"patterns: got 5; expected a list of regular expressions\. Write \['norm'\]\.",
            ),
            ({"patterns": ["norm", None]}, r"patterns: got \['norm', None\]; expected a list of regular .*"),
            ({"patterns": ""}, r"patterns: got ''; expected a non-empty regular expression\. Write '\.'.*"),
            ({"patterns": {"norm": 1}}, r"patterns: got \{'norm': 1\}; expected a list of regular .*"),
            (
                {"class_patterns": ["*Norm"]},
                r"class_patterns: got '\*Norm'; expected a regular expression .*",
            ),
            ({"class_patterns": 1.5}, r"class_patterns: got 1\.5; expected a list of regular expressions.*"),
            ({"exclude": ["["]}, r"exclude: got '\['; expected a regular expression .*"),
            ({"exclude": True}, r"exclude: got True; expected a list of regular expressions.*"),
            (
                {"methods_to_override": ["__call__"]},
                r"methods_to_override: got '__call__'; expected names of ordinary methods\. Write \['forward'\].*",
            ),
            ({"methods_to_override": []}, r"methods_to_override: got \[\]; expected at least one method.*"),
            (
                {"methods_to_override": ["for ward"]},
                r"methods_to_override: got 'for ward'; expected names .*",
            ),
            ({"methods_to_override": 1}, r"methods_to_override: got 1; expected a list of .*"),
            (
                {"cast_inputs": "some"},
                r"cast_inputs: got 'some'; expected one of 'first', 'all'\. The default is 'first'\.",
            ),
            ({"cast_inputs": ["all"]}, r"cast_inputs: got \['all'\]; expected one of 'first', 'all'\. .*"),
            ({"strict": 1}, r"strict: got 1; expected True or False\. .*"),
            ({"verbose": "yes"}, r"verbose: got 'yes'; expected True or False\. .*"),
            ({"override_parameters": "yes"}, r"override_parameters: got 'yes'; expected True or False\. .*"),
            ({"override_buffers": 0}, r"override_buffers: got 0; expected True or False\. .*"),
            ({"check_interval": -1}, r"check_interval: got -1; expected .*"),
            ({"check_interval": 2.5}, r"check_interval: got 2\.5; expected .*"),
            ({"check_interval": True}, r"check_interval: got True; expected .*"),
            ({"on_drift": "explode"}, r"on_drift: got 'explode'; expected one of .*"),
            ({"verbose": None}, r"verbose: got None; expected True or False\. .*"),
        ],
        ids=str,
    )
    def test_a_wrong_argument_is_an_error_when_the_hook_is_built(self, wrong, message):
        with pytest.raises(ConfigError, match=rf"\ADtypeOverrider\.{message}\Z"):
            HOOKS.build({"type": "DtypeOverrider", "patterns": ["norm"], **wrong})

    @pytest.mark.parametrize("dtype", [torch.float32, "torch.float32", "float32", "fp32", "float"])
    def test_every_way_to_say_float32(self, dtype):
        assert HOOKS.build({"type": "DtypeOverrider", "dtype": dtype}).rule.dtype is torch.float32

    def test_a_bare_string_is_one_pattern(self):
        hook = HOOKS.build(
            {
                "type": "DtypeOverrider",
                "patterns": "norm",
                "class_patterns": "Norm",
                "exclude": "head",
                "methods_to_override": "forward",
            }
        )
        assert hook.rule.selection.patterns == ("norm",)
        assert hook.rule.selection.class_patterns == ("Norm",)
        assert hook.rule.selection.exclude == ("head",)
        assert hook.rule.methods == ("forward",)

    def test_none_means_no_pattern_and_forward(self):
        rule = HOOKS.build({"type": "DtypeOverrider", "patterns": None, "methods_to_override": None}).rule
        assert rule.selection.is_empty
        assert rule.methods == ("forward",)

    def test_an_unknown_argument_is_an_error_that_names_it(self):
        with pytest.raises(TypeError, match="pattern"):
            HOOKS.build({"type": "DtypeOverrider", "pattern": ["norm"]})

    def test_the_hook_runs_before_the_hook_that_copies_the_model(self):
        from mmengine.runner import get_priority

        assert get_priority(DtypeOverrider.priority) < get_priority(EMAHook.priority)
