"""A whole train_step compiled by AOTAutograd, with and without stored dtypes, for tests/hooks/test_stored_start.py."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from processes import hand_back
from stored_runs import SGD, overrider, seeded, store, stored_runner, train

TWO = ("norm", "head")


def compiled(kind: str) -> dict[str, Any]:
    model = seeded()
    if kind == "before":
        store(model, TWO, torch.bfloat16)
    ours = overrider(TWO, override_parameters=kind == "hook")
    cfg = {"compile": {"backend": "aot_eager"}}
    return train(stored_runner(sys.argv[1], model, [ours], iters=2, optimizer=SGD, cfg=cfg))


if __name__ == "__main__":
    hand_back({kind: functools.partial(compiled, kind) for kind in ("hook", "before")})
