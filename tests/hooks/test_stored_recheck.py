"""The re-check of overrides and stored dtypes, in one process: found when, reported how often, put back how.

Another hook moves, replaces or deletes something without changing a value. So a training that was put back must end
bit for bit like one that nothing has disturbed.
"""

from __future__ import annotations

import pytest
import stored_runs as runs
import torch
from stored_runs import OPTIMIZERS, SGD, At, log_text, overrider, seeded, state_of, stored_runner
from torch import nn

from dtype_hooks import DtypeOverrider
from dtype_hooks.errors import DriftError
from dtype_hooks.hooks import dtype_overrider

PATTERNS = ("norm", "bn", "head")
TITLE = "changed since they were put in place"

# what is done -> what the table says
DRIFTS = {
    runs.move_dtype: ("dtype moved", "norm.weight"),
    runs.move_dtype_with_states: ("dtype moved", "norm.weight"),
    runs.replace_parameter: ("parameter replaced", "norm.weight"),
    runs.replace_parameter_everywhere: ("parameter replaced", "norm.weight"),
    runs.delete_forward: ("override gone", "norm.forward"),
    runs.overwrite_forward: ("override gone", "norm.forward"),
    runs.move_buffers: ("dtype moved", "bn.running_mean"),
}
drifts = pytest.mark.parametrize("drift", DRIFTS, ids=lambda drift: drift.__name__)


def trained(tmp_path, *hooks, patterns=PATTERNS, iters=6, model=None, **kwargs):
    runner_kwargs = {k: kwargs.pop(k) for k in ("optimizer", "accumulate", "cfg", "work_dir") if k in kwargs}
    ours = {"check_interval": 2, "override_parameters": True, "override_buffers": True, **kwargs}
    runner = stored_runner(
        tmp_path, model or seeded(), [overrider(patterns, **ours), *hooks], iters, **runner_kwargs
    )
    runner.train()
    return runner


def without_dead_states(state):
    """mmengine's optimizer keeps the state of a Parameter that has left the model."""
    state["optimizer"] = {k: v for k, v in state["optimizer"].items() if not k.startswith("not in")}
    return state


class TestWhen:
    def test_what_another_hook_casts_back_at_3_is_found_at_4_and_not_before(self, tmp_path):
        """check_interval=2."""
        seen = {}

        def look(model, runner):
            seen[runner.iter + 1] = (model.norm.weight.dtype, log_text(runner).count(TITLE))

        hooks = [At(3, runs.move_dtype), At(range(1, 7), look, late=True)]
        trained(tmp_path, *hooks, optimizer=SGD)

        bf16 = torch.bfloat16
        assert seen[2] == (bf16, 0)
        assert seen[3] == (torch.float32, 0)
        assert seen[4] == (bf16, 1)
        assert seen[6] == (bf16, 1)

    def test_with_check_interval_0_nobody_looks(self, tmp_path):
        runner = trained(tmp_path, At(3, runs.move_dtype), optimizer=SGD, check_interval=0)
        assert TITLE not in log_text(runner)
        assert runner.model.norm.weight.dtype is torch.float32

    def test_a_quiet_training_takes_the_quick_look_alone_and_logs_nothing(self, tmp_path, monkeypatch):
        slow_looks = []
        plain = dtype_overrider.findings
        monkeypatch.setattr(dtype_overrider, "findings", lambda handle: slow_looks.append(1) or plain(handle))
        runner = trained(tmp_path, check_interval=1)
        assert slow_looks == []
        assert TITLE not in log_text(runner)

    def test_a_rule_that_stores_nothing_is_watched_too(self, tmp_path):
        runner = trained(
            tmp_path, At(2, runs.delete_forward), override_parameters=False, override_buffers=False
        )
        assert log_text(runner).count("override gone") == 1
        assert "forward" in runner.model.norm.__dict__

    def test_moved_parameters_are_no_drift_where_nothing_is_stored(self, tmp_path):
        runner = trained(tmp_path, At(2, lambda m, r: m.stem.float()), override_parameters=False)
        assert TITLE not in log_text(runner)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory):
    """What trainings end with that nothing disturbs."""
    return {
        name: state_of(trained(tmp_path_factory.mktemp(name), optimizer=optimizer))
        for name, optimizer in OPTIMIZERS.items()
    }


class TestRestore:
    @pytest.mark.parametrize("optimizer", OPTIMIZERS)
    @drifts
    def test_the_training_ends_as_if_nothing_had_happened(self, tmp_path, drift, optimizer, quiet):
        runner = trained(tmp_path, At(4, drift), optimizer=OPTIMIZERS[optimizer])
        assert without_dead_states(state_of(runner)) == quiet[optimizer]
        assert runner.model.norm.forward is not None

    @drifts
    def test_it_is_one_row_of_one_table(self, tmp_path, drift):
        kind, name = DRIFTS[drift]
        text = log_text(trained(tmp_path, At((2, 4, 6), drift)))
        assert text.count(TITLE) == 1
        rows = [line for line in text.splitlines() if line.startswith("|") and f" {kind} " in line]
        assert sum(f" {name} " in row for row in rows) == 1
        assert "DtypeOverrider at iteration 2:" in text
        assert "Put back" in text

    def test_a_second_kind_is_reported_when_it_comes(self, tmp_path):
        text = log_text(trained(tmp_path, At(2, runs.move_dtype), At(4, runs.delete_forward)))
        assert text.count(TITLE) == 2
        assert text.count("override gone") == 1

    def test_a_parameter_that_the_optimizer_does_not_know_gives_way_with_its_values(self, tmp_path):
        def replace(model, runner):
            replace.old = model.norm.weight
            model.norm.weight = nn.Parameter(torch.full((16,), 3.0))

        runner = trained(tmp_path, At(6, replace))
        weight = runner.model.norm.weight
        assert weight is replace.old
        assert torch.equal(weight, torch.full((16,), 3.0, dtype=torch.bfloat16))

    def test_a_parameter_that_the_optimizer_knows_stays_in_the_stored_dtype(self, tmp_path):
        def replace(model, runner):
            runs.replace_parameter_everywhere(model, runner)
            replace.new = model.norm.weight

        runner = trained(tmp_path, At(4, replace))
        assert runner.model.norm.weight is replace.new
        assert replace.new.dtype is torch.bfloat16
        states = runner.optim_wrapper.optimizer.state[replace.new]
        assert states["exp_avg"].dtype is torch.bfloat16

    def test_a_parameter_of_another_shape_stays_in_the_stored_dtype(self, tmp_path):
        def grow(model, runner):
            model.head = nn.Linear(16, 4)
            model.head.weight = nn.Parameter(torch.zeros(1, 16))
            model.head.bias = nn.Parameter(torch.zeros(1))

        def grow_in_place(model, runner):
            model.head.weight = nn.Parameter(torch.zeros(1, 16))
            model.head.bias = nn.Parameter(torch.zeros(1))

        for change in (grow, grow_in_place):
            runner = trained(tmp_path, At(6, change))
            head = runner.model.head
            assert (head.weight.shape, head.weight.dtype) == ((1, 16), torch.bfloat16)
            assert (head.bias.shape, head.bias.dtype) == ((1,), torch.bfloat16)

    def test_a_replaced_module_is_overridden_and_stored_and_the_table_says_who_must_train_it(self, tmp_path):
        runner = trained(tmp_path, At(4, runs.replace_module))
        norm = runner.model.norm
        assert norm.weight.dtype is torch.bfloat16
        assert "forward" in norm.__dict__
        text = log_text(runner)
        assert text.count("module replaced") == 1
        assert "A replaced module's parameters are new to the optimizer." in text

    def test_a_removed_module_is_reported_and_the_rest_goes_on(self, tmp_path):
        def drop(model, runner):
            del model.head

        runner = trained(tmp_path, At(6, drop))
        assert "no such module" in log_text(runner)
        assert runner.model.norm.weight.dtype is torch.bfloat16

    def test_in_the_midst_of_accumulation_gradients_are_kept(self, tmp_path):
        quiet = state_of(trained(tmp_path, accumulate=2, check_interval=1))
        runner = trained(tmp_path, At((1, 3), runs.move_dtype), accumulate=2, check_interval=1)
        assert state_of(runner) == quiet

    @pytest.mark.parametrize("drift", [runs.move_dtype, runs.replace_parameter, runs.delete_forward])
    def test_a_compiled_training_ends_as_if_nothing_had_happened(self, tmp_path, drift):
        compiled = {"cfg": {"compile": {"backend": "eager"}}, "patterns": ("norm", "head")}
        torch._dynamo.reset()
        quiet = state_of(trained(tmp_path, optimizer=SGD, **compiled))
        torch._dynamo.reset()
        disturbed = state_of(trained(tmp_path, At(4, drift), optimizer=SGD, **compiled))
        torch._dynamo.reset()
        assert without_dead_states(disturbed) == quiet


class TestWarn:
    @drifts
    def test_it_is_left_as_found_and_said_once(self, tmp_path, drift):
        kind, name = DRIFTS[drift]
        runner = trained(tmp_path, At(6, drift), iters=6, check_interval=1, on_drift="warn")
        text = log_text(runner)
        assert text.count(TITLE) == 1
        assert f" {kind} " in text
        assert f" {name} " in text
        assert "Left as found" in text
        if kind == "dtype moved":
            assert runner.model.get_parameter("norm.weight").dtype is (
                torch.bfloat16 if drift is runs.move_buffers else torch.float32
            )

    def test_training_goes_on_with_what_was_found_and_the_next_looks_are_quiet(self, tmp_path):
        runner = trained(tmp_path, At(1, runs.move_dtype), check_interval=1, on_drift="warn", optimizer=SGD)
        assert runner.iter == 6
        assert log_text(runner).count(TITLE) == 1
        assert runner.model.norm.weight.dtype is torch.float32


class TestRaise:
    @drifts
    def test_training_stops_at_the_look_and_says_what_it_found(self, tmp_path, drift):
        kind, name = DRIFTS[drift]
        runner = stored_runner(
            tmp_path,
            seeded(),
            [
                overrider(
                    PATTERNS,
                    override_parameters=True,
                    override_buffers=True,
                    check_interval=2,
                    on_drift="raise",
                ),
                At(4, drift),
            ],
        )
        with pytest.raises(DriftError, match="DtypeOverrider at iteration 4: got") as caught:
            runner.train()
        assert kind in str(caught.value)
        assert name.split(".")[0] in str(caught.value)
        assert "on rank 0" in str(caught.value)
        assert runner.iter + 1 == 4

    def test_a_quiet_training_does_not_raise(self, tmp_path):
        assert trained(tmp_path, on_drift="raise").iter == 6


class TestAnotherTraining:
    def test_a_second_train_of_the_same_runner_looks_before_it_begins(self, tmp_path):
        model = seeded()
        hook = DtypeOverrider(patterns=["norm"], dtype="bfloat16", override_parameters=True)
        runner = stored_runner(tmp_path, model, [hook], iters=2)
        runner.train()
        model.norm.float()
        hook.before_train(runner)
        assert model.norm.weight.dtype is torch.bfloat16
        assert runner.optim_wrapper.optimizer.state[model.norm.weight]["exp_avg"].dtype is torch.bfloat16
        assert log_text(runner).count(TITLE) == 1
