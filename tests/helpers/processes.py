"""Scripts in fresh processes: one, or two ranks under torchrun, that hand their results back as JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed

HELPERS = Path(__file__).parent
ROOT = HELPERS.parent.parent

PATIENCE = timedelta(seconds=40)
"""How long a rank waits for another before gloo gives up: a hang becomes an error."""


def launch(script: str, folder: Path, *args: str, ranks: int = 1, timeout: float = 300) -> list[dict]:
    """Run ``tests/helpers/<script> <folder> <args>`` and return what each rank gave :func:`hand_back`."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *(torchrun if ranks > 1 else []), str(HELPERS / script), str(folder), *args]
    # A package put first on PYTHONPATH by the caller stays first, so that a broken copy can be tested.
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(ROOT), str(HELPERS)]))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    for left_over in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(left_over, None)
    log = folder / f"{'_'.join([Path(script).stem, *args])}.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
        try:
            code = process.wait(timeout)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
    assert code == 0, log.read_text()[-4000:]
    return [json.loads(_result(folder, script, args, rank).read_text()) for rank in range(ranks)]


def hand_back(scenarios: Mapping[str, Callable[[], Any]]) -> None:
    """In the script: run every scenario, and write what it returns, or its error, for :func:`launch`."""
    folder, args = Path(sys.argv[1]), tuple(sys.argv[2:])
    rank = int(os.environ.get("RANK", 0))
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo", timeout=PATIENCE)
    results: dict[str, Any] = {}
    for name, scenario in scenarios.items():
        try:
            results[name] = scenario()
        except Exception as error:
            traceback.print_exc()
            results[name] = {"error": f"{type(error).__name__}: {error}"}
    _result(folder, sys.argv[0], args, rank).write_text(json.dumps(results))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        # On a loaded machine gloo's own threads may still be there when the interpreter takes itself down, which aborts it
        # ("terminate called without an active exception"). All that counts is written.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _result(folder: Path, script: str, args: tuple[str, ...], rank: int) -> Path:
    return folder / f"{'_'.join([Path(script).stem, *args])}_rank{rank}.json"
