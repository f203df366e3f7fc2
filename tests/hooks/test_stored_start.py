"""What stored dtypes mean at the start of a training: init draws, warnings before it is too late, tables."""

from __future__ import annotations

import math

import pytest
import stored_runs as runs
import torch
from mmengine.model import ExponentialMovingAverage
from mmengine.optim import OptimWrapper
from processes import launch
from stored_runs import (
    ADAMW,
    FUSED_ADAMW,
    SGD,
    Net,
    log_text,
    overrider,
    seeded,
    state_of,
    store,
    stored_runner,
    train,
)
from torch import nn

TWO = ("norm", "head")
EMA = {"type": "EMAHook", "momentum": 0.1}
SCALER = "no loss scaler can serve them"
DIVISION = "eps rounds to zero there"
STANDS_STILL = "the average stands still"


def trained(tmp_path, hooks, model=None, iters=1, **kwargs):
    runner = stored_runner(tmp_path, model or seeded(), hooks, iters, **kwargs)
    result = train(runner)
    return runner, result


def warnings_of(runner):
    """The log's warnings that are ours."""
    return [line for line in log_text(runner).splitlines() if "WARNING" in line and "DtypeOverrider" in line]


class TestInitDraws:
    class Drawn(Net):
        def __init__(self):
            super().__init__()
            self.init_cfg = [
                {"type": "Normal", "layer": "Linear", "std": 0.3, "bias": 0.1},
                {"type": "Constant", "layer": "LayerNorm", "val": 0.7},
            ]

    @pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
    def test_init_weights_draws_what_it_draws_into_a_model_cast_before(self, tmp_path, dtype):
        ours = overrider(TWO, dtype, override_parameters=True)
        _, with_hook = trained(tmp_path, [ours], seeded(self.Drawn), iters=2)
        model = seeded(self.Drawn)
        store(model, TWO, getattr(torch, dtype))
        _, before = trained(tmp_path, [overrider(TWO, dtype)], model, iters=2)
        assert with_hook == before

    def test_a_cast_in_before_train_would_have_drawn_otherwise(self, tmp_path):
        """Seen in float64. A bf16 draw on a CPU is a rounded float32 draw (torch 2.13), so that it shows nothing."""
        still = {"optimizer": {"type": "SGD", "lr": 0.0}}
        ours = overrider(TWO, "float64", override_parameters=True)
        _, with_hook = trained(tmp_path, [ours], seeded(self.Drawn), **still)
        naive = [overrider(TWO, "float64"), runs.CastDataInBeforeTrain(TWO, torch.float64)]
        _, late = trained(tmp_path, naive, seeded(self.Drawn), **still)
        assert with_hook["parameters"]["head.weight"] != late["parameters"]["head.weight"]


class TestQuiet:
    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_wide_stored_dtypes_with_ema_and_adamw_warn_of_nothing(self, tmp_path, dtype):
        ours = overrider(TWO, dtype, override_parameters=True)
        runner, _ = trained(tmp_path, [ours, EMA], optimizer=ADAMW, iters=3)
        assert warnings_of(runner) == []

    def test_a_float32_rule_on_a_float32_model_trains_bit_for_bit_as_without_it(self, tmp_path):
        _, with_hook = trained(tmp_path, [overrider(["."], "float32", override_parameters=True)], iters=3)
        _, without = trained(tmp_path, [], iters=3)
        assert with_hook == without

    def test_bf16_without_ema_warns_of_nothing(self, tmp_path):
        runner, _ = trained(tmp_path, [overrider(TWO, override_parameters=True)])
        assert warnings_of(runner) == []

    def test_half_computed_but_not_stored_warns_of_nothing(self, tmp_path):
        runner, _ = trained(tmp_path, [overrider(TWO, "float16"), EMA])
        assert warnings_of(runner) == []


class TestFloat16:
    def test_parameters_that_no_scaler_can_serve_are_one_warning(self, tmp_path):
        runner, _ = trained(
            tmp_path, [overrider(TWO, "float16", override_parameters=True)], optimizer=SGD, iters=3
        )
        (line,) = warnings_of(runner)
        assert SCALER in line
        assert "4 trained parameters ('norm.weight', ...)" in line
        assert "Store them in bfloat16" in line

    def test_frozen_ones_are_no_matter(self, tmp_path):
        model = seeded()
        model.norm.requires_grad_(False)
        trained_ones = [p for p in model.parameters() if p.requires_grad]
        runner = stored_runner(
            tmp_path,
            model,
            [overrider(["norm"], "float16", override_parameters=True)],
            optim_wrapper=OptimWrapper(torch.optim.SGD(trained_ones, lr=0.1)),
            iters=1,
        )
        runner.train()
        assert warnings_of(runner) == []

    @pytest.mark.parametrize(
        ("optimizer", "warned", "finite"),
        [
            (ADAMW, True, False),
            ({"type": "Adam", "lr": 0.01}, True, False),
            ({"type": "RMSprop", "lr": 0.01}, True, False),
            ({"type": "AdamW", "lr": 0.01, "eps": 1e-4}, False, True),
            (FUSED_ADAMW, False, True),
            (SGD, False, True),
        ],
        ids=["adamw", "adam", "rmsprop", "adamw_eps", "adamw_fused", "sgd"],
    )
    def test_an_eps_that_rounds_to_zero_is_one_warning_and_the_weights_are_seen_to_break(
        self, tmp_path, optimizer, warned, finite
    ):
        model = seeded()
        with torch.no_grad():
            model.norm.weight[:4] = 0
            model.norm.bias[:4] = 0  # the head's first columns see zeros, and get gradients of zero
        ours = overrider(["head"], "float16", override_parameters=True)
        runner, _ = trained(tmp_path, [ours], model, optimizer=optimizer, iters=2)
        assert log_text(runner).count(DIVISION) == warned
        assert all(p.isfinite().all() for p in model.head.parameters()) is finite

    @pytest.mark.parametrize(("name", "fused"), [("AdamW", True), ("RMSprop", False)])
    def test_the_warning_names_the_remedies_that_the_optimizer_has(self, tmp_path, name, fused):
        ours = overrider(TWO, "float16", override_parameters=True)
        runner, _ = trained(tmp_path, [ours], optimizer={"type": name, "lr": 0.01})
        assert ("Set fused=True, or eps >= 1e-4" in log_text(runner)) is fused
        assert "eps >= 1e-4, or store them in bfloat16" in log_text(runner)


class TestEMA:
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_an_average_over_narrow_parameters_is_one_warning(self, tmp_path, dtype):
        ours = overrider(TWO, dtype, override_parameters=True)
        runner, _ = trained(tmp_path, [ours, EMA], optimizer=SGD, iters=3)
        lines = [line for line in warnings_of(runner) if STANDS_STILL in line]
        assert len(lines) == 1
        assert f"4 parameters stored in {dtype} ('norm.weight', ...)" in lines[0]
        assert "Store them in float32" in lines[0]

    @pytest.mark.parametrize(("dtype", "moves"), [(torch.bfloat16, False), (torch.float32, True)])
    def test_it_does_stand_still_where_a_wide_one_follows(self, dtype, moves):
        """From 1.0 towards 1.1 with mmengine's default momentum; a bf16 step at 1.0 is 2**-7."""
        model = nn.Linear(1, 1, bias=False).to(dtype)
        nn.init.constant_(model.weight, 1.0)
        average = ExponentialMovingAverage(model, momentum=0.0002)
        average.update_parameters(model)
        nn.init.constant_(model.weight, 1.1)
        for _ in range(500):
            average.update_parameters(model)
        now = average.module.weight.item()
        assert (now != 1.0) is moves
        if moves:
            assert math.isclose(now, 1.1 - 0.1 * (1 - 0.0002) ** 500, rel_tol=1e-4)

    def test_the_average_is_stored_in_the_dtype_as_that_of_a_model_cast_before(self, tmp_path):
        _, with_hook = trained(tmp_path, [overrider(TWO, override_parameters=True), EMA], iters=4)
        model = seeded()
        store(model, TWO, torch.bfloat16)
        _, before = trained(tmp_path, [overrider(TWO), EMA], model, iters=4)
        assert with_hook["ema"]
        assert with_hook == before


class TestReports:
    def test_the_summary_line_counts_what_is_stored(self, tmp_path):
        ours = overrider(["norm", "bn"], override_parameters=True, override_buffers=True)
        runner, _ = trained(tmp_path, [ours])
        assert "2 of 6 modules compute in bfloat16, 4 parameters and 2 buffers stored in it" in log_text(
            runner
        )

    def test_the_table_gives_a_tied_parameter_once_with_all_its_names(self, tmp_path):
        model = seeded()
        model.mid.weight = nn.Parameter(torch.randn(16, 16))
        model.twin = nn.Linear(16, 16)
        model.twin.weight = model.mid.weight
        ours = overrider(["mid"], override_parameters=True, verbose=True)
        runner, _ = trained(tmp_path, [ours], model)
        rows = [line for line in log_text(runner).splitlines() if line.startswith("| mid.weight")]
        assert len(rows) == 1
        assert "mid.weight = twin.weight" in rows[0]
        assert "16x16" in rows[0]
        assert "float32" in rows[0]
        assert model.twin.weight is model.mid.weight


class TestSingleProcess:
    def test_a_train_step_compiled_with_its_backward_does_not_deadlock_and_trains_as_one_cast_before(
        self, tmp_path
    ):
        """The backward is compiled in the midst of compiled code; a callback of ours that dynamo then compiles hangs."""
        (result,) = launch("stored_compile_worker.py", tmp_path, timeout=120)
        assert "error" not in result["before"]
        assert result["hook"] == result["before"]

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
    @pytest.mark.parametrize("optimizer", [SGD, FUSED_ADAMW], ids=["sgd", "adamw_fused"])
    def test_a_training_is_that_of_a_model_cast_before(self, tmp_path, dtype, optimizer):
        patterns = ("norm", "bn", "head")
        ours = overrider(patterns, dtype, override_parameters=True, override_buffers=True)
        runner, with_hook = trained(tmp_path, [ours], optimizer=optimizer, iters=4)
        model = seeded()
        store(model, patterns, getattr(torch, dtype), buffers=True)
        _, before = trained(tmp_path, [overrider(patterns, dtype)], model, optimizer=optimizer, iters=4)
        assert with_hook == before
        assert with_hook["parameters"]["norm.weight"].startswith(dtype)
        assert with_hook["buffers"]["bn.running_var"].startswith(dtype)
        assert with_hook == state_of(runner)
