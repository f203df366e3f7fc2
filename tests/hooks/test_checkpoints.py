"""Loading mmengine's checkpoints with ``weights_only`` left on."""

import os
import pickle
import zipfile
from collections import OrderedDict
from typing import ClassVar

import numpy as np
import pytest
import torch
from mmengine.config import ConfigDict
from mmengine.evaluator import BaseMetric, Evaluator
from mmengine.logging import HistoryBuffer
from mmengine.model import BaseModel
from mmengine.runner import CheckpointLoader, Runner
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dtype_hooks.errors import ConfigError
from dtype_hooks.hooks.checkpoints import allow_mmengine_checkpoints, checkpoint_globals


class Regression(BaseModel):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x, y, mode="tensor"):
        loss = (self.layer(x) - y).square().mean()
        return {"loss": loss} if mode == "loss" else [loss]


class MeanLoss(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results.append(float(data_samples[0]))

    def compute_metrics(self, results):
        return {"score": np.float32(np.mean(results))}


class Points(TensorDataset):
    metainfo: ClassVar = {
        "classes": ("a", "b"),
        "palette": np.arange(6).reshape(2, 3),
        "names": ConfigDict(a=ConfigDict(b=1)),
    }


class Settings:
    """A class of the user's that found its way into a checkpoint."""


def build_runner(work_dir, name, max_iters, save_best=None, **kwargs):
    torch.manual_seed(0)
    loader = DataLoader(Points(torch.randn(8, 4), torch.randn(8, 2)), batch_size=4)
    return Runner(
        model=Regression(),
        work_dir=str(work_dir),
        train_dataloader=loader,
        val_dataloader=loader,
        train_cfg={"by_epoch": False, "max_iters": max_iters, "val_interval": 2},
        val_cfg={},
        val_evaluator=Evaluator([MeanLoss()]),
        optim_wrapper={"type": "OptimWrapper", "optimizer": {"type": "AdamW", "lr": 0.01}},
        param_scheduler=[{"type": "MultiStepLR", "milestones": [1], "by_epoch": False}],
        default_hooks={
            "checkpoint": {"type": "CheckpointHook", "by_epoch": False, "interval": 2, **(save_best or {})}
        },
        custom_hooks=[{"type": "EMAHook"}],
        log_level="ERROR",
        experiment_name=name,
        **kwargs,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A real checkpoint: message hub, metrics, dataset meta, optimizer, schedulers, EMA."""
    work_dir = tmp_path_factory.mktemp("trained")
    build_runner(work_dir, "trained", 2, {"save_best": "score", "rule": "less"}).train()
    return work_dir / "iter_2.pth"


@pytest.fixture(autouse=True)
def nothing_is_left_behind():
    allowed = torch.serialization.get_safe_globals()
    loader = CheckpointLoader.__dict__["load_checkpoint"]
    statistics = dict(HistoryBuffer()._statistics_methods)
    yield
    assert set(torch.serialization.get_safe_globals()) == set(allowed)
    assert CheckpointLoader.__dict__["load_checkpoint"] is loader
    assert HistoryBuffer()._statistics_methods == statistics


class Call:
    """Pickles as a call of ``function`` with ``args``."""

    def __init__(self, function, *args):
        self.call = (function, args)

    def __reduce__(self):
        return self.call


def save(value, path):
    torch.save({"state_dict": {}, "value": value}, path)
    return str(path)


def raw_checkpoint(path, pickled):
    """A file of torch.save's layout around hand-written pickle code, for names that Python itself would not write."""
    torch.save({}, path)
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, pickled if name.endswith("data.pkl") else content)
    return str(path)


def test_plain_torch_refuses_mmengine_checkpoints(trained):
    with pytest.raises(pickle.UnpicklingError, match="Unsupported global"):
        torch.load(trained)


def test_checkpoint_loads_whole_inside_the_context(trained):
    with checkpoint_globals():
        checkpoint = torch.load(trained, weights_only=True)
    history = checkpoint["message_hub"]["log_scalars"]["train/loss"]
    assert type(history) is HistoryBuffer
    assert history.statistics("mean") == history.mean() == history.data[0].mean()
    meta = checkpoint["meta"]["dataset_meta"]
    assert type(meta["palette"]) is np.ndarray
    np.testing.assert_array_equal(meta["palette"], np.arange(6).reshape(2, 3))
    assert meta["palette"].dtype == np.arange(6).dtype
    assert meta["names"] == {"a": {"b": 1}}
    unsafe = torch.load(trained, weights_only=False)
    assert list(unsafe) == list(checkpoint)
    assert all(torch.equal(unsafe["state_dict"][k], v) for k, v in checkpoint["state_dict"].items())


@pytest.mark.parametrize("code", [*"?bhilqBHILQefdgFDG", "S3", "U5", "M8[s]", "m8[ms]", ">f8", ">i4"])
def test_plain_numpy_values_load_as_unrestricted_pickle_loads_them(code, tmp_path):
    array = np.arange(6).reshape(2, 3).astype(code)
    path = save([array, array[1, 2], array.T, array[:0], array.dtype], tmp_path / "a.pth")
    with checkpoint_globals():
        loaded = torch.load(path)["value"]
    unrestricted = torch.load(path, weights_only=False)["value"]
    for got, want in zip(loaded, unrestricted, strict=True):
        assert type(got) is type(want)
        assert (
            got == want
            if isinstance(want, np.dtype)
            else got.dtype == want.dtype and np.array_equal(got, want)
        )
    np.testing.assert_array_equal(loaded[0], array)


@pytest.mark.parametrize("module", ["numpy.core.multiarray", "numpy._core.multiarray"])
def test_arrays_of_numpy_1_and_2_load(module, tmp_path):
    path = save([np.arange(3.0), np.float32(0.5)], tmp_path / "a.pth")
    with zipfile.ZipFile(path) as archive:
        code = archive.read("a/data.pkl")
    code = code.replace(b"numpy._core.multiarray", module.encode()).replace(
        b"numpy.core.multiarray", module.encode()
    )
    assert module.encode() in code
    path = raw_checkpoint(tmp_path / "b.pth", code)
    with checkpoint_globals():
        array, scalar = torch.load(path)["value"]
    assert array.tolist() == [0.0, 1.0, 2.0]
    assert type(scalar) is np.float32
    assert scalar == 0.5


@pytest.mark.parametrize(
    ("pickled", "name"),
    [
        (b"\x80\x02cposix\nsystem\nX\x0e\x00\x00\x00touch /nowhere\x85R.", "posix.system"),
        (b"\x80\x02cos\nsystem\nX\x0e\x00\x00\x00touch /nowhere\x85R.", "os.system"),
        (b"\x80\x02c__builtin__\neval\nX\x03\x00\x00\x001+1\x85R.", "eval"),
        (b"\x80\x02csubprocess\nrun\nX\x02\x00\x00\x00ls\x85R.", "subprocess.run"),
    ],
)
def test_code_in_a_pickle_is_refused_by_name(pickled, name, tmp_path):
    path = raw_checkpoint(tmp_path / "bad.pth", pickled)
    with (
        allow_mmengine_checkpoints(),
        pytest.raises(ConfigError, match=rf"bad\.pth', which needs '{name}'; .*if you trust"),
    ):
        CheckpointLoader.load_checkpoint(path)


def test_a_malicious_file_runs_nothing(tmp_path):
    marker = tmp_path / "was_here"
    path = save(Call(os.system, f"touch {marker}"), tmp_path / "bad.pth")
    with allow_mmengine_checkpoints(), pytest.raises(ConfigError, match="system"):
        CheckpointLoader.load_checkpoint(path)
    assert not marker.exists()


@pytest.mark.parametrize(
    "value",
    [
        Call(getattr, HistoryBuffer, "__subclasses__"),
        Call(getattr, HistoryBuffer, "update"),
        Call(getattr, np.ndarray, "tofile"),
        Call(getattr, OrderedDict, "mean"),
        Call(getattr, HistoryBuffer, ("mean",)),
    ],
    ids=["subclasses", "method", "array", "other class", "no name"],
)
def test_getattr_only_gives_statistics_of_history_buffers(value, tmp_path):
    path = save(value, tmp_path / "bad.pth")
    with allow_mmengine_checkpoints(), pytest.raises(ConfigError, match="is no statistic of HistoryBuffer"):
        CheckpointLoader.load_checkpoint(path)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (Call(np.ndarray, (1,), "O", bytearray(b"AAAAAAAA")), "numpy.ndarray is called"),
        (np.array([os.system], dtype=object), "system|not a plain number"),
        (np.array([None], dtype=object), "not a plain number"),
        (np.zeros(1, [("a", "i4")]), "not a plain number"),
        (Call(np.dtype, "f8,O"), "not a plain number"),
        (Call(np.float64(0).__reduce__()[0], "f8", b""), r"scalar\('f8'\) is not a plain number"),
        (Call(np.empty(0).__reduce__()[0], OrderedDict, (0,), b"b"), "not a plain array"),
    ],
    ids=["pointers", "functions", "objects", "structure", "structure by name", "no dtype", "no array"],
)
def test_numpy_pieces_take_plain_values_only(value, reason, tmp_path):
    path = save(value, tmp_path / "bad.pth")
    with allow_mmengine_checkpoints(), pytest.raises(ConfigError, match=reason):
        CheckpointLoader.load_checkpoint(path)


def test_statistics_that_a_file_brings_do_not_stay(tmp_path):
    history = HistoryBuffer([1.0, 3.0], [1, 1])
    mine = dict(HistoryBuffer._statistics_methods)
    try:
        HistoryBuffer._statistics_methods["mean"] = HistoryBuffer.max
        path = save(history, tmp_path / "a.pth")
    finally:
        HistoryBuffer._statistics_methods.update(mine)
    with checkpoint_globals():
        loaded = torch.load(path)["value"]
    assert loaded.statistics("mean") == 2.0


def test_getattr_gives_no_method_that_a_file_names_as_a_statistic(tmp_path):
    mine = HistoryBuffer()._statistics_methods
    mine["update"] = "not a method"
    try:
        path = save([HistoryBuffer(), Call(getattr, HistoryBuffer, "update")], tmp_path / "bad.pth")
    finally:
        del mine["update"]
    with checkpoint_globals():
        assert torch.load(path)["value"][1] == "not a method"


def test_what_the_user_had_allowed_stays_allowed(trained):
    with torch.serialization.safe_globals([HistoryBuffer, Settings]):
        before = set(torch.serialization.get_safe_globals())
        with allow_mmengine_checkpoints(extra=[Settings]):
            CheckpointLoader.load_checkpoint(str(trained))
        assert set(torch.serialization.get_safe_globals()) == before >= {HistoryBuffer, Settings}


def test_list_is_open_only_while_mmengine_loads(trained):
    before = set(torch.serialization.get_safe_globals())
    with allow_mmengine_checkpoints():
        assert set(torch.serialization.get_safe_globals()) == before
        with pytest.raises(pickle.UnpicklingError):
            torch.load(trained)
        assert CheckpointLoader.load_checkpoint(str(trained))["meta"]["iter"] == 2
        assert set(torch.serialization.get_safe_globals()) == before


def test_context_nests_and_closes_after_an_error(trained):
    with allow_mmengine_checkpoints():
        with pytest.raises(FileNotFoundError), allow_mmengine_checkpoints(extra=[Settings]):
            CheckpointLoader.load_checkpoint("nowhere.pth")
        CheckpointLoader.load_checkpoint(str(trained))


def test_classes_of_the_user_load_when_named(tmp_path):
    path = save(Settings(), tmp_path / "mine.pth")
    with (
        allow_mmengine_checkpoints(),
        pytest.raises(ConfigError, match=r"needs '[\w.]*Settings'; .*add_safe_globals\(\[Settings\]\)"),
    ):
        CheckpointLoader.load_checkpoint(path)
    with allow_mmengine_checkpoints(extra=[Settings]):
        assert type(CheckpointLoader.load_checkpoint(path)["value"]) is Settings


@pytest.mark.parametrize("extra", ["Settings", ["Settings"], [3], 3, [(Settings,)], [("a.B", Settings)]])
def test_extra_that_is_no_list_of_classes_is_refused_at_once(extra):
    with (
        pytest.raises(ConfigError, match=r"allow_mmengine_checkpoints\.extra.*expected a list of classes"),
        allow_mmengine_checkpoints(extra),
    ):
        pass


def test_file_that_is_no_checkpoint_is_named(tmp_path):
    path = tmp_path / "notes.pth"
    path.write_text("hello there")
    with (
        allow_mmengine_checkpoints(),
        pytest.raises(ConfigError, match=r"notes\.pth'; expected a file written by") as caught,
    ):
        CheckpointLoader.load_checkpoint(str(path))
    assert "\n" not in str(caught.value)


def test_config_text_in_a_checkpoint_is_not_executed(tmp_path):
    marker = tmp_path / "was_here"
    path = tmp_path / "old.pth"
    torch.save({"state_dict": {}, "meta": {"config": f"open({str(marker)!r}, 'w')", "iter": 2}}, path)
    with allow_mmengine_checkpoints(), pytest.warns(UserWarning, match=r"meta\['config'\] is not read"):
        checkpoint = CheckpointLoader.load_checkpoint(str(path))
    assert checkpoint["meta"] == {"iter": 2}


@pytest.mark.parametrize("stage", ["train", "val"])
def test_runner_loads_in_every_stage(stage, trained, tmp_path):
    resume = {"resume": True} if stage == "train" else {}
    runner = build_runner(tmp_path, f"loads_{stage}", 4, load_from=str(trained), **resume)
    with allow_mmengine_checkpoints():
        getattr(runner, stage)()
    assert runner.iter == (4 if stage == "train" else 0)
    if stage == "val":
        saved = torch.load(trained, weights_only=False)["state_dict"]
        assert torch.equal(runner.model.layer.weight, saved["layer.weight"])


def test_forcing_unsafe_loads_by_environment_still_works(trained, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    with allow_mmengine_checkpoints(), pytest.warns(UserWarning, match="forcing weights_only=False"):
        assert CheckpointLoader.load_checkpoint(str(trained))["meta"]["iter"] == 2
