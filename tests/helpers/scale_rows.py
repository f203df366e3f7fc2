"""Rows of a scales file, with the statistics that the package measures."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtype_hooks.core.number_formats import DEFAULT_FORMATS
from dtype_hooks.scales.record import SCHEMA
from dtype_hooks.scales.recorder import track_scales
from dtype_hooks.scales.statistics import gather, measure


def scale_row(
    name: str, values: Any = (1.0, -1.0), order: int = 0, direction: str = "forward", **columns: Any
) -> dict[str, Any]:
    """The row of a tensor of these values, in float64, of one value twice; ``columns`` are put over it, ``iter=100`` for one."""
    tensor = torch.as_tensor(values, dtype=torch.float64)
    if tensor.numel() == 1:  # tables of edges leave out single elements
        tensor = tensor.reshape(-1).expand(2)
    module, colon, op = name.partition(":")
    if not colon:
        module, _, op = name.rpartition(".")
    return {
        "schema": SCHEMA,
        "order": order,
        "name": name,
        "module": module,
        "op": op,
        "occurrence": 0,
        "output": "",
        "kind": "activation" if colon else "parameter",
        "dtype": "float32",
        "shape": list(tensor.shape),
        "device": "cpu",
        "direction": direction,
        **gather([measure(tensor, DEFAULT_FORMATS)])[0].as_row(),
        **columns,
    }


def write_rows(path: Path, rows: Iterable[dict[str, Any]], after: str = "") -> Path:
    """Write rows as JSON lines, making the folder; ``after`` follows them as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(row, allow_nan=False)}\n" for row in rows) + after)
    return path


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.input_layernorm = nn.LayerNorm(width)
        self.self_attn = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU())

    def forward(self, x):
        return x + self.mlp(self.self_attn(self.input_layernorm(x)))


class Layers(nn.Module):
    """Names as a transformer has them: model.layers.3.self_attn."""

    def __init__(self, count: int, width: int = 4):
        super().__init__()
        self.model = nn.ModuleDict({"layers": nn.Sequential(*(Block(width) for _ in range(count)))})

    def forward(self, x):
        return self.model["layers"](x).square().mean()


def recorded_rows(layers: int, iteration: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """The rows of one real step of a model of so many layers, which makes five tensors a layer and three more."""
    torch.manual_seed(seed)
    model = Layers(layers)
    with track_scales(model) as scales:
        model(torch.randn(3, 4)).backward()
    at = {} if iteration is None else {"iter": iteration}
    return [{**at, **row} for row in scales.rows()]
