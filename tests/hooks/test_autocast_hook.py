"""AutocastHook through the life of a real Runner."""

from __future__ import annotations

import copy
import gc
import io
import logging
import math
import threading
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from autocast_runs import BF16, FP16, FP32, HOOK, InModelNet, Net, hook_of, same_bits, seeded, weights
from dtype_recorder import record_dtypes
from mmengine.evaluator import BaseMetric, Evaluator
from mmengine.hooks import EMAHook, Hook
from mmengine.model import BaseModel
from mmengine.optim import AmpOptimWrapper, ApexOptimWrapper, OptimWrapper, OptimWrapperDict
from mmengine.registry import HOOKS
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement, InstanceData
from processes import launch
from small_runs import Losses, data, log_text, small_runner
from torch import Tensor, nn
from torch.nn import functional as F

from dtype_hooks import AutocastHook, ConfigError, OverrideError, SelectionError, node_dtype
from dtype_hooks.core.autocast_method import AutocastMethod
from dtype_hooks.core.nodes import find_region, regions_in
from dtype_hooks.hooks.predictions import CastPredictions


@pytest.fixture(autouse=True)
def keep_global_state() -> Iterator[None]:
    """Runner seeds torch's generator for the whole process."""
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)
    assert not torch.is_autocast_enabled("cpu")


def trained(work_dir: Path, model: nn.Module, hooks: list, **kwargs: Any) -> dict[str, Tensor]:
    small_runner(work_dir, model, hooks, **kwargs).train()
    return weights(model)


def dtypes_of(runner: Runner, run: Any, *modules: str) -> dict[str, set[torch.dtype]]:
    """In which dtypes the matrix products of modules run."""
    with record_dtypes(runner.model) as calls:
        run()
    return {module: calls.dtypes("addmm", module) for module in modules}


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


class At(Hook):
    """Does something to the model at a stage, or after a training iteration that counts from 1."""

    priority = "LOWEST"

    def __init__(self, when: str | int, act: Any) -> None:
        self.when, self.act = when, act

    def before_run(self, runner: Runner) -> None:
        if self.when == "before_run":
            self.act(runner)

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter + 1 == self.when:
            self.act(runner)


class TestTraining:
    def test_the_forward_is_in_bf16_the_loss_as_autocast_has_it_and_the_backward_follows(self, tmp_path):
        runner = small_runner(tmp_path, seeded(Net), [HOOK])
        on: list[bool] = []
        for parameter in runner.model.parameters():
            parameter.register_post_accumulate_grad_hook(
                lambda p: on.append(torch.is_autocast_enabled("cpu"))
            )
        with record_dtypes(runner.model) as calls:
            runner.train()

        assert calls.dtypes("addmm", "stem") == calls.dtypes("addmm", "head") == BF16
        assert calls.dtypes("mm", backward=True) == BF16
        assert calls.dtypes("mse_loss") == FP32  # inside the region, which casts up for it
        assert on == [False] * 18  # outside in the backward
        assert {p.dtype for p in runner.model.parameters()} == FP32
        states = runner.optim_wrapper.optimizer.state.values()
        assert {s.dtype for state in states for s in state.values()} == FP32

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @pytest.mark.parametrize("accumulative_counts", [1, 3])
    def test_it_is_bitwise_that_of_an_autocast_written_into_the_model(
        self, tmp_path, dtype, accumulative_counts
    ):
        options = {
            "iters": 6,
            "optim_options": {
                "accumulative_counts": accumulative_counts,
                "clip_grad": {"max_norm": 1.0},
            },
        }
        ours = trained(tmp_path, seeded(Net), [{**HOOK, "dtype": dtype, "loss_scale": None}], **options)
        in_model = trained(tmp_path, seeded(InModelNet, getattr(torch, dtype)), [], **options)
        without = trained(tmp_path, seeded(Net), [], **options)

        assert same_bits(ours, in_model)
        assert not same_bits(ours, without)

    def test_without_a_dtype_it_is_the_devices_default(self, tmp_path):
        runner = small_runner(tmp_path, seeded(Net), [{"type": "AutocastHook"}])

        assert dtypes_of(runner, runner.train, "stem") == {"stem": {torch.get_autocast_dtype("cpu")}}
        assert "AutocastHook: 1 node on cpu in train, val, test: (model) bfloat16" in log_text(runner)

    def test_disabled_it_leaves_no_trace_and_every_bit(self, tmp_path):
        model = seeded(Net)
        hook = {**HOOK, "enabled": False, "cast_nodes": True, "output_dtype": "float16"}
        ours = trained(tmp_path, model, [hook])

        assert same_bits(ours, trained(tmp_path, seeded(Net), []))
        assert "forward" not in model.__dict__

    def test_a_teacher_pass_without_gradients_in_the_same_region_leaves_the_students_gradients(
        self, tmp_path
    ):
        """torch once kept the weight's cast from the no_grad pass in its cache."""

        class Distilled(Net):
            def predict(self, x):
                with torch.no_grad():
                    teacher = super().predict(x)
                return super().predict(x) + 0 * teacher

        model = seeded(Distilled)
        seen: set[str] = set()
        for name, parameter in model.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.add(name))
        small_runner(tmp_path, model, [HOOK], iters=1).train()

        assert seen == {name for name, _ in model.named_parameters()}

    @pytest.mark.parametrize("cache_enabled", [None, True, False])
    def test_cache_enabled_decides_how_often_a_weight_is_cast(self, tmp_path, cache_enabled):
        class Twice(Net):
            def predict(self, x):
                return super().predict(x) + super().predict(x)

        runner = small_runner(tmp_path, seeded(Twice), [{**HOOK, "cache_enabled": cache_enabled}], iters=1)
        with record_dtypes(runner.model) as calls:
            runner.train()

        casts = calls.of("_to_copy", "head", backward=False)
        assert len(casts) == (4 if cache_enabled is False else 2)  # weight and bias

    def test_a_weight_changed_in_place_between_two_forwards_is_cast_anew(self, tmp_path):
        runner = small_runner(tmp_path, seeded(Net), [HOOK], iters=1)
        runner.train()
        x = torch.ones(1, 4)
        runner.model(x)
        with torch.no_grad():
            runner.model.head.weight.zero_()
            runner.model.head.bias.fill_(3)

        assert runner.model(x).tolist() == [[3.0, 3.0]]

    def test_in_place_changes_nested_calls_recursion_threads_and_exceptions_leave_autocast_as_it_was(
        self, tmp_path
    ):
        class Recursive(Net):
            def predict(self, x):
                if x.shape[0] > 1:
                    return torch.cat([self(x[:1]), self(x[1:])])
                if x.isnan().any():
                    raise ValueError("NaN")
                return super().predict(x)

        model = seeded(Recursive)
        small_runner(tmp_path, model, [HOOK]).train()
        x = torch.randn(3, 4)
        plain = seeded(InModelNet)
        plain.load_state_dict(weights(model))
        with pytest.raises(ValueError, match="NaN"):
            model(torch.cat([x, x.new_full((1, 4), torch.nan)]))
        assert not torch.is_autocast_enabled("cpu")
        results: list[Tensor] = []
        threads = [threading.Thread(target=lambda: results.append(model(x))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        expected = torch.cat([plain(row[None]) for row in x])
        assert len(results) == 4
        assert all(torch.equal(y, expected) and y.dtype is torch.bfloat16 for y in results)

    def test_the_inner_region_of_a_model_that_autocasts_itself_wins(self, tmp_path):
        runner = small_runner(tmp_path, seeded(InModelNet, torch.float16), [HOOK])

        assert dtypes_of(runner, runner.train, "stem") == {"stem": FP16}


class TestPhases:
    @pytest.mark.parametrize(
        "phases", [["train"], ["val"], ["test"], ["train", "val"], "val", ("test", "train")]
    )
    def test_regions_are_open_in_the_phases_named(self, tmp_path, phases):
        runner = small_runner(
            tmp_path, seeded(Net), [{**HOOK, "phases": phases}], val=True, test=True, val_interval=2, iters=4
        )
        with record_dtypes(runner.model) as calls:
            runner.train()
        tested = dtypes_of(runner, runner.test, "stem")["stem"]
        validated = dtypes_of(runner, runner.val, "stem")["stem"]
        order = [call.inputs[0] for call in calls.of("addmm", "stem", backward=False)]

        t = torch.bfloat16 if "train" in phases else torch.float32
        v = torch.bfloat16 if "val" in phases else torch.float32
        assert order == [t, t, v, v, t, t, v, v]
        assert validated == {v}
        assert tested == (BF16 if "test" in phases else FP32)

    @pytest.mark.parametrize("kind", ["val", "test"])
    def test_a_run_of_validation_or_testing_alone(self, tmp_path, kind):
        runner = small_runner(tmp_path, seeded(Net), [HOOK], train=False, **{kind: True})
        by_hand = small_runner(tmp_path, seeded(InModelNet), train=False, **{kind: True})
        metrics: dict = {}

        assert dtypes_of(runner, lambda: metrics.update(getattr(runner, kind)()), "stem", "head") == {
            "stem": BF16,
            "head": BF16,
        }
        assert metrics == getattr(by_hand, kind)()

    def test_train_then_test_installs_once_and_both_are_in_bf16(self, tmp_path):
        runner = small_runner(tmp_path, seeded(Net), [HOOK], test=True)
        log = Messages(runner)
        runner.train()
        installed = regions_in(runner.model)

        assert dtypes_of(runner, runner.test, "stem") == {"stem": BF16}
        assert [id(m) for m in regions_in(runner.model)] == [id(m) for m in installed]
        assert log.count("AutocastHook") == 1

    def test_regions_stay_after_training_until_they_are_removed(self, tmp_path):
        runner = small_runner(tmp_path, seeded(Net), [HOOK])
        before = {name: set(m.__dict__) for name, m in runner.model.named_modules()}
        runner.train()
        assert runner.model(torch.ones(1, 4)).dtype is torch.bfloat16
        hook_of(runner).remove()
        hook_of(runner).remove()

        assert runner.model(torch.ones(1, 4)).dtype is torch.float32
        assert {name: set(m.__dict__) for name, m in runner.model.named_modules()} == before

    @pytest.mark.parametrize("stage", ["before_run", "before_train", "before_val", "before_test"])
    def test_every_stage_installs_and_installing_again_changes_nothing(self, tmp_path, stage):
        runner = small_runner(tmp_path, seeded(Net))
        hook = HOOKS.build(HOOK)
        getattr(hook, stage)(runner)
        first = regions_in(runner.model)
        for again in ("before_run", "before_train", "before_val", "before_test"):
            getattr(hook, again)(runner)

        assert [id(m) for m in regions_in(runner.model)] == [id(m) for m in first]
        assert first[0].previous is None

    @pytest.mark.parametrize("phases", [[], "all", ["train", "valid"], None, 3])
    def test_other_phases_are_refused(self, phases):
        with pytest.raises(
            ConfigError, match=r"AutocastHook.phases: got .*; expected some of 'train', 'val', 'test'"
        ):
            AutocastHook(phases=phases)


class TestDevices:
    def test_an_index_is_stripped(self, tmp_path):
        runner = small_runner(tmp_path, seeded(Net), [{**HOOK, "device_type": "cpu:0"}])

        assert dtypes_of(runner, runner.train, "stem") == {"stem": BF16}
        assert AutocastHook(device_type="cuda:0").device_type == "cuda"

    @pytest.mark.parametrize("device_type", ["cuda", "cuda:0", "mps", "xpu"])
    def test_a_contradiction_with_the_model_is_an_error_when_enabled(self, tmp_path, device_type):
        hook = {**HOOK, "device_type": device_type}
        kind = device_type.partition(":")[0]
        runner = small_runner(tmp_path, seeded(Net), [hook])
        with pytest.raises(
            ConfigError, match=f"device_type: got '{kind}' for a model on 'cpu'; .* Leave device_type out"
        ):
            runner.train()
        assert regions_in(runner.model) == []
        assert runner.iter == 0

        small_runner(tmp_path, seeded(Net), [{**hook, "enabled": False}]).train()

    def test_an_unknown_device_is_an_error_when_built_and_enabled(self):
        with pytest.raises(
            ConfigError, match=r"AutocastHook.device_type: got 'gpu'; expected a device type of torch"
        ):
            AutocastHook(device_type="gpu")
        AutocastHook(device_type="gpu", enabled=False)

    @pytest.mark.parametrize("device_type", ["cuda", "mps", "xpu", "hpu", "meta", "privateuseone"])
    def test_an_absent_device_is_an_error_at_the_start_where_parameters_say_nothing(
        self, tmp_path, device_type
    ):
        if device_type == "cuda" and torch.cuda.is_available():
            pytest.skip("it is there")
        model = seeded(Net)
        for name in ("stem", "norm", "head"):
            setattr(model, name, nn.Identity())
        hook = {**HOOK, "device_type": device_type}
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            with pytest.raises(
                ConfigError, match=f"device_type: got '{device_type}', .* Set enabled=False there"
            ):
                HOOKS.build(hook).before_run(small_runner(tmp_path, model, train=False, val=True))
        HOOKS.build({**hook, "enabled": False}).before_run(
            small_runner(tmp_path, model, train=False, val=True)
        )

    def test_a_model_without_parameters_is_taken_to_be_on_the_cpu(self, tmp_path):
        class Bare(BaseModel):
            def forward(self, *inputs: Any, mode: str = "tensor"):
                return [torch.ones(2, 2) @ torch.ones(2, 2)]

        runner = small_runner(tmp_path, Bare(), [HOOK], train=False)
        HOOKS.build(HOOK).before_run(runner)
        assert runner.model()[0].dtype is torch.bfloat16


class TestDtypes:
    @pytest.mark.parametrize("dtype", ["float32", "fp32", "float64", torch.float32])
    def test_full_precision_points_to_enabled_and_is_nothing_without(self, dtype):
        with pytest.raises(ConfigError, match=r"AutocastHook.dtype: got 'float\d\d'; .* Set enabled=False"):
            AutocastHook(dtype=dtype)
        AutocastHook(dtype=dtype, enabled=False)

    @pytest.mark.parametrize(
        "dtype", ["16-mixed", "bf16-mixed", "fp16-mixed", "bf16-true", "16", "32", 16, True, 1.5]
    )
    def test_other_peoples_names_list_the_right_ones(self, dtype):
        with pytest.raises(
            ConfigError, match=r"AutocastHook.dtype: got .*; expected one of 'bfloat16', 'bf16', 'float16'"
        ):
            AutocastHook(dtype=dtype)

    def test_a_typo_gets_a_suggestion(self):
        with pytest.raises(
            ConfigError, match=r"AutocastHook.dtype: got 'fp61'; expected one of .* Did you mean 'fp16'\?"
        ):
            AutocastHook(dtype="fp61")
        with pytest.raises(ConfigError, match=r"AutocastHook.output_dtype: got 'flaot32'"):
            AutocastHook(output_dtype="flaot32")

    @pytest.mark.parametrize("dtype", ["bf16", "torch.bfloat16", torch.bfloat16])
    def test_names_and_dtypes_mean_the_same(self, dtype):
        assert AutocastHook(dtype=dtype).dtype is torch.bfloat16

    @pytest.mark.parametrize("name", ["half", "bfloat16"])
    def test_a_model_cast_by_hand_is_one_warning(self, tmp_path, name):
        model = seeded(Net)
        getattr(model.stem, name)()
        runner = small_runner(tmp_path, model, [HOOK], val=True)
        log = Messages(runner)
        runner.train()
        runner.val()

        text = "AutocastHook: 2 parameters ('stem.weight', ...) are stored in 16 bits already"
        assert log.count(text) == log.count("16 bits") == 1

    def test_parameters_of_a_node_that_is_kept_out_may_be_in_16_bits(self, tmp_path):
        model = seeded(OptedOutHead)
        model.head.bfloat16()
        runner = small_runner(tmp_path, model, [HOOK])
        HOOKS.build(HOOK).before_run(runner)
        assert "16 bits" not in log_text(runner)

    def test_parameters_that_a_rule_stores_in_16_bits_are_meant_so(self, tmp_path):
        model = seeded(Net)
        store = {
            "type": "DtypeOverrider",
            "patterns": ["stem"],
            "dtype": "bfloat16",
            "override_parameters": True,
        }
        runner = small_runner(tmp_path, model, [store, HOOK], optimizer={"type": "SGD", "lr": 0.1})
        runner.train()

        assert "16 bits" not in log_text(runner)


class OptedOutHead(Net):
    def __init__(self, how: Any = True) -> None:
        super().__init__()
        self.head.disable_autocast = how


class Node(nn.Sequential):
    """A submodule that says which dtype it wants."""

    def __init__(self, wanted: Any, *modules: nn.Module) -> None:
        super().__init__(*modules)
        self.wanted = wanted

    def get_autocast_dtype(self) -> Any:
        return self.wanted


class NodesNet(Net):
    """stem -> block -> norm -> head, the block with whatever the test puts there."""

    def __init__(self, block: nn.Module | None = None, **attributes: Any) -> None:
        super().__init__()
        self.block = block if block is not None else nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        for name, value in attributes.items():
            setattr(self, name, value)

    def predict(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.block(self.stem(x))).relu())


def own(dtype: Any) -> NodesNet:
    return NodesNet(Node(dtype, nn.Linear(16, 16), nn.Linear(16, 16)))


class TestNodes:
    def test_an_own_dtype_an_opted_out_and_a_nested_node_each_run_in_theirs(self, tmp_path):
        class OutInside(nn.Linear):
            disable_autocast = True

        inner = Node("bf16", nn.Linear(16, 16))
        model = seeded(lambda: NodesNet(Node(torch.float16, nn.Linear(16, 16), OutInside(16, 16), inner)))
        runner = small_runner(tmp_path, model, [{**HOOK, "verbose": True}])

        assert dtypes_of(runner, runner.train, "stem", "block.0", "block.1", "block.2", "head") == {
            "stem": BF16,
            "block.0": FP16,
            "block.1": FP32,
            "block.2": BF16,
            "head": BF16,
        }
        log = log_text(runner)
        assert "(model) bfloat16, block float16, block.1 off, block.2 bfloat16" in log
        for row in ("own override", "opted out", "| config"):
            assert row in log

    def test_an_own_none_is_the_models_dtype(self, tmp_path):
        runner = small_runner(tmp_path, seeded(own, None), [HOOK])

        assert dtypes_of(runner, runner.train, "block.0") == {"block.0": BF16}
        assert [m.node for m in regions_in(runner.model)] == ["(model)"]

    @pytest.mark.parametrize("how", [True, lambda: True])
    def test_a_node_that_opts_out_computes_in_its_stored_dtype(self, tmp_path, how):
        runner = small_runner(tmp_path, seeded(OptedOutHead, how), [HOOK])
        assert dtypes_of(runner, runner.train, "stem", "head") == {"stem": BF16, "head": FP32}

    def test_it_is_bitwise_that_of_a_region_without_autocast_written_into_the_model(self, tmp_path):
        class ByHand(Net):
            def predict(self, x):
                x = self.norm(self.stem(x)).relu()
                with torch.autocast("cpu", enabled=False):
                    return self.head(x.float())

            def forward(self, *args, **kwargs):
                with torch.autocast("cpu", torch.bfloat16):
                    return super().forward(*args, **kwargs)

        expected = trained(tmp_path, seeded(ByHand), [])
        assert same_bits(trained(tmp_path, seeded(OptedOutHead), [HOOK]), expected)
        assert same_bits(trained(tmp_path, seeded(Net), [{**HOOK, "exclude": ["head"]}]), expected)

    def test_a_node_built_in_another_dtype_keeps_it(self, tmp_path):
        model = seeded(OptedOutHead)
        model.head.double()
        runner = small_runner(tmp_path, model, [HOOK])
        assert dtypes_of(runner, runner.train, "head") == {"head": {torch.float64}}

    def test_a_node_whose_weights_are_in_8_bits_gets_no_arguments_in_8_bits(self, tmp_path):
        class Quantised(nn.Module):
            disable_autocast = True

            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("weight", torch.eye(16).to(torch.float8_e4m3fn))

            def forward(self, x):
                return torch.cat([self.weight.to(x.dtype), x])[16:] @ self.weight.to(x.dtype)

        runner = small_runner(tmp_path, seeded(lambda: NodesNet(Quantised())), [HOOK])
        with record_dtypes(runner.model) as calls:
            runner.train()
        assert calls.dtypes("mm", "block") == FP32

    def test_containers_without_a_forward_hand_their_dtype_down(self, tmp_path):
        class Listed(Net):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = nn.ModuleList([nn.Linear(16, 16), nn.ModuleList([nn.Linear(16, 16)])])

            def predict(self, x):
                x = self.blocks[1][0](self.blocks[0](self.stem(x)))
                return self.head(self.norm(x))

        runner = small_runner(tmp_path, seeded(Listed), [{**HOOK, "exclude": ["^blocks$"]}])
        assert dtypes_of(runner, runner.train, "stem", "blocks.0", "blocks.1.0") == {
            "stem": BF16,
            "blocks.0": FP32,
            "blocks.1.0": FP32,
        }

    @pytest.mark.parametrize("rule", [{"patterns": ["block", "head"]}, {"class_patterns": "^Linear$"}])
    def test_patterns_restrict_regions_to_chosen_submodules(self, tmp_path, rule):
        runner = small_runner(
            tmp_path, seeded(NodesNet), [{**HOOK, **rule, "exclude": ["stem", r"block\.1"]}]
        )
        assert dtypes_of(runner, runner.train, "stem", "block.0", "block.1", "head") == {
            "stem": FP32,
            "block.0": BF16,
            "block.1": FP32,
            "head": BF16,
        }

    def test_outside_the_chosen_ones_no_module_is_touched_whatever_it_says(self, tmp_path):
        model = seeded(own, torch.float16)
        runner = small_runner(tmp_path, model, [{**HOOK, "patterns": ["head"]}])

        assert dtypes_of(runner, runner.train, "stem", "block", "head") == {
            "stem": FP32,
            "block": FP32,
            "head": BF16,
        }
        assert [m.node for m in regions_in(model)] == ["head"]

    def test_what_is_kept_out_takes_what_a_chosen_neighbour_returns(self, tmp_path):
        model = seeded(NodesNet)
        model.block.disable_autocast = True
        hook = {**HOOK, "patterns": ["stem", "norm"], "exclude": ["head"]}
        runner = small_runner(tmp_path, model, [hook])

        assert dtypes_of(runner, runner.train, "stem", "block", "head") == {
            "stem": BF16,
            "block": FP32,
            "head": FP32,
        }

    def test_a_chosen_submodule_that_has_a_dtype_of_its_own_or_opts_out_gets_its_own_way(self, tmp_path):
        model = seeded(own, torch.float16)
        model.block[1].disable_autocast = True
        runner = small_runner(tmp_path, model, [{**HOOK, "patterns": ["^block$"]}])

        assert dtypes_of(runner, runner.train, "block.0", "block.1") == {"block.0": FP16, "block.1": FP32}

    def test_a_pattern_that_matches_nothing_is_one_warning_and_so_is_a_hook_without_nodes(self, tmp_path):
        runner = small_runner(tmp_path, seeded(Net), [{**HOOK, "patterns": ["haed"]}])
        log = Messages(runner)
        runner.train()

        assert (
            log.count("AutocastHook.patterns: 'haed' matched none of 4 modules; nearest names: 'head'") == 1
        )
        assert log.count("AutocastHook: no node autocasts") == 1

    def test_a_module_whose_weights_its_parent_reads_is_one_warning(self, tmp_path):
        class Attending(Net):
            def __init__(self) -> None:
                super().__init__()
                self.attention = nn.MultiheadAttention(16, 2)

            def predict(self, x):
                x = self.stem(x)
                return self.head(self.attention(x, x, x)[0])

        runner = small_runner(tmp_path, seeded(Attending), [{**HOOK, "exclude": ["out_proj"]}])
        log = Messages(runner)
        runner.train()
        assert log.count("'attention.out_proj' is never called, its parent reads its weights") == 1

    def test_a_model_that_never_calls_its_forward_is_one_warning(self, tmp_path):
        class OwnStep(Net):
            def train_step(self, data, optim_wrapper):
                loss = self.predict(data[0]).square().mean()
                optim_wrapper.update_params(loss)
                return {"loss": loss}

        runner = small_runner(tmp_path / "model", seeded(OwnStep), [HOOK])
        log = Messages(runner)
        runner.train()
        assert log.count("no forward of '(model)' was called in the first iteration") == 1

        chosen = small_runner(tmp_path / "chosen", seeded(OwnStep), [{**HOOK, "patterns": ["stem", "head"]}])
        assert dtypes_of(chosen, chosen.train, "stem", "head") == {"stem": BF16, "head": BF16}
        assert "was called in the first" not in log_text(chosen)

    def test_the_fast_path_of_an_encoder_layer_does_not_pass_its_nodes_by(self, tmp_path):
        class Encoding(Net):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)

            def predict(self, x):
                return self.head(self.layer(self.stem(x)[None])[0])

        model = seeded(Encoding)
        runner = small_runner(tmp_path, model, [{**HOOK, "exclude": [r"linear1"]}], val=True, iters=1)
        runner.train()
        assert dtypes_of(runner, runner.val, "layer.linear1", "layer.linear2") == {
            "layer.linear1": FP32,
            "layer.linear2": BF16,
        }
        hook_of(runner).remove()
        assert not model.layer._forward_pre_hooks

    def test_a_scripted_submodule_is_refused_as_a_node_and_nothing_is_left_behind(self, tmp_path):
        model = seeded(NodesNet)
        model.block = torch.jit.script(nn.Linear(16, 16))
        runner = small_runner(tmp_path, model, [{**HOOK, "exclude": ["block"]}])
        with pytest.raises(OverrideError, match=r"AutocastHook: block.forward: got a scripted module"):
            runner.train()
        assert regions_in(model) == []


class Wanting(Net):
    def __init__(self, wanted: Any) -> None:
        super().__init__()
        self.wanted = wanted

    def get_autocast_dtype(self) -> Any:
        return self.wanted


class TestModelWideDtype:
    @pytest.mark.parametrize(
        ("cfg", "wanted", "dtype", "expected", "source"),
        [
            ({}, torch.float16, None, FP16, "model"),
            ({"autocast_dtype": "bfloat16"}, torch.float16, None, BF16, "config"),
            ({"autocast_dtype": "bfloat16"}, torch.float16, "float16", FP16, "config"),
            ({"autocast_dtype": None}, torch.float16, None, FP32, "config"),
            ({"autocast_dtype": None}, torch.float16, "bfloat16", BF16, "config"),
            ({}, torch.float16, "bfloat16", BF16, "config"),
            ({}, None, None, FP32, "model"),
            ({"autocast_dtype": None}, None, None, FP32, "config"),
        ],
    )
    def test_the_hooks_word_wins_over_the_configs_over_the_models(
        self, tmp_path, cfg, wanted, dtype, expected, source
    ):
        hook = {"type": "AutocastHook", "dtype": dtype, "verbose": True}
        runner = small_runner(tmp_path, seeded(Wanting, wanted), [hook], cfg=cfg)

        assert dtypes_of(runner, runner.train, "stem") == {"stem": expected}
        assert hook_of(runner).regions.nodes[0].source == source
        assert ("no node autocasts" in log_text(runner)) == (expected == FP32)

    @pytest.mark.parametrize("options", [{"cfg": {"autocast_dtype": "bfloat16"}}, {"dtype": "bfloat16"}])
    def test_a_model_that_returns_none_is_pinned(self, tmp_path, options):
        runner = small_runner(
            tmp_path,
            seeded(Wanting, None),
            [{"type": "AutocastHook", "dtype": options.get("dtype")}],
            cfg=options.get("cfg"),
        )
        with pytest.raises(
            ConfigError, match=r"got 'bfloat16' for Wanting, whose get_autocast_dtype\(\) returns None"
        ):
            runner.train()
        assert regions_in(runner.model) == []

    def test_a_pinned_model_runs_without_autocast_and_its_arguments_stay(self, tmp_path):
        model = seeded(Wanting, None)
        seen: list[torch.dtype] = []
        model.predict = lambda x: seen.append(x.dtype) or Net.predict(model, x.float())
        HOOKS.build({"type": "AutocastHook"}).before_run(small_runner(tmp_path, model, train=False))
        with torch.autocast("cpu", torch.bfloat16):
            out = model(torch.ones(1, 4, dtype=torch.bfloat16))
        assert out.dtype is torch.float32
        assert seen == [torch.bfloat16]

    @pytest.mark.parametrize("text", ["autocast_dtype: float16", "autocast_dtype: torch.float16"])
    def test_yaml_and_json_name_it_as_python_does(self, tmp_path, text):
        runner = small_runner(tmp_path, seeded(Net), [{"type": "AutocastHook"}], cfg=yaml.safe_load(text))
        assert dtypes_of(runner, runner.train, "stem") == {"stem": FP16}

    def test_null_of_yaml_means_no_autocast(self, tmp_path):
        cfg = yaml.safe_load("autocast_dtype: null")
        runner = small_runner(tmp_path, seeded(Net), [{"type": "AutocastHook"}], cfg=cfg)
        assert dtypes_of(runner, runner.train, "stem") == {"stem": FP32}

    @pytest.mark.parametrize("value", ["fp61", 16, ["bf16"]])
    def test_a_dtype_of_the_config_that_is_none_is_an_error(self, tmp_path, value):
        runner = small_runner(
            tmp_path, seeded(Net), [{"type": "AutocastHook"}], cfg={"autocast_dtype": value}
        )
        with pytest.raises(ConfigError, match="autocast_dtype: got "):
            runner.train()

    @pytest.mark.parametrize("wanted", [torch.float32, "float64"])
    def test_a_dtype_that_the_device_cannot_autocast_to_is_an_error_for_model_and_nodes(
        self, tmp_path, wanted
    ):
        with pytest.raises(
            ConfigError, match=r"AutocastHook.dtype: got 'float\d\d' on 'cpu'; .* enabled=False"
        ):
            small_runner(
                tmp_path, seeded(Net), [{"type": "AutocastHook"}], cfg={"autocast_dtype": wanted}
            ).train()
        with pytest.raises(ConfigError, match=r"AutocastHook \(block\).dtype: .* disable_autocast = True"):
            small_runner(tmp_path, seeded(own, wanted), [HOOK]).train()


class Predicting(BaseModel):
    """Predicts what a test asks for, from one Linear."""

    def __init__(self, wrap: Any = lambda y, x: [y]) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)
        self.wrap = wrap

    def forward(self, x: Any, y: Any = None, mode: str = "tensor") -> Any:
        return self.wrap(self.head(x), x)


class Numpy(BaseMetric):
    """A metric that needs ``.numpy()``."""

    def process(self, data_batch: Any, data_samples: Any) -> None:
        for sample in data_samples:
            value = sample["pred"] if isinstance(sample, dict) else sample  # mmengine makes dicts of elements
            self.results.append(value.numpy())

    def compute_metrics(self, results: list) -> dict:
        return {"sum": float(sum(r.sum() for r in results)), "dtype": str(results[0].dtype)}


def predict(wrap: Any, output_dtype: str = "float32", x: Any = None, mode: str = "predict") -> Any:
    method = AutocastMethod(Predicting(wrap), "(model)")
    method.dtype, method.cast_output = torch.bfloat16, CastPredictions(getattr(torch, output_dtype))
    method.phase.on = True
    return method(torch.ones(2, 4) if x is None else x, mode=mode)


class TestOutputDtype:
    @pytest.mark.parametrize("kind", ["val", "test"])
    @pytest.mark.parametrize("wrap", [lambda y, x: [y], lambda y, x: [BaseDataElement(pred=y)]])
    def test_numpy_works_in_a_metric(self, tmp_path, kind, wrap):
        def run(**options: Any) -> dict:
            runner = small_runner(
                tmp_path, seeded(Predicting, wrap), [{**HOOK, **options}], train=False, **{kind: True}
            )
            runner._val_evaluator = runner._test_evaluator = Evaluator([Numpy()])
            return getattr(runner, kind)()

        with pytest.raises(TypeError, match="BFloat16"):
            run()
        assert run(output_dtype="float32")["dtype"] == "float32"

    def test_every_kind_of_container_is_reached(self):
        def wrap(y: Tensor, x: Tensor) -> Any:
            instances = InstanceData(boxes=y, labels=torch.ones(2, dtype=torch.int64))
            sample = BaseDataElement(pred=instances, scores={"a": [y, (y,)]}, metainfo={"scale": y.detach()})
            return {"samples": [sample], "plain": (y, [y.long()]), "name": "it"}

        out = predict(wrap)
        (sample,) = out["samples"]
        assert sample.pred.boxes.dtype is torch.float32
        assert sample.pred.labels.dtype is torch.int64
        assert sample.scores["a"][0].dtype is sample.scores["a"][1][0].dtype is torch.float32
        assert sample.metainfo["scale"].dtype is torch.bfloat16
        assert out["plain"][0].dtype is torch.float32
        assert out["plain"][1][0].dtype is torch.int64
        assert out["name"] == "it"

    def test_ground_truth_that_comes_back_with_the_samples_stays_as_it_is(self):
        sample = BaseDataElement(
            gt=torch.ones(2, dtype=torch.float64), gt_instances=InstanceData(b=torch.ones(2))
        )

        def wrap(y: Tensor, x: Any) -> Any:
            x["samples"][0].pred = y
            return x["samples"]

        model = Predicting(wrap)
        model.head = nn.Identity()
        method = AutocastMethod(model, "(model)")
        method.phase.on, method.dtype, method.cast_output = (
            True,
            torch.bfloat16,
            CastPredictions(torch.float16),
        )
        given = {"samples": [sample], "y": torch.ones(2)}
        model.forward = lambda x, mode: wrap(x["y"], x)
        method.previous = model.forward
        (out,) = method(given, mode="predict")

        assert out is sample
        assert out.pred.dtype is torch.float16
        assert out.gt.dtype is torch.float64
        assert out.gt_instances.b.dtype is torch.float32

    def test_only_predictions_are_cast(self, tmp_path):
        runner = small_runner(tmp_path, seeded(Net), [{**HOOK, "output_dtype": "float16"}], iters=1, val=True)
        losses: list[torch.dtype] = []
        runner.register_hook(
            At(1, lambda r: losses.append(r.model(*next(iter(data())), mode="loss")["loss"].dtype))
        )
        runner.train()

        assert losses == [torch.float32]
        assert runner.model(torch.ones(1, 4)).dtype is torch.bfloat16
        assert runner.model(torch.ones(1, 4), torch.ones(1, 2), mode="predict")[0].dtype is torch.float16

    def test_with_patterns_there_is_no_region_on_the_model_to_cast_them(self):
        with pytest.raises(ConfigError, match=r"AutocastHook.output_dtype: got patterns as well"):
            AutocastHook(output_dtype="float32", patterns=["head"])


NORM_AND_HEAD = {"type": "DtypeOverrider", "patterns": ["norm", "head"], "dtype": "float32"}


class TestWithDtypeOverrider:
    @pytest.mark.parametrize("priority", ["NORMAL", "HIGH", "VERY_LOW"])
    @pytest.mark.parametrize("overrider_first", [True, False])
    def test_the_override_wins_inside_its_modules_in_either_order(self, tmp_path, overrider_first, priority):
        overrider = {**NORM_AND_HEAD, "priority": priority}
        hooks = [overrider, HOOK] if overrider_first else [HOOK, overrider]
        runner = small_runner(tmp_path, seeded(Net), hooks)
        with record_dtypes(runner.model) as calls:
            runner.train()

        assert calls.dtypes("addmm", "stem") == BF16
        assert calls.dtypes("addmm", "head") == calls.dtypes("native_layer_norm", "norm") == FP32

    @pytest.mark.parametrize("overrider_first", [True, False])
    def test_the_same_method_may_have_both_and_either_may_be_removed(self, tmp_path, overrider_first):
        hooks = [NORM_AND_HEAD, {**HOOK, "patterns": ["stem", "head"]}]
        runner = small_runner(tmp_path, seeded(Net), hooks if overrider_first else hooks[::-1])
        assert dtypes_of(runner, runner.train, "stem", "head") == {"stem": BF16, "head": FP32}

        (overrider,) = (hook for hook in runner.hooks if type(hook).__name__ == "DtypeOverrider")
        x = torch.ones(2, 4)
        overrider.remove()
        assert dtypes_of(runner, lambda: runner.model(x), "head") == {"head": BF16}
        hook_of(runner).remove()
        assert dtypes_of(runner, lambda: runner.model(x), "head") == {"head": FP32}
        assert all("forward" not in m.__dict__ for m in runner.model.modules())

    def test_cast_nodes_leaves_alone_what_a_rule_stores(self, tmp_path):
        store = {**NORM_AND_HEAD, "override_parameters": True, "check_interval": 1, "on_drift": "raise"}
        for hooks in ([store, {**HOOK, "cast_nodes": True}], [{**HOOK, "cast_nodes": True}, store]):
            runner = small_runner(tmp_path, seeded(Net), hooks)
            runner.train()
            stored = {name: p.dtype for name, p in runner.model.named_parameters()}
            assert {stored["stem.weight"]} == BF16
            assert {stored["norm.weight"], stored["head.weight"]} == FP32


def without_device_check(cls: type) -> Any:
    """mmengine's AmpOptimWrapper refuses to be built on a CPU, ApexOptimWrapper without apex: the class, not its __init__."""

    class Built(cls):  # type: ignore[misc]
        def __init__(self, optimizer: Any) -> None:
            OptimWrapper.__init__(self, optimizer)

    Built.__name__ = cls.__name__
    return Built


class TestOwners:
    @pytest.mark.parametrize("cls", [AmpOptimWrapper, ApexOptimWrapper])
    @pytest.mark.parametrize("in_dict", [False, True])
    def test_an_optim_wrapper_that_opens_autocast_is_refused_at_the_start(self, tmp_path, cls, in_dict):
        model = seeded(Net)
        runner = small_runner(tmp_path, model, [HOOK])
        wrapper = without_device_check(cls)(torch.optim.SGD(model.parameters(), lr=0.1))
        runner.optim_wrapper = OptimWrapperDict(one=wrapper) if in_dict else wrapper
        with pytest.raises(ConfigError) as error:
            hook_of(runner).before_run(runner)

        assert str(error.value) == (
            f"AutocastHook: got {cls.__name__}, which opens autocast as well; expected one owner. "
            "Set optim_wrapper=dict(type='OptimWrapper', ...), or drop AutocastHook."
        )
        assert regions_in(model) == []

    def test_a_deepspeed_strategy_is_refused(self, tmp_path):
        class DeepSpeedStrategy:
            """Stands in for the class of that name, which needs deepspeed and a GPU to be built."""

        runner = small_runner(tmp_path, seeded(Net), [HOOK])
        runner.strategy = DeepSpeedStrategy()
        with pytest.raises(
            ConfigError, match=r"AutocastHook: got DeepSpeedStrategy, which opens autocast as well"
        ):
            runner.train()

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ({}, {}),
            ({"patterns": ["head"]}, {"class_patterns": ["Linear"]}),
            ({}, {"patterns": ["head"]}),
            ({"patterns": ["block"]}, {"patterns": [r"block\.1$"]}),
        ],
    )
    def test_another_hook_over_the_same_modules_is_refused(self, tmp_path, one, other):
        for first, second in ((one, other), (other, one)):
            runner = small_runner(tmp_path, seeded(NodesNet), [{**HOOK, **first}, {**HOOK, **second}])
            with pytest.raises(
                SelectionError, match="which another AutocastHook autocasts already; expected one owner"
            ):
                runner.train()

    @pytest.mark.parametrize("excluding_first", [True, False])
    def test_what_one_hook_keeps_out_another_may_autocast(self, tmp_path, excluding_first):
        hooks = [
            {**HOOK, "exclude": ["head"], "check_interval": 1},
            {**HOOK, "dtype": "float16", "patterns": ["head"], "check_interval": 1},
        ]
        runner = small_runner(tmp_path, seeded(Net), hooks if excluding_first else hooks[::-1])
        assert dtypes_of(runner, runner.train, "stem", "head") == {"stem": BF16, "head": FP16}
        assert "were gone" not in log_text(runner)

    def test_a_later_run_on_the_same_model_takes_its_regions_over(self, tmp_path):
        model = seeded(Net)
        first = small_runner(tmp_path / "a", model, [{**HOOK, "exclude": ["head"]}])
        first.train()
        second = small_runner(
            tmp_path / "b", model, [{**HOOK, "dtype": "float16", "phases": ["train"]}], test=True
        )

        assert dtypes_of(second, second.train, "stem", "head") == {"stem": FP16, "head": FP16}
        assert dtypes_of(second, second.test, "stem") == {"stem": FP32}
        assert len(regions_in(model)) == 1
        hook_of(first).remove()
        assert len(regions_in(model)) == 1
        hook_of(second).remove()
        assert regions_in(model) == []

    def test_two_runs_on_one_model_may_take_turns(self, tmp_path):
        model = seeded(Net)
        one = small_runner(tmp_path / "a", model, [HOOK], train=False, val=True)
        two = small_runner(tmp_path / "b", model, [{**HOOK, "dtype": "float16"}], train=False, val=True)

        found = [dtypes_of(r, r.val, "stem")["stem"] for r in (one, two, one, two)]
        assert found == [BF16, FP16, BF16, FP16]


class TestRecheck:
    def delete(self, runner: Runner) -> None:
        del runner.model.__dict__["forward"]

    def overwrite(self, runner: Runner) -> None:
        runner.model.forward = lambda *args, **kwargs: Net.forward(runner.model, *args, **kwargs)

    @pytest.mark.parametrize("how", ["delete", "overwrite"])
    def test_a_region_that_is_gone_is_back_at_the_next_check(self, tmp_path, how):
        hook = {**HOOK, "check_interval": 2, "output_dtype": "float32"}
        runner = small_runner(tmp_path, seeded(Net), [hook, At(3, getattr(self, how))], iters=6)
        log = Messages(runner)
        with record_dtypes(runner.model) as calls:
            runner.train()

        b, f = torch.bfloat16, torch.float32
        assert [c.inputs[0] for c in calls.of("addmm", "stem", backward=False)] == [b, b, f, f, b, b]
        assert log.count("AutocastHook at iteration 4: 1 regions were gone and are back: '(model)'") == 1
        assert runner.model(torch.ones(1, 4), torch.ones(1, 2), mode="predict")[0].dtype is f

    def test_nothing_is_reported_while_all_is_well_and_nothing_is_checked_with_0(self, tmp_path):
        runner = small_runner(tmp_path, seeded(Net), [{**HOOK, "check_interval": 1}])
        runner.train()
        assert "were gone" not in log_text(runner)

        never = small_runner(tmp_path, seeded(Net), [{**HOOK, "check_interval": 0}, At(1, self.delete)])
        never.train()
        assert never.model(torch.ones(1, 4)).dtype is torch.float32

    @pytest.mark.parametrize("what", ["model", "module"])
    def test_what_was_replaced_between_before_run_and_before_train_gets_its_region(self, tmp_path, what):
        old: list[nn.Module] = []

        def replace(runner: Runner) -> None:
            if what == "model":
                old.append(runner.model)
                runner.model = seeded(OptedOutHead)
            else:
                old.append(runner.model.head)
                runner.model.head = nn.Linear(16, 2)
                runner.model.head.disable_autocast = True

        runner = small_runner(tmp_path, seeded(OptedOutHead), [HOOK, At("before_run", replace)])
        runner.train()

        assert dtypes_of(runner, lambda: runner.model(torch.ones(1, 4)), "stem", "head") == {
            "stem": BF16,
            "head": FP32,
        }
        assert regions_in(old[0]) == []


class TestEMA:
    @pytest.mark.parametrize("hook_first", [True, False])
    @pytest.mark.parametrize("priority", ["ABOVE_NORMAL", "VERY_LOW"])
    def test_the_average_validates_in_the_same_dtype_with_its_own_weights(
        self, tmp_path, hook_first, priority
    ):
        ema, ours = {"type": "EMAHook", "momentum": 0.3}, {**HOOK, "priority": priority}
        losses = Losses()
        hooks = [ours, ema] if hook_first else [ema, ours]
        runner = small_runner(tmp_path, seeded(Net), [*hooks, losses], val=True, val_interval=3)
        with record_dtypes(runner.model) as calls:
            runner.train()
        (averaged,) = (hook.ema_model.module for hook in runner.hooks if isinstance(hook, EMAHook))
        by_hand = InModelNet()
        by_hand.load_state_dict(averaged.state_dict())
        expected = [float(by_hand(x, y, mode="predict")[0]) for x, y in data()]

        assert losses.validations == [{"loss": sum(expected) / len(expected)}]
        assert calls.dtypes("addmm") == BF16
        assert not same_bits(weights(averaged), weights(runner.model))

    def test_the_copy_runs_its_own_weights_and_goes_through_the_phases_of_its_run(self, tmp_path):
        hooks = [{**HOOK, "phases": ["val"]}, {"type": "EMAHook"}]
        runner = small_runner(tmp_path, seeded(Net), hooks)
        runner.train()
        (averaged,) = (hook.ema_model.module for hook in runner.hooks if isinstance(hook, EMAHook))
        x = torch.ones(1, 4)
        assert averaged(x).dtype is torch.float32
        hook_of(runner).before_val(runner)
        assert averaged(x).dtype is torch.bfloat16
        before = averaged(x)
        with torch.no_grad():
            runner.model.head.weight.zero_()
        assert torch.equal(averaged(x), before)


class Deep(Net):
    """A block in the middle, for checkpointing: its input needs a gradient, as the reentrant kind demands."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 16))
        self.kind = ""
        self.times = 1

    def predict(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.kind == "own":
            x = OwnCheckpoint.apply(self.block, x, *self.block.parameters())
        elif self.kind:
            reentrant = self.kind == "reentrant"
            for _ in range(self.times):
                x = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=reentrant)
        else:
            for _ in range(self.times):
                x = self.block(x)
        return self.head(self.norm(x))


class OwnCheckpoint(torch.autograd.Function):
    """A checkpoint as people write it, which knows nothing of autocast."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.block, ctx.parameters = block, parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        return None, *torch.autograd.grad(y, (x, *ctx.parameters), grads[0])


@pytest.mark.filterwarnings("ignore:torch.utils.checkpoint")
class TestActivationCheckpointing:
    RULE = {"type": "DtypeOverrider", "patterns": [r"block\.1"], "dtype": "float32"}  # noqa: RUF012

    @pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
    @pytest.mark.parametrize("nodes", [{}, {"exclude": [r"block\.3"]}, {"patterns": ["block$", "head"]}])
    @pytest.mark.parametrize("overridden", [False, True])
    def test_the_recompute_is_in_the_dtypes_of_the_forward_and_gradients_are_the_same(
        self, tmp_path, kind, nodes, overridden
    ):
        hooks = [{**HOOK, **nodes}, *([self.RULE] if overridden else [])]
        if "patterns" in nodes:
            hooks[0]["exclude"] = ["norm"]
        plain = trained(tmp_path / "plain", seeded(Deep), hooks)
        model = seeded(Deep)
        model.kind = kind
        runner = small_runner(tmp_path, model, hooks)
        with record_dtypes(model) as calls:
            runner.train()

        assert same_bits(weights(model), plain)
        for op, module in (("addmm", "block.0"), ("native_layer_norm", "block.1"), ("addmm", "block.3")):
            forward = [c.inputs for c in calls.of(op, module, backward=False)]
            again = [c.inputs for c in calls.of(op, module, backward=True)]
            if (kind, module) == ("non-reentrant", "block.3"):
                assert again == []  # it stops as soon as it has what the backward asked for
            else:
                assert again == forward
                assert len(again) == 3

    @pytest.mark.parametrize("cache_enabled", [True, False])
    @pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
    def test_a_block_used_three_times_has_the_gradients_of_one_that_is_not_checkpointed(
        self, tmp_path, kind, cache_enabled
    ):
        gradients = []
        for each in ("", kind):
            model = seeded(Deep)
            model.kind, model.times = each, 3
            hook = HOOKS.build({**HOOK, "cache_enabled": cache_enabled})
            hook.before_run(small_runner(tmp_path, model, train=False))
            model(*next(iter(data())), mode="loss")["loss"].backward()
            gradients.append({name: p.grad for name, p in model.named_parameters()})
        if kind == "non-reentrant" and not cache_enabled:
            assert same_bits(*gradients)
        for name, grad in gradients[
            0
        ].items():  # a cached cast sums in bf16 what the recomputes add up in float32
            torch.testing.assert_close(gradients[1][name], grad, rtol=0.05, atol=0.02)

    @pytest.mark.parametrize("checkpointed", [["block"], ["block.0", "head"]])
    def test_mmengines_own_switch(self, tmp_path, checkpointed):
        hook = {**HOOK, "exclude": [r"block\.0"]}
        plain = trained(tmp_path / "plain", seeded(Deep), [hook])
        cfg = {"activation_checkpointing": checkpointed}
        model = seeded(Deep)
        runner = small_runner(tmp_path, model, [hook], cfg=cfg)
        with record_dtypes(model) as calls:
            runner.train()

        assert same_bits(weights(model), plain)
        assert len(calls.of("addmm", backward=True)) >= 3
        assert calls.dtypes("addmm", "block.0") == FP32

    def test_a_checkpoint_written_by_hand_recomputes_overridden_and_kept_out_modules_as_before(
        self, tmp_path
    ):
        """Its recompute runs outside every region: a node of its own carries its region along, the rest does not."""
        model = seeded(Deep)
        model.kind = "own"
        runner = small_runner(
            tmp_path,
            model,
            [{**HOOK, "patterns": ["stem", "block$", "head"], "exclude": ["norm"]}, self.RULE],
        )
        with record_dtypes(model) as calls:
            runner.train()

        assert calls.dtypes("addmm", "block.0") == calls.dtypes("addmm", "block.3") == BF16
        assert calls.dtypes("native_layer_norm", "block.1") == FP32
        assert len(calls.of("native_layer_norm", "block.1", backward=True)) == 3


class TestCompile:
    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_a_compiled_training_is_that_of_an_eager_one_with_no_graph_break_of_ours(self, tmp_path, backend):
        """mmengine compiles train_step, which breaks at its own logging and at the optimizer."""
        # Not AdamW: compiled, it rounds otherwise than eager, with the hook and without.
        options = {"optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9}}
        eager = trained(tmp_path / "eager", seeded(Net), [HOOK], **options)
        breaks = []
        for hooks in ([], [HOOK]):
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            cfg = {"compile": {"backend": backend}}
            ours = trained(tmp_path / f"compiled{len(hooks)}", seeded(Net), hooks, cfg=cfg, **options)
            breaks.append(dict(torch._dynamo.utils.counters["graph_break"]))
            assert torch._dynamo.utils.counters["frames"]["ok"] > 0
        torch._dynamo.reset()

        assert same_bits(ours, eager)
        assert breaks[0] == breaks[1]

    @pytest.mark.parametrize("mode", ["loss", "predict"])
    def test_the_whole_forward_with_nodes_is_one_graph_with_the_gradients_of_eager(self, tmp_path, mode):
        class Out(nn.Linear):
            disable_autocast = True

        def build() -> nn.Module:
            return NodesNet(Node(torch.float16, nn.Linear(16, 16), Out(16, 16)))

        x, y = next(iter(data()))
        gradients = []
        for compiled in (False, True):
            torch._dynamo.reset()
            model = seeded(build)
            hook = HOOKS.build({**HOOK, "output_dtype": "float32", "exclude": ["norm"]})
            hook.before_run(small_runner(tmp_path, model, train=False))
            run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
            out = run(x, y, mode=mode)
            (out["loss"] if mode == "loss" else out[0]).backward()
            gradients.append({name: p.grad for name, p in model.named_parameters()})
        torch._dynamo.reset()

        assert same_bits(*gradients)

    @pytest.mark.parametrize("backend", ["eager", "aot_eager"])
    def test_a_graph_break_in_the_models_own_code_changes_nothing(self, tmp_path, backend):
        class Breaks(NodesNet):
            def predict(self, x):
                x = self.stem(x)
                torch._dynamo.graph_break()
                return self.head(self.norm(self.block(x)).relu())

        options = {"optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9}}
        hook = {**HOOK, "exclude": [r"block\.1"]}
        eager = trained(tmp_path / "eager", seeded(Breaks), [hook], **options)
        torch._dynamo.reset()
        cfg = {"compile": {"backend": backend}}
        ours = trained(tmp_path / "compiled", seeded(Breaks), [hook], cfg=cfg, **options)
        torch._dynamo.reset()
        assert same_bits(ours, eager)

    @pytest.mark.parametrize("kept_out", [{"exclude": [r"block\.1"]}, {}])
    def test_a_part_compiled_inside_the_region_has_the_gradients_of_eager(self, tmp_path, kept_out):
        """AOTAutograd would trace the backward of a float32 node under the autocast around the compiled part."""
        x, y = next(iter(data()))
        gradients = []
        for compiled in (False, True):
            torch._dynamo.reset()
            model = seeded(NodesNet)
            HOOKS.build({**HOOK, **kept_out}).before_run(small_runner(tmp_path, model, train=False))
            if compiled:
                model.head.compile(backend="aot_eager")
                model.block = torch.compile(model.block, backend="aot_eager")
            model(x, y, mode="loss")["loss"].backward()
            gradients.append({name.replace("_orig_mod.", ""): p.grad for name, p in model.named_parameters()})
        torch._dynamo.reset()
        assert same_bits(*gradients)


class TestCastNodes:
    def test_each_node_stores_its_subtree_but_nested_nodes_in_its_dtype(self, tmp_path):
        class Out(nn.Linear):
            disable_autocast = True

        model = seeded(
            lambda: NodesNet(Node(torch.float16, nn.Linear(16, 16), nn.BatchNorm1d(16), Out(16, 16)))
        )
        model.norm = nn.Identity()  # a norm stored in bfloat16 refuses float16
        model.register_buffer("table", torch.ones(3))
        model.register_buffer("index", torch.arange(3))
        identities = {name: id(p) for name, p in model.named_parameters()}
        runner = small_runner(
            tmp_path,
            model,
            [{**HOOK, "loss_scale": None, "cast_nodes": True, "verbose": True}],
            optimizer={"type": "SGD", "lr": 0.1, "momentum": 0.9},
        )
        runner.train()

        stored = {name: t.dtype for name, t in model.state_dict().items()}
        assert stored.pop("index") is stored.pop("block.1.num_batches_tracked") is torch.int64
        for name, dtype in stored.items():
            wanted = (
                torch.float32 if "block.2" in name else torch.float16 if "block" in name else torch.bfloat16
            )
            assert dtype is wanted, name
        assert {name: id(p) for name, p in model.named_parameters()} == identities
        states = runner.optim_wrapper.optimizer.state
        assert all(s["momentum_buffer"].dtype is p.dtype for p, s in states.items())
        assert "16 bits" not in log_text(runner)

    def test_it_trains_as_a_model_cast_before(self, tmp_path):
        ours = trained(tmp_path / "a", seeded(Net), [{**HOOK, "cast_nodes": True}])
        by_hand = trained(tmp_path / "b", seeded(InModelNet).bfloat16(), [])
        assert same_bits(ours, by_hand)

    def test_without_it_parameters_stay_master_weights(self, tmp_path):
        assert {t.dtype for t in trained(tmp_path, seeded(Net), [HOOK]).values()} == FP32

    def test_a_parameter_shared_by_two_nodes_in_two_dtypes_is_refused(self, tmp_path):
        model = seeded(OptedOutHead)
        model.stem = nn.Linear(4, 2, bias=False)
        model.head = nn.Linear(4, 2, bias=False)
        model.head.disable_autocast = True
        model.head.weight = model.stem.weight
        runner = small_runner(tmp_path, model, [{**HOOK, "cast_nodes": True}])
        with pytest.raises(
            SelectionError,
            match=r"AutocastHook.cast_nodes: got a parameter that '\(model\)' and 'head' share",
        ):
            runner.train()
        assert model.stem.weight.dtype is torch.float32

    def test_a_lazy_parameter_is_refused(self, tmp_path):
        model = seeded(Net)
        model.head = nn.LazyLinear(2)
        runner = small_runner(tmp_path, model, [{**HOOK, "cast_nodes": True}], train=False, val=True)
        with pytest.raises(
            OverrideError, match=r"AutocastHook.cast_nodes: got a parameter without a shape in '\(model\)'"
        ):
            runner.val()

    def test_a_recurrent_node_still_runs(self, tmp_path):
        class Recurrent(Net):
            def __init__(self) -> None:
                super().__init__()
                self.rnn = nn.LSTM(16, 16)

            def predict(self, x):
                return self.head(self.rnn(self.stem(x))[0])

        runner = small_runner(
            tmp_path, seeded(Recurrent), [{**HOOK, "cast_nodes": True}], optimizer={"type": "SGD", "lr": 0.1}
        )
        runner.train()
        assert {p.dtype for p in runner.model.rnn.parameters()} == BF16


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    results = launch("autocast_worker.py", tmp_path_factory.mktemp("autocast_ranks"), ranks=2)
    for result in results:
        for name, value in result.items():
            assert "error" not in value, (name, value)
    return results


class TestTwoRanks:
    def test_each_rank_runs_in_bf16_and_weights_are_those_of_an_autocast_in_the_model(self, ranks):
        one, other = (rank["training"] for rank in ranks)
        for rank in (one, other):
            assert rank["dtypes"] == {"stem": ["torch.bfloat16"], "head": ["torch.float32"]}
            assert rank["ours"] == rank["in_model"]
        assert one["ours"] == other["ours"]
        assert one["ours"] != one["without"]
        assert one["data"] != other["data"]

    def test_nodes_cast_below_ddp_are_reduced_as_if_cast_before_the_wrap(self, ranks):
        one, other = (rank["cast_nodes"] for rank in ranks)
        assert one["ours"] == one["before"] == other["ours"] == other["before"]
        assert any("bfloat16" in value for value in one["ours"].values())

    def test_a_region_gone_on_one_rank_is_put_back_together(self, ranks):
        assert [rank["gone"]["dtypes"] for rank in ranks] == [["torch.bfloat16"]] * 2
        assert ranks[0]["gone"]["weights"] == ranks[1]["gone"]["weights"]

    def test_an_error_on_one_rank_is_one_on_all(self, ranks):
        assert "which opens autocast as well" in ranks[0]["raised"]["message"]
        assert "rank 0: ConfigError: AutocastHook: got AmpOptimWrapper" in ranks[1]["raised"]["message"]


class TestNothingIsKeptAlive:
    def test_models_and_runners_of_runs_are_collected(self, tmp_path):
        alive: list[weakref.ref] = []
        for _ in range(2):
            hooks = [{**HOOK, "output_dtype": "float32"}, NORM_AND_HEAD, {"type": "EMAHook"}]
            runner = small_runner(tmp_path, seeded(Net), hooks, val=True)
            runner.train()
            runner.val()
            alive += [weakref.ref(runner), weakref.ref(runner.model), weakref.ref(hook_of(runner))]
            del runner
        gc.collect()
        assert [ref() for ref in alive] == [None] * 6

    def test_a_model_of_a_run_is_pickled_saved_and_deep_copied_and_trains_again(self, tmp_path):
        runner = small_runner(
            tmp_path / "a", seeded(Net), [{**HOOK, "output_dtype": "float32"}, NORM_AND_HEAD]
        )
        runner.train()
        file = io.BytesIO()
        torch.save(runner.model, file)
        file.seek(0)
        x = torch.randn(3, 4)
        for number, again in enumerate((torch.load(file, weights_only=False), copy.deepcopy(runner.model))):
            assert torch.equal(again(x), runner.model(x))
            assert find_region(again).module is again
            with torch.no_grad():
                again.head.weight.zero_()
            assert not torch.equal(again(x), runner.model(x))
            other = small_runner(tmp_path / str(number), again, [{**HOOK, "dtype": "float16"}])
            assert dtypes_of(other, other.train, "stem") == {"stem": FP16}
            assert len(regions_in(again)) == 1

    def test_state_dict_keys_and_the_class_stay(self, tmp_path):
        runner = small_runner(tmp_path, seeded(Net), [HOOK])
        runner.train()
        assert list(runner.model.state_dict()) == list(Net().state_dict())
        assert type(runner.model) is Net
        Net().load_state_dict(runner.model.state_dict())


class TestNodeScopes:
    def test_each_forward_runs_in_the_scope_of_its_node_and_a_new_run_warns_again(self, tmp_path):
        class Warning_(nn.Linear):
            def forward(self, x):
                node_dtype.warn_implicit_downcast("my_op", torch.float32, torch.bfloat16)
                return super().forward(x)

        class Both(Net):
            def __init__(self) -> None:
                super().__init__()
                self.stem, self.head = Warning_(4, 16), Warning_(16, 2)
                self.head.disable_autocast = True

        model = seeded(Both)
        for _ in range(2):
            runner = small_runner(tmp_path, model, [HOOK], iters=5)
            with pytest.warns(UserWarning, match="my_op") as caught:
                runner.train()
            texts = [str(w.message) for w in caught if "my_op" in str(w.message)]
            assert texts == [
                "node 'head': my_op runs a float32 input in bfloat16, which cannot hold all of its values."
            ]

    def test_arguments_narrowed_into_a_node_that_cannot_hold_them_are_reported(self, tmp_path):
        model = seeded(NodesNet)
        model.stem.get_autocast_dtype = lambda: torch.float16
        model.block.bfloat16()
        model.block.disable_autocast = True
        HOOKS.build(HOOK).before_run(small_runner(tmp_path, model, train=False))
        with pytest.warns(UserWarning, match="node 'block': arguments runs a float16 input in bfloat16"):
            model(torch.ones(1, 4))


def test_a_loss_with_angles_and_roots_near_zero_is_finite_when_overridden(tmp_path):
    """In bfloat16 the same loss is not what float32 gives."""

    class BoxLoss(nn.Module):
        def forward(self, x):
            angle = torch.atan2(x[:, 0] + 1e-4, x[:, 1] + 1e-4)
            return (angle.abs() + (x.exp() - 1).abs().sum(1).add(1e-6).sqrt()).mean()

    class Boxes(Net):
        def __init__(self) -> None:
            super().__init__()
            self.loss = BoxLoss()

        def forward(self, x, y=None, mode="tensor"):
            return {"loss": self.loss(1e-3 * self.predict(x))}

    values = {}
    rule = {"type": "DtypeOverrider", "class_patterns": ["BoxLoss"], "dtype": "float32"}
    for name, hooks in {"ours": [{**HOOK, "dtype": "float16"}, rule], "plain": []}.items():
        losses = Losses()
        small_runner(tmp_path, seeded(Boxes), [*hooks, losses], iters=1).train()
        values[name] = losses.values[0]
    assert math.isfinite(values["ours"])
    assert values["ours"] == pytest.approx(values["plain"], rel=1e-3)


def test_mse_of_float32_and_float64_is_a_float64_loss_with_a_float32_gradient(tmp_path):
    model = seeded(Net)
    grads: list[torch.dtype] = []
    model.head.weight.register_hook(lambda g: grads.append(g.dtype))
    HOOKS.build(HOOK).before_run(small_runner(tmp_path, model, train=False))
    loss = F.mse_loss(model(torch.ones(2, 4)).float(), torch.ones(2, 2, dtype=torch.float64))
    loss.backward()
    assert loss.dtype is torch.float64
    assert grads == [torch.float32]


def test_what_a_node_runs_in_is_what_is_observed(tmp_path):
    """linear and mm in the node's dtype, a sum with float32 in float32: not what torch.result_type would say."""

    class Sums(Net):
        def predict(self, x: Tensor) -> Tensor:
            product = self.stem(x) @ torch.ones(16, 2)
            return product + torch.ones(2)

    model = seeded(Sums)
    runner = small_runner(tmp_path, model, train=False)
    hook = HOOKS.build(HOOK)
    hook.before_run(runner)
    with record_dtypes(model) as calls:
        out = model(torch.ones(1, 4))

    assert hook.regions.nodes[0].dtype is torch.bfloat16
    assert calls.dtypes("addmm") == calls.dtypes("mm") == BF16
    assert out.dtype is torch.float32


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="layer_norm is on autocast's float32 list of CUDA alone"
)
def test_a_norm_on_the_cpu_runs_in_bf16_without_casts_and_once_there_and_back_by_a_rule(tmp_path):
    casts = {}
    for name, hooks in {"none": [], "rule": [{**NORM_AND_HEAD, "patterns": ["norm"]}]}.items():
        model = seeded(Net)
        runner = small_runner(tmp_path, model, [HOOK, *hooks], iters=1)
        with record_dtypes(model) as calls:
            runner.train()
        inside = calls.of(module="norm", backward=False)
        casts[name] = [call.outputs[0] for call in inside if call.op == "_to_copy"]
        (ran,) = (call for call in inside if call.op == "native_layer_norm")
        assert ran.inputs[0] is (torch.float32 if hooks else torch.bfloat16)
        assert ran.outputs[0] is ran.inputs[0]
    assert casts == {"none": [], "rule": [torch.float32, torch.bfloat16]}


@pytest.mark.parametrize("regions", ["before", "after", "removed"])
def test_validation_is_in_the_same_dtype_before_and_after_training_until_regions_are_removed(
    tmp_path, regions
):
    runner = small_runner(tmp_path, seeded(Net), [HOOK], val=True, iters=1)
    if regions != "before":
        runner.train()
    if regions == "removed":
        hook_of(runner).remove()
        runner.model.eval()
        found = dtypes_of(runner, lambda: runner.model(torch.ones(1, 4)), "stem")
    else:
        found = dtypes_of(runner, runner.val, "stem")
    assert found == {"stem": FP32 if regions == "removed" else BF16}
