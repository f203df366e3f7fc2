"""Train from a config file of mmengine: ``python tools/train.py CONFIG``.

A config is Python code, and reading it runs that code, with your rights: only use configs that you trust.
(A checkpoint is not run: it is loaded with torch's weights_only=True.)

Under torchrun the processes find each other by themselves, on GPUs and, over gloo, on CPUs:

    torchrun --nproc-per-node 2 tools/train.py CONFIG

What is wrong with the command line, the config or a file that it names ends in one line on stderr and exit code 2.
An error in your own code keeps its traceback.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed
from mmengine.config import Config, DictAction
from mmengine.dist import infer_launcher, is_distributed

from dtype_hooks.errors import ConfigError, DtypeHooksError
from dtype_hooks.hooks.checkpoints import allow_mmengine_checkpoints
from dtype_hooks.hooks.config import merge_options, prepare_config
from dtype_hooks.hooks.config_errors import explain_build_error, explain_load_error
from dtype_hooks.hooks.launch import build_runner

CONFIG_SUFFIXES = (".py", ".json", ".yaml", ".yml")


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are a line, as all others here."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print below its usage."""
        raise ConfigError(f"{message}; see --help")


class Options(DictAction):
    """mmengine's ``KEY=VALUE`` action, with its failures in argparse's form."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Collect ``KEY=VALUE`` words."""
        for word in values:
            if not word.partition("=")[0] or "=" not in word:
                raise argparse.ArgumentError(
                    self, f"got {word!r}; expected KEY=VALUE, as train_cfg.max_iters=100"
                )
        try:
            super().__call__(parser, namespace, values, option_string)
        except (AssertionError, ValueError) as error:
            raise argparse.ArgumentError(self, f"got {' '.join(values)!r}; {error}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        with allow_mmengine_checkpoints():
            args = make_parser().parse_args(words)
            train(build(args), test=args.test)
    except DtypeHooksError as error:
        if "--traceback" in words:
            traceback.print_exc()
        report(str(error))
        return 2
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "config",
        type=Path,
        metavar="CONFIG",
        help="a config file, of either style of mmengine; its code is executed",
    )
    add(
        "--work-dir",
        help="where logs and checkpoints go (default: the config's, else ./work_dirs/<its name>)",
    )
    resume = "go on from a checkpoint: PATH, or the newest in the work dir (auto, also when PATH is left out)"
    add("--resume", nargs="?", const="auto", metavar="PATH", help=resume)
    options = "override settings: train_cfg.max_iters=100 hooks.0.dtype=float32 'model.widths=[64,64]'"
    add("--cfg-options", nargs="+", action=Options, default={}, metavar="KEY=VALUE", help=options)
    launchers = ("none", "pytorch", "slurm", "mpi")
    add(
        "--launcher",
        choices=launchers,
        help="what started the processes (default: seen from the environment)",
    )
    add(
        "--test",
        action="store_true",
        help="test afterwards, with the config's test_dataloader and test_evaluator",
    )
    add("--local-rank", "--local_rank", type=int, help="given by old launchers")
    add("--traceback", action="store_true", help="show the traceback of what is reported in one line, too")
    return parser


def build(args: argparse.Namespace) -> Any:
    """Read the config, put the command line over it, and build its runner."""
    if args.local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(args.local_rank))
    cfg = read_config(args.config)
    with explained(cfg):
        with spoken_warnings():
            merge_options(cfg, args.cfg_options)
            prepare_config(cfg)
        check_complete(cfg, test=args.test)
        cfg.launcher = args.launcher or infer_launcher()
        cfg.work_dir = args.work_dir or cfg.get("work_dir") or str(Path("work_dirs", args.config.stem))
        set_checkpoint(cfg, args.resume or cfg.get("resume"))
        return build_runner(cfg)


def train(runner: Any, test: bool = False) -> None:
    """Train, test if asked, and leave the process group."""
    with explained(runner.cfg):
        runner.train()
        if test:
            runner.test()
    if is_distributed():
        torch.distributed.destroy_process_group()


def read_config(path: Path) -> Config:
    """Read a config file, which executes it."""
    if not path.exists():
        raise ConfigError(
            f"CONFIG: got {str(path)!r}, which does not exist; {similar_files(path, CONFIG_SUFFIXES)}"
        )
    if path.is_dir() or path.suffix not in CONFIG_SUFFIXES:
        inside = similar_files(path / "", CONFIG_SUFFIXES) if path.is_dir() else "name another file"
        raise ConfigError(
            f"CONFIG: got {str(path)!r}; expected a file ending in {', '.join(CONFIG_SUFFIXES)}; {inside}"
        )
    try:
        return Config.fromfile(path)
    except Exception as error:
        raise ConfigError(explain_load_error(error, path)) from error


def check_complete(cfg: Config, test: bool = False) -> None:
    """Refuse a config that names nothing to train, or to test; a runner_type of the user's may need less."""
    keys = ("model", "train_dataloader", "train_cfg", "optim_wrapper")
    keys_to_test = ("test_dataloader", "test_cfg", "test_evaluator") if test else ()
    missing = [key for key in (*keys, *keys_to_test) if cfg.get(key) is None]
    if missing and cfg.get("runner_type") is None:
        raise ConfigError(
            f"config: got no {', '.join(missing)}; expected a config to train with; add these keys"
        )


def set_checkpoint(cfg: Config, resume: str | bool | None) -> None:
    """Set ``resume`` and ``load_from`` as Runner reads them, and refuse a path that is not there."""
    cfg.resume = bool(resume)
    if isinstance(resume, str):
        cfg.load_from = None if resume == "auto" else resume
    path = cfg.get("load_from") or (last_checkpoint(Path(cfg.work_dir)) if resume else None)
    if path is None or "://" in path or Path(path).is_file():
        return
    if cfg.get("strategy") is not None and Path(path).is_dir():  # sharded checkpoints are folders
        return
    key = "--resume" if resume else "load_from"
    raise ConfigError(
        f"{key}: got {path!r}; expected a checkpoint file; {similar_files(Path(path), ('.pth',))}"
    )


def last_checkpoint(work_dir: Path) -> str | None:
    """Return the path that mmengine keeps of the newest checkpoint in a work dir, if it has saved one."""
    note = work_dir / "last_checkpoint"
    return note.read_text().strip() if note.is_file() else None


def similar_files(path: Path, suffixes: tuple[str, ...]) -> str:
    """Say which files stand where ``path`` was looked for, the likest first."""
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir():
        return f"there is no folder {str(folder)!r}; mend the path"
    names = sorted(entry.name for entry in folder.iterdir() if entry.suffix in suffixes)
    near = difflib.get_close_matches(path.name, names) or names[:3]
    return (
        f"nearest in {str(folder)!r}: {', '.join(map(repr, near))}"
        if near
        else f"{str(folder)!r} holds none; mend the path"
    )


@contextmanager
def explained(cfg: Config) -> Iterator[None]:
    """Turn what a config has made fail into a ConfigError; let errors of the user's code through."""
    try:
        yield
    except DtypeHooksError:
        raise
    except Exception as error:
        message = explain_build_error(error, cfg)
        if message is None:
            raise
        raise ConfigError(message) from error


@contextmanager
def spoken_warnings() -> Iterator[None]:
    """Print warnings as a line each, from the first process only."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        say(f"warning: {warning.message}")


def report(message: str) -> None:
    """Print an error as a line, from the first process; torchrun's own report shows that of the process that failed."""
    line = " ".join(message.split())
    say(f"error: {line}")
    note = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if note:
        extra = {"py_callstack": line, "timestamp": str(int(time.time()))}
        Path(note).write_text(json.dumps({"message": {"message": line, "extraInfo": extra}}))


def say(line: str) -> None:
    """Print to stderr from the first process of a distributed start."""
    ranks = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
    if next((os.environ[name] for name in ranks if name in os.environ), "0") == "0":
        print(line, file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
