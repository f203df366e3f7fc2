"""ScaleTracker in one process: training is untouched, nothing lies around between samples, rows are right."""

from __future__ import annotations

import gc
import itertools
import resource
import sys
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from mmengine.hooks import Hook
from mmengine.optim import OptimWrapper, OptimWrapperDict
from small_runs import AutocastNet, small_runner
from torch import nn
from tracked_runs import (
    ADAMW,
    QUIET,
    SGD,
    Net,
    Plain,
    log_of,
    outcome,
    row_of,
    rows,
    rows_of,
    seeded,
    tracked,
)

from dtype_hooks import ScaleTracker
from dtype_hooks.errors import ConfigError, SelectionError

AUTOCAST = {"type": "AutocastHook", "dtype": "bfloat16"}

RUNS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": SGD},
    "adamw": {"optimizer": ADAMW},
    "accumulation and clip": {
        "optim_wrapper": {
            "type": "OptimWrapper",
            "optimizer": ADAMW,
            "accumulative_counts": 3,
            "clip_grad": {"max_norm": 0.1},
        }
    },
    "bf16": {"hooks": [AUTOCAST]},
    "checkpointed": {"cfg": {"activation_checkpointing": ["block"]}},
    "ema": {"hooks": [{"type": "EMAHook", "momentum": 0.3, "update_buffers": True}]},
}
TRACKERS: dict[str, dict[str, Any]] = {
    "functions": {"interval": 2},
    "aten": {"interval": 2, "level": "aten"},
    "watched": {"interval": 4, "watch_nonfinite": True},
}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every run without the hook."""
    folder = tmp_path_factory.mktemp("bare")
    return {name: outcome(folder, None, iters=7, **dict(kwargs)) for name, kwargs in RUNS.items()}


@pytest.mark.parametrize("tracker", TRACKERS)
@pytest.mark.parametrize("run", RUNS)
def test_training_is_bitwise_that_of_a_run_without(
    run: str, tracker: str, bare: dict[str, Any], tmp_path: Path
):
    assert outcome(tmp_path, TRACKERS[tracker], iters=7, **dict(RUNS[run])) == bare[run]


class Inspector(Hook):
    """Notes what lies around where nothing may: before each step and after it."""

    priority = "LOWEST"

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {"before": [], "after": []}
        self.apply = torch.autograd.Function.__dict__.get("apply")
        self.backward = torch.autograd.backward

    def look(self, runner: Any, when: str) -> None:
        for name, module in runner.model.named_modules():
            for key in ("train_step", "forward", "_compiled_call_impl"):
                if key in module.__dict__:
                    self.found[when].append(f"{name}.{key}")
            hooks = [*module._forward_hooks, *module._forward_pre_hooks, *module._backward_hooks]
            self.found[when] += [f"{name} hook"] * len(hooks)
        for name, parameter in runner.model.named_parameters():
            if parameter._backward_hooks is not None or parameter._post_accumulate_grad_hooks:
                self.found[when].append(name)
        optimizer = runner.optim_wrapper.optimizer
        self.found[when] += ["optimizer hook"] * len(optimizer._optimizer_step_pre_hooks)
        from torch.optim import optimizer as of_torch

        self.found[when] += ["global optimizer hook"] * len(of_torch._global_optimizer_pre_hooks)
        self.found[when] += ["global optimizer hook"] * len(of_torch._global_optimizer_post_hooks)
        self.found[when] += ["function mode"] * torch._C._len_torch_function_stack()
        self.found[when] += ["dispatch mode"] * torch._C._len_torch_dispatch_stack()
        if torch.autograd.Function.__dict__.get("apply") is not self.apply:
            self.found[when].append("Function.apply")
        if torch.autograd.backward is not self.backward:
            self.found[when].append("backward")
        if torch._dynamo.eval_frame._stance.stance != "default":
            self.found[when].append("stance")

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        self.look(runner, "before")

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        self.look(runner, "after")


@pytest.mark.parametrize("level", ["functions", "aten"])
def test_only_a_sampled_step_finds_anything_in_place(level: str, tmp_path: Path):
    import torch._dynamo  # noqa: F401  so that its stance is set in samples

    inspector = Inspector()
    tracked(tmp_path, {"interval": 3, "level": level}, hooks=[inspector], iters=7).train()
    assert inspector.found == {"before": [".train_step", ".train_step"], "after": []}


def test_between_samples_nothing_of_the_tracker_runs(tmp_path: Path):
    """S17: the hook's own functions, counted by Python's profiler, are two guards an iteration."""
    calls: Counter[str] = Counter()
    package = str(Path(sys.modules["dtype_hooks"].__file__).parent)  # type: ignore[arg-type]

    def profile(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls[frame.f_code.co_name] += 1

    class Profile(Hook):
        priority = "VERY_HIGH"

        def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
            sys.setprofile(profile)

        def after_train_epoch(self, runner: Any) -> None:
            sys.setprofile(None)

    try:
        tracked(tmp_path, {"interval": 50}, hooks=[Profile()], iters=6).train()
    finally:
        sys.setprofile(None)
    assert set(calls) == {"before_train_iter", "_take_off", "_is_due", "_watches", "after_train_iter"}
    assert calls["before_train_iter"] == 6


def test_a_sample_reads_measurements_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """S17: one transfer a sample, also where NaN are looked for."""
    from dtype_hooks.scales import record

    reads: list[int] = []
    real = record.gather

    def counted(measurements: Any) -> Any:
        reads.append(len(measurements))
        return real(measurements)

    monkeypatch.setattr(record, "gather", counted)
    runner = tracked(tmp_path, {"interval": 2, "watch_nonfinite": True}, iters=6)
    runner.train()
    assert reads == [len(rows_of(runner)) // 3] * 3


class Fails(Net):
    """Raises in its third step, at a chosen place."""

    def __init__(self, where: str, error: type[BaseException]) -> None:
        super().__init__()
        self.where, self.error, self.steps = where, error, 0

    def forward(self, x: Any, y: Any, mode: str = "loss") -> Any:
        self.steps += 1
        if self.steps < 3:
            return super().forward(x, y, mode)
        losses = super().forward(x, y, mode)
        if self.where == "forward":
            raise self.error("planted")
        if self.where == "backward":
            losses["loss"].register_hook(self._raise)
        return losses

    def _raise(self, gradient: Any) -> None:
        raise self.error("planted")


class FailsBefore(Hook):
    """Raises in the before_train_iter that comes after the tracker's."""

    priority = "LOWEST"

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == 2:
            raise ValueError("planted")


@pytest.mark.parametrize("watch", [False, True])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "backward", "another hook"])
def test_after_an_error_or_an_interrupt_nothing_is_left_and_the_samples_so_far_are_summed_up(
    where: str, error: type[BaseException], watch: bool, tmp_path: Path
):
    if where == "another hook" and error is KeyboardInterrupt:
        error = ValueError
    inspector = Inspector()
    runner = tracked(
        tmp_path,
        {
            "interval": 3 if watch else 1,
            "watch_nonfinite": watch,
        },
        build=lambda: Fails(where, error),
        hooks=[FailsBefore()] if where == "another hook" else [],
        iters=4,
    )
    with pytest.raises(error, match="planted"):
        runner.train()
    inspector.look(runner, "after")
    assert inspector.found["after"] == []
    assert "run" not in runner.train_loop.__dict__
    if not watch:
        assert {row["iter"] for row in rows_of(runner)} == {1, 2}
        assert "2 samples in" in log_of(runner)


def test_an_interrupt_while_the_batch_is_run_again_leaves_everything_as_it_was(tmp_path: Path):
    class Interrupts(Net):
        steps = 0

        def forward(self, x: Any, y: Any, mode: str = "loss") -> Any:
            self.steps += 1
            if self.steps == 3:
                raise KeyboardInterrupt
            losses = super().forward(x, y, mode)
            return {"loss": losses["loss"] * (float("nan") if self.steps == 2 else 1)}

    inspector = Inspector()
    runner = tracked(tmp_path, {"watch_nonfinite": True}, build=Interrupts, iters=4)
    with pytest.raises(KeyboardInterrupt):
        runner.train()
    inspector.look(runner, "after")
    assert inspector.found["after"] == []
    assert not {"step", "backward", "update_params"} & set(runner.optim_wrapper.__dict__)
    assert "step" not in runner.optim_wrapper.optimizer.__dict__
    assert runner.optim_wrapper._inner_count == 2


def test_the_same_entry_three_times_makes_one_record_and_one_warning(tmp_path: Path):
    """S18."""
    runner = tracked(tmp_path / "three", {"interval": 2}, hooks=[dict(QUIET, interval=2)] * 2, iters=4)
    runner.train()
    once = tracked(tmp_path / "once", {"interval": 2}, iters=4)
    once.train()
    assert rows_of(runner) == rows_of(once)
    sent = [next((Path(each.log_dir) / "vis_data").glob("*.json")).read_text() for each in (runner, once)]
    assert (
        sent[0].count("scales/forward_std/head:linear")
        == sent[1].count("scales/forward_std/head:linear")
        == 2
    )
    assert log_of(runner).count("got the same entry more than once") == 1


def test_the_same_object_registered_three_times_makes_one_record(tmp_path: Path):
    """S18, as in a notebook whose cell is run again."""
    hook = ScaleTracker(interval=2, plots=False, verbose=False)
    runner = tracked(tmp_path, None, hooks=[hook, hook, hook], iters=4)
    runner.train()
    rows = rows_of(runner)
    assert len(rows) == len({(row["iter"], row["name"], row["direction"]) for row in rows})
    assert {row["iter"] for row in rows} == {2, 4}


def test_two_entries_that_differ_are_an_error_at_the_start(tmp_path: Path):
    runner = tracked(tmp_path, {"interval": 2}, hooks=[dict(QUIET, interval=3, patterns=["head"])])
    with pytest.raises(ConfigError, match="two entries that differ in interval, selection; expected one"):
        runner.train()


def test_training_on_with_the_same_runner_goes_on_with_the_file(tmp_path: Path):
    runner = tracked(tmp_path, {"interval": 2}, iters=4)
    runner.train()
    first = rows_of(runner)
    runner.train()  # nothing to do
    assert rows_of(runner) == first
    runner.train_loop._max_iters = 8
    runner.train()
    assert [row for row in rows_of(runner) if row["iter"] <= 4] == first
    assert {row["iter"] for row in rows_of(runner)} == {2, 4, 6, 8}
    assert log_of(runner).count("2 samples in") == 2


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"interval": 3}, {3, 6, 9}),
        ({"interval": 3, "begin": 4}, {6, 9}),
        ({"interval": 3, "begin": 6, "end": 6}, {6}),
        ({"interval": 0}, set()),
        ({"interval": 1, "end": 2}, {1, 2}),
    ],
)
def test_interval_begin_and_end_count_iterations_from_one(
    arguments: dict[str, Any], expected: set[int], tmp_path: Path
):
    runner = tracked(tmp_path, arguments, iters=9)
    runner.train()
    assert {row["iter"] for row in rows_of(runner)} == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"interval": -1}, r"ScaleTracker.interval: got -1; expected a whole number"),
        ({"begin": 5, "end": 4}, r"ScaleTracker.end: got 4; expected begin=5 or more"),
        ({"level": "kernels"}, r"ScaleTracker.level: got 'kernels'; expected one of 'functions', 'aten'"),
        ({"on_nonfinite": "stop"}, r"ScaleTracker.on_nonfinite: got 'stop'; expected one of 'warn'"),
        ({"formats": ["float7"]}, r"ScaleTracker.formats: got 'float7'"),
        ({"watch_nonfinite": "yes"}, r"ScaleTracker.watch_nonfinite: got 'yes'; expected True or False"),
        ({"frames": 1.5}, r"ScaleTracker.frames: got 1.5"),
    ],
)
def test_bad_arguments_are_told_when_built(arguments: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        ScaleTracker(**arguments)


def test_patterns_record_only_what_is_below_them_in_both_directions(tmp_path: Path):
    """S23."""
    runner = tracked(tmp_path, {"interval": 1, "patterns": "^block", "exclude": r"\.attn"}, iters=1)
    runner.train()
    rows = rows_of(runner)
    assert {row["module"] for row in rows} == {"block", "block.fc", "block.act"}
    assert {row["direction"] for row in rows} == {"forward", "backward"}
    runner = tracked(tmp_path / "none", {"interval": 2, "patterns": "blok"}, iters=2)
    with pytest.raises(SelectionError, match="'blok' matched none of"):
        runner.train()


# Gradients free of accumulation and of the loss scale


class Keeps(Plain):
    """Keeps gradients of the loss itself: of the head's output, and of the head's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.of_output: list[torch.Tensor] = []
        self.of_weight: list[torch.Tensor] = []

    def forward(self, x: Any, y: Any, mode: str = "loss") -> Any:
        loss = super().forward(x, y, mode)["loss"]
        with torch.enable_grad():
            out = self.head(nn.functional.gelu(self.norm(self.stem(x))))
            again = nn.functional.mse_loss(out.float(), y)
            of_output, of_weight = torch.autograd.grad(again, [out, self.head.weight])
        self.of_output.append(of_output)
        self.of_weight.append(of_weight)
        return {"loss": loss}


def accumulating(counts: int) -> dict[str, Any]:
    return {"type": "OptimWrapper", "optimizer": SGD, "accumulative_counts": counts}


class ByLeaf(Keeps):
    """An optim wrapper for the stem and the norm, one for the head."""

    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        loss = self(**data)["loss"]
        optim_wrapper["head"].update_params(loss)
        return {"loss": loss.detach()}


def two_leaves(model: Any) -> OptimWrapperDict:
    return OptimWrapperDict(
        stem=OptimWrapper(torch.optim.SGD([*model.stem.parameters(), *model.norm.parameters()], lr=0.1)),
        head=OptimWrapper(torch.optim.SGD(model.head.parameters(), lr=0.1)),
    )


def close(value: float | None, tensor: torch.Tensor) -> bool:
    return value == pytest.approx(tensor.double().std().item(), rel=2e-6)


@pytest.mark.parametrize("counts", [1, 3])
def test_gradients_are_those_of_the_loss_whatever_is_accumulated(counts: int, tmp_path: Path):
    """7 iterations by 3: the last micro-batch is on its own, and the loss not divided."""
    runner = tracked(tmp_path, {"interval": 1}, build=Keeps, iters=7, optim_wrapper=accumulating(counts))
    runner.train()
    rows, model = rows_of(runner), runner.model
    for at in range(7):
        sample = [row for row in rows if row["iter"] == at + 1]
        share = 1 / counts if at < 6 else 1.0
        output = row_of(sample, "head:linear", "backward")
        assert output["grad_scale"] == pytest.approx(share)
        assert close(output["std"], model.of_output[at])
        since = at - at % counts
        weight = row_of(sample, "head.weight", "backward")
        assert close(weight["std"], torch.stack(model.of_weight[since : at + 1]).mean(0))
        assert weight["grad_scale"] == pytest.approx(share * (at - since + 1))
        assert row_of(sample, "head.weight")["grad_scale"] is None


def test_fractions_are_of_the_gradient_as_it_existed(tmp_path: Path):
    """The loss scale 2^-20 makes all of it vanish in float16, and the reported scale does not show it."""
    hook = {"type": "AutocastHook", "dtype": "float16", "loss_scale": 2.0**-20}
    kwargs = {"build": Plain, "iters": 1, "optim_wrapper": accumulating(4)}
    runner = tracked(tmp_path, {"interval": 1, "on_nonfinite": "ignore"}, hooks=[hook], **kwargs)
    runner.train()
    scaled = row_of(rows_of(runner), ":mse_loss", "backward")
    assert scaled["grad_scale"] == 2.0**-20
    assert scaled["mean"] == 1.0
    assert scaled["float8_e4m3fn_underflow"] == 1.0
    assert scaled["float16_subnormal"] == 1.0


def test_with_a_loss_scale_gradients_are_those_of_the_run_without(tmp_path: Path):
    kwargs = {"build": Plain, "iters": 4, "optim_wrapper": accumulating(2)}
    hooks = {
        scale: [{"type": "AutocastHook", "dtype": "float16", "loss_scale": scale}] for scale in (1.0, 2.0**10)
    }
    ones, scaled = (
        tracked(tmp_path / str(scale), {"interval": 1}, hooks=hooks[scale], **kwargs) for scale in hooks
    )
    ones.train()
    scaled.train()
    compared = 0
    # not what the optim wrapper makes of the loss
    assert not {":div", ":mul"} & {row["name"] for row in rows_of(ones) + rows_of(scaled)}
    for one, other in zip(rows_of(ones), rows_of(scaled), strict=True):
        assert one["name"] == other["name"]
        if one["direction"] == "backward":
            assert other["grad_scale"] == one["grad_scale"] * 2**10
            for column in ("mean", "std", "rms", "amax"):
                assert other[column] == pytest.approx(one[column], rel=2e-2, abs=1e-6), one["name"]
            compared += 1
    assert compared > 20


def test_two_optim_wrappers_have_one_scale_or_none(tmp_path: Path):
    model = seeded(ByLeaf)
    runner = tracked(tmp_path / "same", {"interval": 1}, build=lambda: model, optim_wrapper=two_leaves(model))
    runner.train()
    for at, weight in enumerate(model.of_output):
        sample = [row for row in rows_of(runner) if row["iter"] == at + 1]
        assert close(row_of(sample, "head:linear", "backward")["std"], weight)
        assert row_of(sample, "head:linear", "backward")["grad_scale"] == 1.0
    model = seeded(ByLeaf)
    wrappers = two_leaves(model)
    wrappers["head"]._accumulative_counts = 2
    runner = tracked(tmp_path / "differ", {"interval": 1}, build=lambda: model, optim_wrapper=wrappers)
    runner.train()
    row = row_of(rows_of(runner)[: len(rows_of(runner)) // 6], "head:linear", "backward")
    assert row["grad_scale"] is None
    assert close(row["std"], model.of_output[0] / 2)


def test_a_step_with_two_backwards_and_an_accumulating_wrapper_counts_both(tmp_path: Path):
    class Twice(Keeps):
        def train_step(self, data: Any, optim_wrapper: Any) -> Any:
            for _ in range(2):
                loss = self(**data)["loss"]
                optim_wrapper.update_params(loss)
            return {"loss": loss.detach()}

    class Endless(Hook):
        def before_train(self, runner: Any) -> None:
            runner.optim_wrapper._max_counts = (
                -1
            )  # mmengine counts iterations where this model updates twice in each

    runner = tracked(tmp_path, {"interval": 1}, Twice, [Endless()], iters=2, optim_wrapper=accumulating(4))
    runner.train()
    for at in range(2):
        sample = [row for row in rows_of(runner) if row["iter"] == at + 1]
        mean = torch.stack(runner.model.of_weight[: 2 * at + 2]).mean(0)
        assert close(row_of(sample, "head.weight", "backward")["std"], mean)


def test_a_run_resumed_between_two_steps_has_lost_the_first_micro_batches(tmp_path: Path):
    first = tracked(tmp_path, None, build=Keeps, iters=4, optim_wrapper=accumulating(2), save_at=3)
    first.train()
    from dtype_hooks.hooks.checkpoints import allow_mmengine_checkpoints

    going_on = tracked(
        tmp_path,
        {"interval": 1},
        build=Keeps,
        iters=4,
        optim_wrapper=accumulating(2),
        resume=True,
        load_from=str(tmp_path / "iter_3.pth"),
    )
    with allow_mmengine_checkpoints():
        going_on.train()
    weight = row_of(rows_of(going_on), "head.weight", "backward")
    assert weight["grad_scale"] == 0.5
    assert close(weight["std"], going_on.model.of_weight[0])


# With the other hooks

OVERRIDER = {"type": "DtypeOverrider", "patterns": ["^bn$"], "dtype": "float32", "override_parameters": True}


def test_the_three_hooks_go_together_in_any_order(tmp_path: Path):
    hooks = {
        "tracker": {**QUIET, "interval": 2, "watch_nonfinite": True},
        "autocast": {"type": "AutocastHook", "dtype": "float16", "loss_scale": "dynamic"},
        "overrider": OVERRIDER,
    }
    without = outcome(tmp_path, None, hooks=[dict(hooks["autocast"]), dict(OVERRIDER)], iters=3)
    for order in itertools.permutations(hooks):
        given = [dict(hooks[name]) for name in order]
        assert outcome(tmp_path, None, hooks=given, iters=3) == without, order


# Outputs


def test_scalars_go_to_the_visualizer_a_table_to_the_log_and_pictures_beside_the_file(tmp_path: Path):
    import json

    runner = tracked(tmp_path, {"interval": 2, "verbose": True, "plots": True, "top": 3}, iters=4)
    runner.train()
    text = next((Path(runner.log_dir) / "vis_data").glob("*.json")).read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    ours = [line for line in lines if "scales/forward_std/stem:linear" in line]
    assert [line["step"] for line in ours] == [2, 4]
    row = row_of([row for row in rows_of(runner) if row["iter"] == 4], "stem:linear", "backward")
    assert ours[1]["scales/backward_amax/stem:linear"] == pytest.approx(row["amax"])
    assert "ScaleTracker: iteration 2\n" in log_of(runner)
    assert f"the last of {len(rows_of(runner)) // 2} rows" in log_of(runner)
    assert sorted(path.suffix for path in (Path(runner.log_dir) / "scales").iterdir())
    quiet = tracked(tmp_path / "quiet", {"interval": 2, "scalars": False}, iters=4)
    quiet.train()
    assert not list((Path(quiet.log_dir) / "vis_data").glob("*.json"))
    assert not (Path(quiet.log_dir) / "scales").exists()


def test_pictures_of_a_long_run_are_drawn_from_evenly_spread_samples(tmp_path: Path):
    from dtype_hooks.hooks.scale_file import samples_of

    runner = tracked(tmp_path, {"interval": 1, "patterns": "head"}, iters=20)
    runner.train()
    path = Path(runner.log_dir) / "scales.jsonl"
    assert sorted({row["iter"] for row in samples_of(path, 5)}) == [1, 6, 11, 15, 20]
    assert samples_of(path, 100) == rows_of(runner)
    path.write_text("")
    assert samples_of(path, 5) == []


# Memory


def test_no_tensor_and_no_graph_outlives_the_step_without_the_garbage_collector(tmp_path: Path):
    class Watches(Net):
        def __init__(self) -> None:
            super().__init__()
            self.held: list[weakref.ref[torch.Tensor]] = []

        def forward(self, x: Any, y: Any, mode: str = "loss") -> Any:
            losses = super().forward(x, y, mode)
            self.held += [weakref.ref(each) for each in losses.values()]
            return losses

    class Counts(Hook):
        alive = 0

        def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
            self.alive += sum(each() is not None for each in runner.model.held)

    counts = Counts()
    gc.collect()
    gc.disable()
    try:
        tracked(tmp_path, {"interval": 1}, build=Watches, hooks=[counts], iters=3).train()
    finally:
        gc.enable()
    assert counts.alive == 0


@pytest.mark.slow
def test_a_soak_of_two_thousand_iterations_keeps_memory_flat(tmp_path: Path):
    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    sizes: dict[int, int] = {}

    class Sizes(Hook):
        priority = "LOWEST"

        def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
            if runner.iter in (1000, 1999):
                sizes[runner.iter] = resident()

    tracked(
        tmp_path,
        {"interval": 20, "watch_nonfinite": True},
        hooks=[Sizes()],
        iters=2000,
        train_dataloader=rows(8000),
    ).train()
    assert sizes[1999] - sizes[1000] < 4 << 20


class Convolves(Plain):
    """A convolution, a bias, a reshape."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 2, 3, padding=1, bias=False)
        self.bias = nn.Parameter(torch.ones(8))

    def forward(self, x: Any, y: Any, mode: str = "loss") -> Any:
        h = self.conv(x[:, None]).reshape(4, 16)
        return {"loss": (h.float()[:, :8] + self.bias).square().mean()}


def test_ops_are_counted_by_their_dtype_under_autocast(tmp_path: Path):
    """S22: the convolution in bf16, its casts, the rest in float32."""
    runner = tracked(tmp_path, {"interval": 1, "level": "aten"}, Convolves, [AUTOCAST], iters=1)
    runner.train()
    kernels = Counter(
        (row["op"], row["dtype"])
        for row in rows_of(runner)
        if row["kind"] == "kernel" and row["direction"] == "forward"
    )
    assert kernels["aten.convolution", "bfloat16"] == 1
    assert kernels["aten._to_copy", "bfloat16"] == 2  # its input and its weight
    assert kernels["aten._to_copy", "float32"] == 1
    assert kernels["aten.add", "float32"] >= 1
    functions = {row["name"]: row["dtype"] for row in rows_of(runner) if row["kind"] == "activation"}
    assert functions["conv:conv1d"] == functions[":reshape"] == "bfloat16"
    assert functions[":add"] == "float32"


def test_a_run_in_which_nothing_was_due_says_so(tmp_path: Path):
    runner = small_runner(tmp_path, hooks=[{"type": "ScaleTracker", "interval": 1000}], iters=3)
    runner.train()
    text = log_of(runner)
    assert "no iteration was recorded: none up to 3 is a multiple of interval=1000 from begin=0." in text


def test_single_elements_that_need_no_gradient_are_left_out(tmp_path: Path):
    class Assigns(AutocastNet):
        """Boxes one by one, as target assignment goes over them."""

        def predict(self, x):
            total = [float(value) * 2 for value in x.detach().flatten().unbind()]
            return super().predict(x) * (len(total) > 0) + x.detach().sum() * 0

    torch.manual_seed(0)
    runner = small_runner(tmp_path, Assigns(), hooks=[{"type": "ScaleTracker", "interval": 1}], iters=1)
    runner.train()
    names = {row["name"] for row in rows_of(runner)}
    assert not [name for name in names if name.startswith((":unbind", ":sum"))]
    assert "head:linear" in names
