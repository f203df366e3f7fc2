"""tools/train.py, by its command line: real configs, real processes."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.logging import MessageHub, MMLogger
from mmengine.registry import DefaultScope
from mmengine.visualization import Visualizer

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "tools" / "train.py"

MODULE = '''
import torch
from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, HOOKS, MODELS
from torch import nn
from torch.utils.data import Dataset

from dtype_hooks.errors import OverrideError


@DATASETS.register_module()
class TrainToolPoints(Dataset):
    """y = sum of x, seeded."""

    def __init__(self, size=32):
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(size, 4, generator=generator)
        self.y = self.x.sum(1, keepdim=True)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


@MODELS.register_module()
class TrainToolBody(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
        if width == 0:
            raise ValueError("a bug of the user")
        if width == 1:
            nn.Linear(in_features=1, out_features=1, width=width)

    def forward(self, x):
        return self.layers(x)


@MODELS.register_module()
class TrainToolModel(BaseModel):
    def __init__(self, body, fails=None, **kwargs):
        super().__init__(**({"nonsense": 1} if fails == "super" else kwargs))
        self.body = MODELS.build(body)
        self.fails = fails

    def forward(self, x, y, mode="loss"):
        if self.fails == "build":
            MODELS.build(dict(type="TrainToolBdy"))
        if self.fails == "override":
            raise OverrideError("body: got something; expected something else; mend it")
        if self.fails:
            raise KeyError(self.fails)
        return {"loss": (self.body(x) - y).square().mean()}


@HOOKS.register_module()
class NoteTraining(Hook):
    """Writes what each rank saw and ended with."""

    def __init__(self, scale=1):
        self.inputs = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.inputs.append(data_batch[0])

    def after_train(self, runner):
        mine = [hook for hook in runner.hooks if isinstance(hook, NoteTraining)]
        note = {"weights": runner.model.state_dict(), "inputs": torch.cat(self.inputs), "hooks": len(mine)}
        torch.save(note, f"{runner.work_dir}/note_{get_rank()}.pt")
'''

TEXT = """
custom_imports = dict(imports=['train_tool_parts'])
model = dict(type='TrainToolModel', body=dict(type='TrainToolBody', width=8))
train_dataloader = dict(
    batch_size=4, num_workers=0, collate_fn=dict(type='default_collate'),
    dataset=dict(type='TrainToolPoints'), sampler=dict(type='DefaultSampler', shuffle=True))
train_cfg = dict(by_epoch=False, max_iters=6)
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=0.01))
param_scheduler = [dict(type='LinearLR', start_factor=0.1, by_epoch=False, end=5)]
default_hooks = dict(checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=3))
log_processor = dict(by_epoch=False)
randomness = dict(seed=0)
hooks = [dict(type='NoteTraining')]
"""

PYTHON = """
from mmengine.config import read_base
from train_tool_parts import NoteTraining, TrainToolBody, TrainToolModel

with read_base():
    from .python_parent import *

model = dict(type=TrainToolModel, body=dict(type=TrainToolBody, width=8))
hooks = [dict(type=NoteTraining)]
"""
PYTHON_PARENT = """
from mmengine.dataset import DefaultSampler, default_collate
from mmengine.hooks import CheckpointHook
from mmengine.optim import LinearLR, OptimWrapper
from torch.optim import AdamW
from train_tool_parts import TrainToolPoints

train_dataloader = dict(
    batch_size=4, num_workers=0, collate_fn=dict(type=default_collate),
    dataset=dict(type=TrainToolPoints), sampler=dict(type=DefaultSampler, shuffle=True))
train_cfg = dict(by_epoch=False, max_iters=6)
optim_wrapper = dict(type=OptimWrapper, optimizer=dict(type=AdamW, lr=0.01))
param_scheduler = [dict(type=LinearLR, start_factor=0.1, by_epoch=False, end=5)]
default_hooks = dict(checkpoint=dict(type=CheckpointHook, by_epoch=False, interval=3))
randomness = dict(seed=0)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A user's project: a module on the path and configs of both styles."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "train_tool_parts.py").write_text(MODULE)
    (folder / "text.py").write_text(TEXT)
    (folder / "python.py").write_text(PYTHON)
    (folder / "python_parent.py").write_text(PYTHON_PARENT)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("train_tool", TRAIN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(tool, folder, tmp_path, monkeypatch, capsys):
    """Run the tool in this process; its exit code and its lines on stderr."""
    for name in (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "SLURM_NTASKS",
        "SLURM_PROCID",
        "OMPI_COMM_WORLD_LOCAL_RANK",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(folder)

    def run_tool(*words):
        for singletons in (
            DefaultScope,
            MessageHub,
            MMLogger,
            Visualizer,
        ):  # a logger keeps the stdout of its birth
            singletons._instance_dict.clear()
        code = tool.main([*words, "--work-dir", str(tmp_path / "work")])
        return code, capsys.readouterr().err.splitlines()

    return run_tool


@pytest.fixture
def edited(folder, tmp_path):
    """The text-style config with lines put below it, under a name of its own."""

    def edit(lines, name="edited.py"):
        path = tmp_path / name
        path.write_text(f"{TEXT}\n{lines}\n")
        return str(path)

    return edit


def environment(folder):
    return {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }


def start(folder, *words, launcher=(sys.executable,)):
    command = [*launcher, str(TRAIN), *map(str, words)]
    return subprocess.run(
        command, cwd=folder, env=environment(folder), capture_output=True, text=True, timeout=120, check=False
    )


def torchrun(processes=2):
    return (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))


def checkpoint(path):
    return torch.load(path, weights_only=False)


def assert_same(first, second):
    torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.fixture(scope="module")
def straight(folder, tmp_path_factory):
    """Six iterations in one process, by the config's default work dir."""
    done = start(folder, "text.py")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return folder / "work_dirs" / "text"


def test_fresh_process_resumes_bitwise(straight, folder, tmp_path):
    done = start(folder, "text.py", "--resume", straight / "iter_3.pth", "--work-dir", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "resumed epoch: 0, iter: 3" in done.stdout
    want, got = checkpoint(straight / "iter_6.pth"), checkpoint(tmp_path / "iter_6.pth")
    assert_same(got["state_dict"], want["state_dict"])
    assert_same(got["optimizer"]["state"], want["optimizer"]["state"])
    assert got["optimizer"]["param_groups"] == want["optimizer"]["param_groups"]
    assert got["param_schedulers"] == want["param_schedulers"]
    inputs = checkpoint(straight / "note_0.pt")["inputs"]
    assert_same(checkpoint(tmp_path / "note_0.pt")["inputs"], inputs[len(inputs) // 2 :])


def test_auto_resume_goes_on_from_the_newest(run, straight, tmp_path):
    work = tmp_path / "work"
    assert (
        run("text.py", "--resume", "--cfg-options", "train_cfg.max_iters=3")[0] == 0
    )  # nothing there: from the start
    assert run("text.py", "--resume", "auto")[0] == 0
    assert checkpoint(work / "note_0.pt")["inputs"].shape == (12, 4)
    assert_same(
        checkpoint(work / "iter_6.pth")["state_dict"], checkpoint(straight / "iter_6.pth")["state_dict"]
    )


@pytest.mark.parametrize("config", ["python.py", "work_dirs/text/text.py"], ids=["python style", "dumped"])
def test_other_forms_of_the_config_train_the_same(config, run, straight, tmp_path):
    assert run(config) == (0, [])
    note = checkpoint(tmp_path / "work" / "note_0.pt")
    assert note["hooks"] == 1
    assert_same(note["weights"], checkpoint(straight / "note_0.pt")["weights"])


def test_dumped_python_style_config_trains(run, tmp_path):
    assert run("python.py")[0] == 0
    dumped = tmp_path / "work" / "python.py"
    assert run(str(dumped)) == (0, [])
    assert checkpoint(tmp_path / "work" / "note_0.pt")["hooks"] == 1


def test_flexible_runner_trains_and_resumes(edited, run, straight, tmp_path):
    config = edited("runner_type = 'FlexibleRunner'\nstrategy = dict(type='SingleDeviceStrategy')")
    assert run(config, "--cfg-options", "train_cfg.max_iters=3")[0] == 0
    assert run(config, "--resume")[0] == 0
    assert checkpoint(tmp_path / "work" / "note_0.pt")["inputs"].shape == (12, 4)


@pytest.mark.parametrize("options", [(), ("runner_type=FlexibleRunner",)], ids=["Runner", "FlexibleRunner"])
def test_two_processes_on_cpu_stay_in_sync(options, folder, tmp_path):
    words = ["--cfg-options", *options, "optim_wrapper.optimizer.lr=0.02"]
    done = start(folder, "text.py", "--work-dir", tmp_path, *words, launcher=torchrun())
    assert done.returncode == 0, done.stderr
    first, second = (checkpoint(tmp_path / f"note_{rank}.pt") for rank in range(2))
    assert_same(first["weights"], second["weights"])
    assert not torch.equal(first["inputs"], second["inputs"])
    assert len(list(tmp_path.glob("iter_6.pth"))) == 1


def test_error_is_one_line_of_the_first_process_only(folder, tmp_path):
    done = start(
        folder,
        "text.py",
        "--work-dir",
        tmp_path,
        "--cfg-options",
        "train_cfg.max_iter=5",
        launcher=torchrun(),
    )
    assert done.returncode == 1  # torchrun's own
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert lines == [
        "error: --cfg-options: got 'train_cfg.max_iter'; expected 'train_cfg.max_iters'; mend the key"
    ]
    assert (
        f"traceback : {lines[0].removeprefix('error: ')}" in done.stderr
    )  # torchrun's report of the process


def test_error_in_a_real_process(folder):
    done = start(folder, "txt.py")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "error: CONFIG: got 'txt.py', which does not exist; nearest in '.': 'text.py'\n"


COMMAND_LINES = {
    "config missing": (
        ["pyton.py"],
        r"CONFIG: got 'pyton\.py', which does not exist; nearest in '\.': 'python\.py'.*",
    ),
    "config folder missing": (
        ["nowhere/a.py"],
        r"CONFIG: got .*; there is no folder 'nowhere'; mend the path",
    ),
    "config is a folder": (
        ["."],
        r"CONFIG: got '\.'; expected a file ending in \.py.*; nearest in '\.': 'python\.py'.*",
    ),
    "config of no known kind": (["notes.txt"], r"CONFIG: got 'notes\.txt'.*"),
    "no config": ([], "the following arguments are required: CONFIG; see --help"),
    "unknown flag": (["text.py", "--works"], "unrecognized arguments: --works; see --help"),
    "unknown launcher": (
        ["text.py", "--launcher", "torch"],
        "argument --launcher: invalid choice: 'torch'.*see --help",
    ),
    "option without a value": (
        ["text.py", "--cfg-options", "a.b"],
        "argument --cfg-options: got 'a.b'; expected KEY=VALUE.*",
    ),
    "option with open brackets": (
        ["text.py", "--cfg-options", "a=[(1,2]"],
        "argument --cfg-options: got .*brackets.*",
    ),
    "misspelt option": (
        ["text.py", "--cfg-options", "train_cfg.max_iter=5"],
        ".*expected 'train_cfg.max_iters'; mend the key",
    ),
    "option below a value": (
        ["text.py", "--cfg-options", "randomness.seed.a=5"],
        ".*'randomness.seed' is 0, which has no keys.*",
    ),
    "resume path missing": (
        ["text.py", "--resume", "work_dirs/text/iter_4.pth"],
        r"--resume: got 'work_dirs/text/iter_4\.pth'; expected a checkpoint file; nearest in 'work_dirs/text': 'iter_\d\.pth'.*",
    ),
    "resume from a folder": (
        ["text.py", "--resume", "work_dirs/text"],
        "--resume: got .*; expected a checkpoint file; nearest.*",
    ),
    "resume from another file": (
        ["text.py", "--resume", "train_tool_parts.py"],
        "checkpoint: got 'train_tool_parts.py'; expected a file.*",
    ),
    "torchrun absent": (
        ["text.py", "--launcher", "pytorch"],
        "launcher: got 'pytorch' without RANK, .*; expected .*torchrun.*",
    ),
    "argument of the loop": (
        ["text.py", "--cfg-options", "train_cfg.val_evry=1"],
        "train_cfg.val_evry: got an argument that IterBasedTrainLoop does not have; expected one of its arguments, as .*; mend the name",
    ),
    "argument of the optimizer": (
        ["text.py", "--cfg-options", "optim_wrapper.optimizer.weigth_decay=1"],
        "optim_wrapper.optimizer.weigth_decay: got an argument that AdamW does not have; expected .*'weight_decay', .*; mend the name",
    ),
    "argument of the data loader": (
        ["text.py", "--cfg-options", "train_dataloader.pin=1"],
        "train_dataloader.pin: got an argument that DataLoader does not have.*",
    ),
    "argument of the scheduler": (
        ["text.py", "--cfg-options", "param_scheduler.0.start=1"],
        r"param_scheduler\.0\.start: got an argument that LinearLR does not have; expected .*'start_factor'.*; mend the name",
    ),
    "argument handed up to a base": (
        ["text.py", "--cfg-options", "model.init_cf=1"],
        "model.init_cf: got an argument that TrainToolModel does not have; expected .*'init_cfg'; mend the name",
    ),
    "argument of a hook": (
        ["text.py", "--cfg-options", "hooks.0.scal=1"],
        r"custom_hooks\.0\.scal: got an argument that NoteTraining does not have; expected .*'scale'; mend the name",
    ),
    "value that torch refuses": (
        ["text.py", "--cfg-options", "optim_wrapper.optimizer.lr=-1"],
        "optim_wrapper.optimizer: ValueError: Invalid learning rate: -1; mend the config there",
    ),
    "type of a nested module": (
        ["text.py", "--cfg-options", "model.body.type=TrainToolBodie"],
        "model.body.type: got 'TrainToolBodie'; expected a name in the registry mmengine::model; nearest: 'TrainToolBody'.*",
    ),
    "type of the optimizer": (
        ["text.py", "--cfg-options", "optim_wrapper.optimizer.type=Adamw"],
        ".*nearest: 'AdamW'.*",
    ),
    "type of a hook": (
        ["text.py", "--cfg-options", "hooks.0.type=NoteTrainin"],
        r"custom_hooks\.0\.type: got .*nearest: 'NoteTraining'.*",
    ),
    "type of the scheduler": (
        ["text.py", "--cfg-options", "param_scheduler.0.type=LinearRL"],
        r".*nearest: 'LinearLR'.*",
    ),
    "type of the runner": (
        ["text.py", "--cfg-options", "runner_type=Runer"],
        "runner_type: got 'Runer'; .*nearest: 'Runner'.*",
    ),
    "amp without a gpu": (
        ["text.py", "--cfg-options", "optim_wrapper.type=AmpOptimWrapper"],
        "optim_wrapper: AssertionError: .*only available.*",
    ),
    "hook of ours": (
        ["text.py", "--cfg-options", "model.fails=override"],
        "body: got something; expected something else; mend it",
    ),
}


@pytest.mark.parametrize("case", COMMAND_LINES)
def test_wrong_command_line_ends_in_one_line(case, run, straight, folder):
    (folder / "notes.txt").write_text("")
    words, message = COMMAND_LINES[case]
    code, lines = run(*words)
    assert len(lines) == 1, lines
    assert re.fullmatch(f"error: {message}", lines[0]), lines[0]
    assert code == 2


CONFIGS = {
    "syntax": ("a = dict(\n", r".*edited\.py:15: '\(' was never closed; mend the syntax"),
    "name": (
        "a = dict(\n  b=colour)\n",
        r".*edited\.py:16: NameError: name 'colour' is not defined; mend the config there",
    ),
    "base": ("_base_ = 'nobody.py'", r".*edited\.py: FileNotFoundError: .*nobody\.py.*"),
    "base of no known kind": ("_base_ = 'nobody.txt'", r".*edited\.py: \w+: .*"),
    "custom_imports": (
        "custom_imports = dict(imports=['nobody_at_all'])",
        r".*edited\.py: ModuleNotFoundError: No module named 'nobody_at_all'; put the folder of 'nobody_at_all' on PYTHONPATH.*",
    ),
    "model": ("model = None", "config: got no model; expected a config to train with; add these keys"),
    "hooks": ("hooks = dict(type='NoteTraining')", "hooks: got .*; expected a list of hooks; write .*"),
    "hooks entry": ("hooks = [dict(dtype='bf16')]", r"hooks\[0\]: got .*; expected a dict with a 'type'.*"),
    "type missing": ("model = dict(body=3)", ".*KeyError: .*type.*"),
    "load_from": (
        "load_from = 'nowhere.pth'",
        r"load_from: got 'nowhere\.pth'; expected a checkpoint file; .*",
    ),
    "train_cfg": ("train_cfg = 5", "config, in build_train_loop: TypeError: .*"),
    "sampler": ("train_dataloader['sampler'] = 5", r"config, in \w*build_\w+: TypeError: .*"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_wrong_config_ends_in_one_line(case, edited, run):
    lines, message = CONFIGS[case]
    code, printed = run(edited(lines))
    assert len(printed) == 1, printed
    assert re.fullmatch(f"error: {message}", printed[0]), printed[0]
    assert code == 2


def test_python_style_config_names_what_cannot_be_imported(folder, tmp_path, run):
    path = folder / "broken.py"
    path.write_text(PYTHON + "\nfrom torch.optim import NoSuch\noptim_wrapper.optimizer.type = NoSuch\n")
    code, lines = run(str(path))
    assert code == 2
    assert len(lines) == 1
    assert re.search(
        r"ImportError: Failed to import NoSuch from torch\.optim in .*broken\.py, line 11", lines[0]
    )


def test_malicious_checkpoint_is_refused_and_runs_nothing(run, tmp_path):
    marker = tmp_path / "was_here"

    class Bad:
        def __reduce__(self):
            return os.system, (f"touch {marker}",)

    torch.save({"state_dict": Bad()}, tmp_path / "bad.pth")
    code, lines = run("text.py", "--resume", str(tmp_path / "bad.pth"))
    assert code == 2
    assert len(lines) == 1
    assert re.search(r"bad\.pth', which needs '\w+\.system'; .*if you trust the file", lines[0])
    assert not marker.exists()


def test_old_key_is_warned_of_in_one_line_and_training_goes_on(edited, run):
    code, lines = run(edited("fp16 = dict(loss_scale='dynamic')"), "--cfg-options", "train_cfg.max_iters=1")
    assert code == 0
    assert len(lines) == 1
    assert lines[0].startswith(
        "warning: config: got the top-level key 'fp16', which mmengine does not read; use custom_hooks"
    )


@pytest.mark.parametrize(
    ("option", "kind"),
    [
        ("model.fails=training", KeyError),
        ("model.fails=build", KeyError),
        ("model.body.width=0", ValueError),
        ("model.body.width=1", TypeError),
        ("model.fails=super", TypeError),
    ],
    ids=[
        "training step",
        "building in a training step",
        "constructor",
        "constructor's own call",
        "constructor's call of its base",
    ],
)
def test_error_in_the_users_code_keeps_its_traceback(option, kind, run):
    with pytest.raises(kind) as caught:
        run("text.py", "--cfg-options", option)
    assert any(entry.path.name == "train_tool_parts.py" for entry in caught.traceback)


def test_traceback_is_shown_when_asked_for(run):
    code, lines = run("text.py", "--traceback", "--cfg-options", "model.body.type=Lineer")
    assert code == 2
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1].startswith("error: model.body.type: got 'Lineer'; expected a name")


def test_help_says_that_a_config_is_executed(run, capsys):
    with pytest.raises(SystemExit) as caught:
        run("--help")
    assert caught.value.code == 0
    assert "A config is Python code, and reading it runs that code" in capsys.readouterr().out


def test_work_dir_of_the_command_line_comes_before_the_configs(tool, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = tmp_path / "mine.py"
    config.write_text(TEXT.replace("max_iters=6", "max_iters=0") + "work_dir = 'of_the_config'\n")
    for words, expected in ([["--work-dir", "mine"], "mine"], [[], "of_the_config"]):
        runner = tool.build(tool.make_parser().parse_args([str(config), *words]))
        assert Path(runner.work_dir) == tmp_path / expected
        assert Config.fromfile(tmp_path / expected / "mine.py").work_dir == expected


def test_local_rank_of_old_launchers_is_taken(tool, folder, tmp_path, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "")
    monkeypatch.delenv("LOCAL_RANK")
    args = tool.make_parser().parse_args(
        [str(folder / "text.py"), "--local_rank", "1", "--work-dir", str(tmp_path)]
    )
    tool.build(args)
    assert os.environ["LOCAL_RANK"] == "1"


def test_testing_afterwards_scores_the_test_split(tool, tmp_path):
    words = ["train_cfg.max_iters=30", "train_cfg.val_interval=30", "log_level=ERROR"]
    config = str(ROOT / "configs" / "digits_resnet.py")
    assert tool.main([config, "--test", "--work-dir", str(tmp_path / "run"), "--cfg-options", *words]) == 0
    (scalars,) = (tmp_path / "run").glob("*/*.json")
    assert 0 < json.loads(scalars.read_text())["accuracy"] <= 100


def test_testing_without_a_test_split_is_refused(run, folder):
    code, lines = run(str(folder / "text.py"), "--test")
    assert code == 2
    assert "got no test_dataloader, test_cfg, test_evaluator" in lines[0]
