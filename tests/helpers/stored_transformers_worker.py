"""Random-weight models of the transformers package with stored dtypes, for tests/hooks/test_stored_transformers.py."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from mmengine.model import BaseModel
from processes import hand_back
from stored_runs import CastDataInBeforeTrain, overrider, seeded, store, stored_runner, train
from torch import Tensor, nn
from torch.utils.data import Dataset

from dtype_hooks.hooks.checkpoints import allow_mmengine_checkpoints

K, M = 2, 2
KINDS = ("hook", "before", "naive")
VOCABULARY, LENGTH = 32, 8


def gpt2() -> nn.Module:
    """Its head is tied to its embedding."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_positions=LENGTH,
            n_embd=32,
            n_layer=2,
            n_head=2,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=LENGTH,
        )
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...]]] = {
    "gpt2_norms_and_tied_head": (gpt2, ("ln_", "lm_head", "wte")),
    "llama_blocks": (llama, ("self_attn.", "mlp.", "layernorm")),
}


class LanguageModel(BaseModel):
    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.lm = build()

    def forward(self, tokens: Tensor, mode: str = "loss") -> Any:
        return {"loss": self.lm(input_ids=tokens, labels=tokens).loss}


class Tokens(Dataset):
    def __init__(self) -> None:
        self.rows = torch.randint(VOCABULARY, (64, LENGTH), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"tokens": self.rows[index]}


def trained(folder: Path, model: str, kind: str, resume: bool = False) -> dict[str, Any]:
    """Train K + M iterations, saving after K; or only the last M, from what ``hook`` has saved."""
    build, patterns = MODELS[model]
    net = seeded(functools.partial(LanguageModel, build))
    hooks: list[Any] = [overrider(patterns, override_parameters=kind == "hook", check_interval=1)]
    if kind == "before":
        store(net, patterns, torch.bfloat16)
    if kind == "naive":
        hooks.append(CastDataInBeforeTrain(patterns, torch.bfloat16))
    path = {"load_from": str(folder / f"{model}_hook" / f"iter_{K}.pth"), "resume": True} if resume else {}
    runner = stored_runner(
        folder / (f"{model}_{kind}" + ("_resumed" if resume else "")),
        net,
        hooks,
        iters=K + M,
        save_at=K,
        train_dataloader={
            "batch_size": 2,
            "dataset": Tokens(),
            "sampler": {"type": "DefaultSampler", "shuffle": True, "seed": 3},
            "collate_fn": {"type": "default_collate"},
        },
        **path,
    )
    with allow_mmengine_checkpoints():
        result = train(runner)
    tied = kind != "naive" and model.startswith("gpt2")
    assert not tied or net.lm.lm_head.weight is net.lm.transformer.wte.weight
    return result


if __name__ == "__main__":
    phase, where = sys.argv[2], Path(sys.argv[1])
    hand_back(
        {
            f"{model}_{kind}": functools.partial(trained, where, model, kind, phase == "resumed")
            for model in MODELS
            for kind in (KINDS if phase == "straight" else ("hook", "before"))
        }
    )
