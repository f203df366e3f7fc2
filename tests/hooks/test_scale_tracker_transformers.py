"""Random-weight models of the transformers package under ScaleTracker, in this process and through tools/train.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from autocast_runs import HOOK, same_bits, weights
from processes import ROOT
from small_runs import Losses, log_text, small_runner

pytest.importorskip("transformers")

from test_autocast_transformers import MODELS, batches, build, rule
from tracked_runs import row_of, rows_of

CONFIG = """
custom_imports = dict(imports=["tokens_of_test"])
model = dict(type="TrackedLanguageModel")
train_dataloader = dict(
    batch_size=2,
    dataset=dict(type="TrackedTokens"),
    sampler=dict(type="DefaultSampler", shuffle=True),
    collate_fn=dict(type="default_collate"),
)
train_cfg = dict(by_epoch=False, max_iters=6, val_interval=1000)
optim_wrapper = dict(type="OptimWrapper", optimizer=dict(type="AdamW", lr=1e-3), accumulative_counts=2)
custom_hooks = [
    dict(type="ScaleTracker", interval=3, top=5, plots=False, watch_nonfinite=True),
    dict(type="AutocastHook", dtype="float16", loss_scale="dynamic"),
    dict(type="DtypeOverrider", class_patterns=["Norm$"], dtype="float32"),
]
"""
MODULE = """
from mmengine.registry import DATASETS, MODELS
from stored_transformers_worker import LanguageModel, Tokens, llama

DATASETS.register_module(name="TrackedTokens", module=Tokens)

@MODELS.register_module()
class TrackedLanguageModel(LanguageModel):
    def __init__(self, data_preprocessor=None):
        super().__init__(llama)
"""


@pytest.mark.parametrize("name", MODELS)
def test_each_trains_bitwise_as_without_and_its_layers_are_in_the_rows(name: str, tmp_path: Path):
    trained = []
    for hooks in (
        [],
        [
            {
                "type": "ScaleTracker",
                "interval": 2,
                "plots": False,
                "verbose": False,
                "watch_nonfinite": True,
                "on_nonfinite": "raise",
            }
        ],
    ):
        losses = Losses()
        runner = small_runner(
            tmp_path / str(len(hooks)),
            build(name),
            [*hooks, HOOK, rule(name), losses],
            iters=3,
            loader=batches(name),
            log_level="INFO",
        )
        runner.train()
        trained.append((weights(runner.model), losses.values))
    assert trained[0][1] == trained[1][1]
    assert same_bits(trained[0][0], trained[1][0])
    rows = rows_of(runner)
    modules = {row["module"] for row in rows if row["direction"] == "backward"}
    assert f"net.{MODELS[name][2]}" in modules
    assert len(modules) > 20
    assert "not finite" not in log_text(runner)


def test_it_trains_through_the_command_line_with_the_other_hooks(tmp_path: Path):
    (tmp_path / "tokens_of_test.py").write_text(MODULE)
    (tmp_path / "config.py").write_text(CONFIG)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            filter(
                None,
                [os.environ.get("PYTHONPATH"), str(ROOT), str(ROOT / "tests" / "helpers"), str(tmp_path)],
            )
        ),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, str(ROOT / "tools" / "train.py"), "config.py", "--work-dir", "work"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = (tmp_path / "work").glob("*/scales.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {row["iter"] for row in rows} == {3, 6}
    sixth = [row for row in rows if row["iter"] == 6]
    assert row_of(sixth, "lm.lm_head:linear")["dtype"] == "float16"
    head = row_of(sixth, "lm.lm_head:linear", "backward")
    assert head["grad_scale"] == 2.0**15  # half of the loss, times 2^16
    assert "ScaleTracker: iteration 3" in done.stdout + done.stderr
