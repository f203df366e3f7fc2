"""Loss scaling of AutocastHook: on any optim wrapper, in every way of using it, through real Runners."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import warnings
import weakref

import pytest
import torch
from autocast_runs import Net as SmallNet
from autocast_runs import same_bits, seeded, weights
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper, OptimWrapperDict
from scaled_runs import (
    CLIP,
    COSINE,
    EXACT,
    OPTIMIZERS,
    WAYS,
    Amp,
    EverySecondStep,
    LateScheduler,
    OwnMethods,
    gradients_by_hand,
    in_turns,
    joint,
    scaled_runner,
    scaler_of,
    single,
    two,
)
from small_runs import Losses, log_text, small_runner
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dtype_hooks import AutocastHook, ConfigError, LossScaleError, allow_mmengine_checkpoints
from dtype_hooks.hooks.loss_scaling_wrapper import HELD_AS, METHODS, scaled_wrapper


@pytest.fixture(autouse=True)
def keep_global_state():
    """Runner seeds torch's generator for the whole process."""
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)


def trained(work_dir, *args, **kwargs):
    runner = scaled_runner(work_dir, *args, **kwargs)
    runner.train()
    return runner


def lines(runner, part):
    """Lines of the log, without when and by whom."""
    return [line.split(" - ", 3)[-1] for line in log_text(runner).splitlines() if part in line]


def scalars(runner, name):
    return runner.message_hub.get_scalar(f"train/{name}").data[0].tolist()


class Count(TorchDispatchMode):
    """Counts calls of operators by name."""

    def __init__(self, *names):
        super().__init__()
        self.names = names
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.__name__.split(".")[0] in self.names
        return func(*args, **(kwargs or {}))


class At(Hook):
    """Does something before a training iteration that counts from 1."""

    priority = "VERY_LOW"

    def __init__(self, iteration, act):
        self.iteration, self.act = iteration, act

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter + 1 == self.iteration:
            self.act(runner)


SCALE_AT_THE_END = {
    "accumulation": 4.0,
    "accumulation and clip": 4.0,
    "every second step": 4.0,
    "failing steps": 4.0,
    "two leaves with own counts": 8.0,
}
"""Doubled after every second of the updates, of which there are six elsewhere."""


class TestNoBitChanges:
    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_a_power_of_two_without_overflow_leaves_every_bit_of_unscaled_training(
        self, tmp_path, optimizer, way
    ):
        losses, expected = Losses(), Losses()
        options = WAYS[way](optimizer), WAYS[way](optimizer)
        for each, hook in zip(options, (losses, expected), strict=True):
            each["hooks"] = [*each.get("hooks", []), hook]
        scaled = trained(tmp_path, EXACT, **options[0])
        unscaled = trained(tmp_path, None, **options[1])

        # It was in place, and updated once in an iteration in which anything stepped.
        assert scaler_of(scaled).scaler.get_scale() == SCALE_AT_THE_END.get(way, 16.0)
        assert scaler_of(scaled).scale == scaler_of(scaled).scaler.get_scale()
        assert scaler_of(scaled).skipped_steps == 0
        assert same_bits(weights(scaled.model), weights(unscaled.model))
        assert losses.values == expected.values  # logged unscaled
        if "train/grad_norm" in unscaled.message_hub.log_scalars:  # clipped by the unscaled norm
            assert scalars(scaled, "grad_norm") == scalars(unscaled, "grad_norm")

    @pytest.mark.parametrize("scale", [16, 0.25])
    def test_a_static_scale_leaves_every_bit_as_well_and_never_moves(self, tmp_path, scale):
        ours = trained(
            tmp_path, scale, single("sgd", clip_grad=dict(CLIP)), infinite={4: "head.bias"}, iters=3
        )
        unscaled = trained(tmp_path, None, single("sgd", clip_grad=dict(CLIP)), iters=3)

        assert same_bits(weights(ours.model), weights(unscaled.model))
        assert scalars(ours, "grad_scale") == [scale]

    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @pytest.mark.parametrize("clip", [None, CLIP])
    def test_through_overflows_it_is_bitwise_mmengines_own_amp_wrapper(self, tmp_path, optimizer, clip):
        scale = {"init_scale": 2.0**11, "growth_interval": 2}
        options = {"infinite": {5: "stem.bias"}, "iters": 10}
        clip = clip and dict(clip)
        ours = trained(tmp_path, scale, single(optimizer, clip_grad=clip), **options)
        clip = clip and dict(clip)
        wrapper = single(optimizer, Amp, loss_scale=scale, clip_grad=clip)
        theirs = trained(tmp_path, wrapper=wrapper, written=True, **options)

        state = ours.optim_wrapper.state_dict()["loss_scaler"]
        assert state.pop("skipped_steps") > 2
        assert state.pop("consecutive_skips") in (0, 1)
        assert state == theirs.optim_wrapper.state_dict()["loss_scaler"]
        assert same_bits(weights(ours.model), weights(theirs.model))

    def test_gradients_are_unscaled_once_and_only_where_a_step_is_made(self, tmp_path):
        wrapper = single("adamw", accumulative_counts=2, clip_grad=dict(CLIP))
        with Count("_amp_foreach_non_finite_check_and_unscale_") as unscaled:
            trained(tmp_path, EXACT, wrapper, iters=6)

        assert unscaled.count == 3

    def test_float16_without_anything_said_is_scaled_from_torchs_default_on_the_cpu(self, tmp_path):
        runner = scaled_runner(tmp_path, "auto", iters=1)
        runner.train()

        scaler = runner.optim_wrapper.loss_scaler
        assert isinstance(scaler, torch.amp.GradScaler)
        assert scaler.is_enabled()
        assert scaler.current.device.type == "cpu"
        assert lines(runner, "loss scale on") == [
            "AutocastHook: loss scale on cpu dynamic, from 65536, for 1 optimizer"
        ]

    def test_gradients_below_the_smallest_float16_arrive_only_with_a_scale(self, tmp_path):
        def tiny(model, batch, w):
            loss = model.loss(batch) * 2.0**-30
            w.backward(loss)
            seen.append(float(model.stem.weight.grad.abs().max()))
            w.step()
            w.zero_grad()
            return loss

        seen = []
        for loss_scale in (2.0**24, None):
            trained(tmp_path, loss_scale, update=tiny, iters=1)

        assert seen[0] > 0
        assert seen[1] == 0

    def test_compiled_it_is_as_without(self, tmp_path):
        torch._dynamo.reset()
        clip = dict(CLIP)
        options = {"wrapper": lambda model: single("sgd", clip_grad=dict(clip))(model), "iters": 3}
        compiled = trained(tmp_path, EXACT, cfg={"compile": {"backend": "eager"}}, **options)
        eager = trained(tmp_path, EXACT, **options)

        assert scaler_of(compiled).scale == scaler_of(eager).scale == 4.0
        assert same_bits(weights(compiled.model), weights(eager.model))


class TestSkips:
    @pytest.mark.parametrize("planted", [math.inf, math.nan])  # clipping spreads a NaN to all gradients
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    def test_a_skip_is_named_before_clipping_counted_logged_and_recovered_from(
        self, tmp_path, optimizer, planted
    ):
        before = {}

        def keep(runner):
            runner.model.planted = planted
            before.update(weights(runner.model))

        def same(runner):
            before["kept"] = same_bits(before, weights(runner.model))

        runner = trained(
            tmp_path,
            {"init_scale": 8.0},
            single(optimizer, clip_grad=dict(CLIP)),
            infinite={3: "norm.bias"},
            hooks=[At(3, keep), At(4, same)],
        )

        assert before["kept"]
        assert lines(runner, "step skipped") == [
            "AutocastHook at iteration 3: step skipped, the gradients of 1 of 6 parameters were not finite at loss scale 8: "
            "'norm.bias'; the scale is now 4"
        ]
        assert scalars(runner, "skipped_steps") == [0.0, 1.0]
        assert scalars(runner, "grad_scale") == [8.0, 4.0]
        assert all(bool(p.isfinite().all()) for p in runner.model.parameters())
        state = runner.optim_wrapper.state_dict()["loss_scaler"]
        assert (state["scale"], state["_growth_tracker"], state["skipped_steps"]) == (4.0, 3, 1)

    @pytest.mark.parametrize("optimizer", ["sgd", "adamw_fused"])
    def test_a_skip_at_the_last_iteration_is_reported_too(self, tmp_path, optimizer):
        runner = trained(tmp_path, {"init_scale": 8.0}, single(optimizer), infinite={3: "head.bias"}, iters=3)

        assert len(lines(runner, "at iteration 3: step skipped")) == 1
        assert scalars(runner, "skipped_steps")[-1] == 1

    def test_the_log_shows_scale_and_count(self, tmp_path):
        logger = {"logger": {"type": "LoggerHook", "interval": 1}}
        runner = trained(
            tmp_path, {"init_scale": 8.0}, infinite={2: "head.bias"}, default_hooks=logger, iters=3
        )

        shown = [line[line.index("grad_scale") :] for line in lines(runner, "grad_scale")]
        assert shown == [
            f"grad_scale: {scale}.0000  skipped_steps: {n}.0000" for scale, n in [(8, 0), (4, 1), (4, 1)]
        ]

    @pytest.mark.parametrize("late", [False, True])
    def test_the_lr_schedule_goes_on_at_a_skipped_step_without_a_warning_of_order(self, tmp_path, late):
        def run(loss_scale, infinite):
            return trained(
                tmp_path,
                loss_scale,
                single("sgd"),
                infinite=infinite,
                hooks=[LateScheduler()] if late else [],
                param_scheduler=None if late else dict(COSINE),
                iters=4,
            )

        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            skipping = run({"init_scale": 8.0}, {1: "head.bias"})
        plain = run(None, {})

        assert scaler_of(skipping).skipped_steps == 1
        assert skipping.optim_wrapper._global_step == plain.optim_wrapper._global_step == 3  # from -1
        for what in (lambda r: r.param_schedulers[0].last_step, lambda r: r.optim_wrapper.get_lr()):
            assert what(skipping) == what(plain)
        assert skipping.optim_wrapper.get_lr()["lr"][0] < 0.001

    def test_one_leaf_is_skipped_and_the_other_steps_and_the_scale_is_halved_once(self, tmp_path):
        runner = trained(
            tmp_path,
            {"init_scale": 8.0},
            two("sgd"),
            joint,
            infinite={2: "head.bias", 3: "stem.bias"},
            iters=3,
        )

        assert [line.split(":")[2:] for line in lines(runner, "step skipped")] == [
            [" 'head.bias'; the scale is now 4"],
            [" 'stem.bias'; the scale is now 2"],
        ]
        assert scaler_of(runner).scaler.get_scale() == 2.0
        assert scaler_of(runner).skipped_steps == 2

    def test_an_inf_in_the_first_of_two_steps_counts_once_and_spoils_no_gradient_kept_by_another_leaf(
        self, tmp_path
    ):
        """The stem has accumulated gradients at scale 8 when the scale falls to 4."""
        runner = trained(
            tmp_path, {"init_scale": 8.0}, two("sgd"), in_turns, infinite={1: "head.bias"}, iters=2
        )
        expected = trained(
            tmp_path, {"init_scale": 4.0}, two("sgd"), in_turns, infinite={1: "head.bias"}, iters=2
        )

        assert scaler_of(runner).scaler.get_scale() == 4.0
        assert scaler_of(runner).skipped_steps == 1
        assert same_bits(weights(runner.model), weights(expected.model))

    @pytest.mark.parametrize("optimizer", ["sgd", "adamw_fused"])
    def test_too_many_in_a_row_stop_the_training_with_the_names(self, tmp_path, optimizer):
        infinite = {2: "stem.bias"} | dict.fromkeys(range(4, 20), "head.bias")
        runner = scaled_runner(
            tmp_path,
            {"init_scale": 8.0},
            single(optimizer),
            infinite=infinite,
            iters=20,
            hook={"max_consecutive_skips": 3},
        )
        with pytest.raises(
            LossScaleError,
            match=r"AutocastHook at iteration 6: got 3 iterations in a row with non-finite gradients, at the last in "
            r"'head.bias'; expected fewer than max_consecutive_skips. Find where .* \(it is 1\)\.",
        ):
            runner.train()
        assert runner.iter == (
            6 if optimizer == "adamw_fused" else 5
        )  # known on the device alone, read one later
        assert scaler_of(runner).skipped_steps >= 4

    def test_zero_never_stops_and_a_static_scale_counts_as_well(self, tmp_path):
        infinite = dict.fromkeys(range(1, 80), "head.bias")
        runner = trained(tmp_path, 4, infinite=infinite, iters=60, hook={"max_consecutive_skips": 0})
        assert scaler_of(runner).consecutive_skips == 60
        with pytest.raises(LossScaleError, match="got 50 iterations in a row"):
            trained(tmp_path, 4, infinite=infinite, iters=60)

    @pytest.mark.parametrize("value", [-1, 1.5, True, "50", None])
    def test_other_limits_are_refused(self, value):
        with pytest.raises(
            ConfigError, match=r"AutocastHook.max_consecutive_skips: got .*; expected a whole number"
        ):
            AutocastHook(max_consecutive_skips=value)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, CLIP])
def test_an_ordinary_step_reads_nothing_from_the_device_that_torchs_scaler_alone_does_not(
    tmp_path, optimizer, clip
):
    def reads(loss_scale, **kwargs):
        clipping = {"clip_grad": clip and dict(clip)}
        wrapper = single(optimizer, **(clipping | kwargs.pop("wrapper", {})))
        runner = scaled_runner(tmp_path, loss_scale, wrapper, iters=5, **kwargs)
        with Count("_local_scalar_dense", "is_nonzero", "equal", "item", "nonzero") as count:
            runner.train()
        return count.count

    alone = reads(None, wrapper={"cls": Amp, "loss_scale": {"init_scale": 8.0}}, written=True)
    unscaled = reads(None)
    ours = reads({"init_scale": 8.0})

    # Starting reads the scale once. A step of an optimizer that is not fused is read by torch's scaler itself.
    assert ours == alone + 1
    assert alone == unscaled + (0 if optimizer == "adamw_fused" else 5)


class TestWhoScales:
    def test_bf16_ignores_a_scaler_with_one_warning(self, tmp_path):
        options = {"iters": 3}
        ours = trained(tmp_path / "a", "dynamic", hook={"dtype": "bfloat16"}, **options)
        plain = trained(tmp_path / "b", None, hook={"dtype": "bfloat16"}, **options)
        auto = trained(tmp_path / "c", "auto", hook={"dtype": "bfloat16"}, **options)

        assert len(lines(ours, "AutocastHook.loss_scale: nothing is autocast to float16 in training")) == 1
        assert not lines(plain, "loss_scale")
        assert not lines(auto, "loss_scale")
        assert not hasattr(ours.optim_wrapper, "loss_scaler")
        assert same_bits(weights(ours.model), weights(plain.model))

    def test_float16_without_a_scaler_is_one_warning(self, tmp_path):
        runner = trained(tmp_path, None)

        assert (
            len(lines(runner, "AutocastHook: float16 without loss scaling: gradients below 6e-8 become zero"))
            == 1
        )
        assert not hasattr(runner.optim_wrapper, "loss_scaler")

    @pytest.mark.parametrize("options", [{"enabled": False}, {"phases": ["val"]}])
    def test_where_training_does_not_autocast_no_loss_is_scaled(self, tmp_path, options):
        runner = trained(tmp_path, "auto", hook=options)
        assert scaled_wrapper(runner.optim_wrapper) is None

    def test_one_node_in_float16_is_enough(self, tmp_path):
        class Half(nn.Linear):
            def get_autocast_dtype(self):
                return torch.float16

        model = seeded(SmallNet)
        model.head = Half(16, 2)
        runner = small_runner(tmp_path, model, [{"type": "AutocastHook", "dtype": "bfloat16"}])
        runner.train()
        assert scaler_of(runner).skipped_steps == 1  # 65536 is too much for its head
        assert scaler_of(runner).scale == 32768.0

    def test_a_run_without_training_is_left_alone(self, tmp_path):
        hook = {"type": "AutocastHook", "dtype": "float16", "loss_scale": "dynamic"}
        runner = small_runner(tmp_path, seeded(SmallNet), [hook], train=False, val=True)
        runner.val()
        assert "loss_scale" not in log_text(runner).split("Hooks will be executed")[-1]

    @pytest.mark.parametrize("first", [True, False])
    @pytest.mark.parametrize("how", ["overrider", "cast_nodes", "half"])
    def test_trained_parameters_stored_in_float16_are_an_error_at_the_start_that_names_them(
        self, tmp_path, how, first
    ):
        model = seeded(SmallNet)
        ours = {"type": "AutocastHook", "dtype": "float16", "cast_nodes": how == "cast_nodes"}
        rule = {
            "type": "DtypeOverrider",
            "patterns": ["head"],
            "dtype": "float16",
            "override_parameters": True,
        }
        hooks = [ours, rule][:: 1 if first else -1] if how == "overrider" else [ours]
        if how == "half":
            model.head.half()
        names = (
            "6 .*'stem.weight', 'stem.bias', 'norm.weight'"
            if how == "cast_nodes"
            else "2 .*'head.weight', 'head.bias'"
        )
        names = names.replace(" .*", r" trained parameters stored in float16 \(")
        runner = small_runner(tmp_path, model, hooks)
        with pytest.raises(
            LossScaleError, match=rf"AutocastHook.loss_scale: got {names}.*; expected float32 ones"
        ):
            runner.train()
        assert runner.iter == 0

    def test_a_parameter_in_two_wrappers_is_an_error_at_the_start(self, tmp_path):
        def shared(model):
            parts = {
                name: OptimWrapper(OPTIMIZERS["sgd"](model.head.parameters())) for name in ("stem", "head")
            }
            return OptimWrapperDict(**parts)

        with pytest.raises(
            LossScaleError, match=r"got 2 parameters \('head.weight', 'head.bias'\) in two optim wrappers"
        ):
            trained(tmp_path, "dynamic", shared, joint)

    def test_parameters_stored_in_bf16_or_frozen_in_float16_are_served(self, tmp_path):
        model = seeded(SmallNet)
        model.stem.half().requires_grad_(False)
        rule = {
            "type": "DtypeOverrider",
            "patterns": ["head"],
            "dtype": "bfloat16",
            "override_parameters": True,
        }
        runner = small_runner(tmp_path, model, [{"type": "AutocastHook", "dtype": "float16"}, rule], iters=2)
        runner.train()
        assert scaler_of(runner).skipped_steps == 0

    def test_a_wrapper_with_a_scaler_of_its_own_is_refused(self, tmp_path):
        class Own(OptimWrapper):
            def __init__(self, **kwargs):
                super().__init__(**kwargs)
                self.loss_scaler = torch.amp.GradScaler("cpu")

        with pytest.raises(
            ConfigError, match="got Own, which has a loss_scaler of its own; expected one scaler"
        ):
            trained(tmp_path, wrapper=single("sgd", Own))

    @pytest.mark.parametrize("second", ["auto", {"init_scale": 4.0}])
    def test_two_hooks_of_a_run_share_one_scaler_or_are_refused(self, tmp_path, second):
        hooks = [
            {"type": "AutocastHook", "dtype": "float16", "patterns": ["stem"]},
            {"type": "AutocastHook", "dtype": "float16", "patterns": ["head"], "loss_scale": second},
        ]
        runner = small_runner(tmp_path, seeded(SmallNet), hooks)
        if second == "auto":
            runner.train()
            assert len(scaler_of(runner).wrappers) == 1
            assert scaled_wrapper(runner.optim_wrapper).methods["step"].previous is None
        else:
            with pytest.raises(
                ConfigError, match=r"where another AutocastHook has .*; expected one. Give both the same"
            ):
                runner.train()


class TestPastTheWrapper:
    """What would train on scaled gradients, or on unscaled ones that are taken for scaled, without a word."""

    UNSCALED = r"got gradients of 6 parameters from a backward\(\) of unscaled losses; expected optim_wrapper.update_params"
    CARRIES = (
        r"got optimizer.step\(\) on gradients that carry the loss scale; expected optim_wrapper.step\(\)"
    )

    def one(self, backward, step):
        def update(model, batch, w):
            loss = model.loss(batch)
            (w if backward else loss).backward(*([loss] if backward else []))
            (w if step else w.optimizer).step()
            w.zero_grad()
            return loss

        return update

    @pytest.mark.parametrize(
        ("backward", "step", "message"),
        [(False, False, UNSCALED), (False, True, UNSCALED), (True, False, CARRIES)],
    )
    def test_a_backward_or_a_step_past_it_is_an_error(self, tmp_path, backward, step, message):
        with pytest.raises(LossScaleError, match=message):
            trained(tmp_path, "dynamic", update=self.one(backward, step))

    def test_one_of_two_losses_past_it_is_an_error(self, tmp_path):
        def update(model, batch, w):
            w.backward(model.loss(batch))
            model.loss(batch).backward()
            w.step()

        with pytest.raises(LossScaleError, match=self.UNSCALED):
            trained(tmp_path, EXACT, update=update)

    def test_the_class_own_step_called_past_the_instance_is_an_error(self, tmp_path):
        class Past(OptimWrapper):
            def update_params(self, loss, step_kwargs=None, zero_kwargs=None):
                self.backward(loss)
                OptimWrapper.step(self)

        with pytest.raises(LossScaleError, match=self.CARRIES):
            trained(tmp_path, EXACT, single("sgd", Past))

    @pytest.mark.parametrize("how", ["model", "wrapper", "in place"])
    def test_a_backward_for_the_eyes_only_is_none_once_its_gradients_are_gone(self, tmp_path, how):
        def look(model, batch, w):
            model.loss(batch).backward()
            (model if how == "model" else w).zero_grad(set_to_none=how != "in place")
            loss = model.loss(batch)
            w.update_params(loss)
            return loss

        ours = trained(tmp_path, EXACT, single("sgd"), look)
        assert same_bits(weights(ours.model), weights(trained(tmp_path, None, single("sgd"), look).model))

    def test_gradients_set_by_hand_after_others_were_dropped_are_taken_as_they_are(self, tmp_path):
        def by_hand(model, batch, w):
            w.backward(model.loss(batch))
            w.zero_grad()
            return gradients_by_hand(model, batch, w)

        ours = trained(tmp_path, EXACT, single("sgd"), by_hand)
        assert same_bits(weights(ours.model), weights(trained(tmp_path, None, single("sgd"), by_hand).model))

    def test_closures_are_refused_by_torchs_scaler(self, tmp_path):
        def update(model, batch, w):
            w.backward(model.loss(batch))
            w.step(closure=lambda: None)

        with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
            trained(tmp_path, EXACT, update=update)


class TestWhatIsPutOn:
    @pytest.mark.parametrize("cls", [OptimWrapper, OwnMethods, EverySecondStep])
    def test_class_and_optimizer_stay_and_remove_puts_everything_back(self, tmp_path, cls):
        runner = scaled_runner(tmp_path, EXACT, single("sgd", cls), param_scheduler=dict(COSINE))
        wrapper = runner.optim_wrapper
        runner.param_schedulers = runner.build_param_scheduler(runner.param_schedulers)
        before = dict(wrapper.__dict__)
        runner.train()
        assert type(wrapper) is cls
        assert {HELD_AS, "loss_scaler", *METHODS} <= wrapper.__dict__.keys()
        assert "step" not in wrapper.optimizer.__dict__
        hook = next(hook for hook in runner.hooks if isinstance(hook, AutocastHook))
        hook.remove()
        hook.remove()

        assert wrapper.__dict__.keys() == before.keys()
        assert wrapper.__dict__["step"] is before["step"]
        assert not wrapper.optimizer._optimizer_step_pre_hooks
        assert not any(p._post_accumulate_grad_hooks for p in runner.model.parameters())
        assert "loss_scaler" not in wrapper.state_dict()

    def test_a_scheduler_made_meanwhile_goes_on_counting_after_removal(self, tmp_path):
        runner = trained(tmp_path, EXACT, single("sgd"), hooks=[LateScheduler()], iters=2)
        hook = next(hook for hook in runner.hooks if isinstance(hook, AutocastHook))
        hook.remove()
        counted = runner.optim_wrapper._global_step
        before = weights(runner.model)
        runner.model.loss([torch.ones(1, 4), torch.ones(1, 2)]).backward()
        runner.optim_wrapper.step()

        assert runner.optim_wrapper._global_step == counted + 1
        assert not same_bits(before, weights(runner.model))

    def test_a_later_run_with_the_same_wrapper_takes_over(self, tmp_path):
        first = trained(tmp_path, EXACT, single("sgd"), hooks=[LateScheduler()], iters=3)
        second = scaled_runner(
            tmp_path, EXACT, lambda model: first.optim_wrapper, hooks=[LateScheduler()], iters=3
        )
        second.model = first.model
        second.train()
        reference = trained(tmp_path, None, single("sgd"), hooks=[LateScheduler()], iters=3)
        again = scaled_runner(
            tmp_path, None, lambda model: reference.optim_wrapper, hooks=[LateScheduler()], iters=3
        )
        again.model = reference.model
        again.train()

        assert scaled_wrapper(first.optim_wrapper).shared is scaler_of(second)
        assert first.optim_wrapper._global_step == reference.optim_wrapper._global_step == 2
        assert same_bits(weights(first.model), weights(reference.model))

    def test_wrappers_replaced_before_training_get_the_scaler_and_the_old_ones_lose_it(self, tmp_path):
        class Replace(Hook):
            priority = "LOWEST"

            def before_run(self, runner):
                old.append(runner.optim_wrapper)
                runner.optim_wrapper = two("sgd")(runner.model)

        old = []
        runner = trained(tmp_path, EXACT, single("sgd"), joint, hooks=[Replace()])
        reference = trained(tmp_path, None, two("sgd"), joint)

        assert scaled_wrapper(old[0]) is None
        assert len(scaler_of(runner).wrappers) == 2
        assert same_bits(weights(runner.model), weights(reference.model))

    def test_nothing_is_kept_alive(self, tmp_path):
        def run():
            runner = trained(tmp_path, EXACT, two("sgd"), joint)
            leaf = runner.optim_wrapper["head"]
            return map(
                weakref.ref, (runner.model.head.weight, leaf, leaf.optimizer, runner, scaler_of(runner))
            )

        alive = list(run())
        gc.collect()
        assert [ref() for ref in alive] == [None] * 5

    @pytest.mark.parametrize("how", ["deepcopy", "pickle"])
    @pytest.mark.parametrize("leaves", [1, 2])
    def test_a_copy_trains_on_by_itself_as_an_unscaled_one(self, tmp_path, how, leaves):
        def pair(runner):
            runner.model.update = None
            held = {"model": runner.model, "wrapper": runner.optim_wrapper}
            hook = next(hook for hook in runner.hooks if isinstance(hook, AutocastHook))
            return copy.deepcopy(held) if how == "deepcopy" else pickle.loads(pickle.dumps(held)), hook

        results = []
        for loss_scale in (EXACT, None):
            wrapper = two("adamw") if leaves == 2 else single("adamw", clip_grad=dict(CLIP))
            runner = trained(tmp_path, loss_scale, wrapper, joint if leaves == 2 else None, iters=3)
            held, _ = pair(runner)
            model, wrapper = held["model"], held["wrapper"]
            original = weights(runner.model)
            for _ in range(3):
                loss = model.loss([torch.ones(2, 4), torch.zeros(2, 2)])
                if leaves == 2:
                    wrapper["head"].backward(loss)
                    for each in wrapper.values():
                        each.step()
                        each.zero_grad()
                else:
                    wrapper.update_params(loss)
            assert same_bits(original, weights(runner.model))
            results.append(weights(model))
            if loss_scale is not None:
                leaf = wrapper["head"] if leaves == 2 else wrapper
                shared = scaled_wrapper(leaf).shared
                assert shared.scale == shared.scaler.get_scale() > scaler_of(runner).scale

        assert same_bits(*results)


SCALE = {"init_scale": 2.0**11, "growth_interval": 3}


class TestState:
    def saved(self, tmp_path, **kwargs):
        """A run of 10 iterations that has saved after 5."""
        save = {"checkpoint": {"type": "CheckpointHook", "interval": 5, "by_epoch": False}}
        return trained(tmp_path, iters=10, default_hooks=save, **kwargs)

    def resumed(self, tmp_path, *args, **kwargs):
        path = str(tmp_path / "first" / "iter_5.pth")
        with allow_mmengine_checkpoints():
            return trained(tmp_path / "second", *args, iters=10, load_from=path, resume=True, **kwargs)

    def wrappers(self):
        clip = {"clip_grad": dict(CLIP)}
        return {
            "ours": {"loss_scale": SCALE, "wrapper": single("adamw", **clip)},
            "amp": {
                "wrapper": single("adamw", Amp, loss_scale=SCALE, **copy.deepcopy(clip)),
                "written": True,
            },
        }

    @pytest.mark.parametrize(("writer", "reader"), [("ours", "amp"), ("amp", "ours")])
    def test_a_run_moves_between_this_and_amp_optim_wrapper_bit_for_bit(self, tmp_path, writer, reader):
        straight = self.saved(tmp_path / "first", **self.wrappers()[writer])
        moved = self.resumed(tmp_path, **self.wrappers()[reader])

        states = [r.optim_wrapper.state_dict()["loss_scaler"] for r in (straight, moved)]
        counts = {"skipped_steps", "consecutive_skips"}
        first, second = ({k: v for k, v in state.items() if k not in counts} for state in states)
        assert first == second
        assert same_bits(weights(straight.model), weights(moved.model))
        assert not lines(moved, "starts afresh")
        assert len(lines(moved, ", from the checkpoint")) == (reader == "ours")

    def test_a_run_without_loss_scaling_reads_the_checkpoint_of_one_with_it(self, tmp_path):
        self.saved(tmp_path / "first", **self.wrappers()["ours"])
        runner = self.resumed(tmp_path, None, single("adamw", clip_grad=dict(CLIP)))
        assert runner.iter == 10

    def test_a_checkpoint_without_the_key_starts_afresh_with_one_warning(self, tmp_path):
        self.saved(tmp_path / "first", loss_scale=None, wrapper=two("adamw"), update=joint)
        runner = self.resumed(tmp_path, {"init_scale": 8.0}, two("adamw"), joint)

        assert lines(runner, "starts afresh") == [
            "AutocastHook: the checkpoint holds no loss scaler's state, so the scale starts afresh at 8."
        ]
        assert scaler_of(runner).growth_tracker == 5

    def test_a_static_scale_and_factors_that_are_given_hold_after_resuming(self, tmp_path):
        self.saved(tmp_path / "first", **self.wrappers()["ours"])
        static = self.resumed(tmp_path, 4, single("adamw", clip_grad=dict(CLIP)))
        assert scalars(static, "grad_scale") == [4.0]
        given = self.resumed(tmp_path, {"growth_interval": 7}, single("adamw", clip_grad=dict(CLIP)))
        assert scaler_of(given).scaler.state_dict()["growth_interval"] == 7

    @pytest.mark.parametrize("used", [False, True])
    def test_a_state_is_loaded_into_a_fresh_and_into_a_used_scaler(self, tmp_path, used):
        source = trained(tmp_path, SCALE, single("sgd"), iters=7)
        state = copy.deepcopy(source.optim_wrapper.state_dict())
        runner = scaled_runner(tmp_path, SCALE, single("sgd"), iters=4)
        runner.call_hook("before_run") if not used else runner.train()
        runner.optim_wrapper.load_state_dict(state)

        assert runner.optim_wrapper.state_dict()["loss_scaler"] == state["loss_scaler"]
        shared = scaler_of(runner)
        assert (shared.scale, shared.growth_tracker) == (
            state["loss_scaler"]["scale"],
            state["loss_scaler"]["_growth_tracker"],
        )
        assert "loss_scaler" in state  # what is loaded is left whole

    def test_each_leaf_of_a_dict_holds_the_shared_state_as_amp_optim_wrappers_do(self, tmp_path):
        runner = trained(tmp_path, EXACT, two("adamw"), joint)
        states = runner.optim_wrapper.state_dict()

        assert isinstance(runner.optim_wrapper, OptimWrapperDict)
        assert states["stem"]["loss_scaler"] == states["head"]["loss_scaler"]
        assert states["stem"].keys() == {"state", "param_groups", "loss_scaler"}


@pytest.mark.parametrize(
    "value", [True, False, 0, -2, "static", "1024", math.nan, [], {"scale": 4}, {"init_scale": -1}]
)
def test_other_loss_scales_are_refused_when_built(value):
    with pytest.raises(
        ConfigError, match=r"^AutocastHook\.loss_scale(\.init_scale)?: got .*; expected .*\. Leave it out"
    ):
        AutocastHook(loss_scale=value)
