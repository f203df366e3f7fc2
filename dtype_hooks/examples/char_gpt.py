"""A small pre-norm transformer language model in mmengine's conventions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from mmengine.model import BaseModel
from mmengine.registry import MODELS
from torch import Tensor, nn

from dtype_hooks.core.dtypes import resolve_dtype
from dtype_hooks.errors import ConfigError

INIT_STD = 0.02
"""Standard deviation of fresh weights: GPT-2's."""


class CausalSelfAttention(nn.Module):
    """Multi-head attention in which a position sees itself and what came before.

    ``(batch, time, dim)`` to the same, in the dtype of the input (that of autocast inside a region).
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Attend within each of the batch's sequences."""
        query, key, value = (self._split_heads(part) for part in self.qkv(x).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.proj(attended.transpose(1, 2).flatten(2))

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


class FeedForward(nn.Module):
    """Two linear layers around a GELU, four times as wide between; ``(..., dim)`` to the same."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.proj = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position on its own."""
        return self.proj(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and feed-forward, each added to a residual stream that keeps its dtype: ``(batch, time, dim)``.

    Args:
        dim: Width of the residual stream.
        num_heads: Attention heads.
        autocast: What AutocastHook autocasts it in: a dtype's name, ``"model"`` for the model's, ``"off"`` for none.
    """

    def __init__(self, dim: int, num_heads: int, autocast: str = "model") -> None:
        super().__init__()
        self.disable_autocast = autocast == "off"
        self.autocast_dtype = (
            None if autocast in ("model", "off") else resolve_dtype(autocast, "CharGPT.block_dtypes")
        )
        self.norm1 = nn.LayerNorm(dim)
        self.attn = CausalSelfAttention(dim, num_heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = FeedForward(dim)

    def get_autocast_dtype(self) -> torch.dtype | None:
        """The dtype that this block asks for; None is the model's."""
        return self.autocast_dtype

    def forward(self, x: Tensor) -> Tensor:
        """Add both branches to the residual stream."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


@MODELS.register_module()
class CharGPT(BaseModel):
    """A decoder-only transformer over characters, with learned positions and an untied head.

    Parameters are float32. Under autocast the matrix products run in its dtype; the residual stream stays in float32,
    since it starts as an embedding's output and only sums are made of it.

    Args:
        vocab_size: Number of character ids.
        context: The longest sequence, in characters.
        dim: Width of the residual stream; a multiple of ``num_heads``.
        num_layers: Number of blocks.
        num_heads: Attention heads in each block.
        block_dtypes: For each block, the dtype that AutocastHook autocasts it in: a name, ``"model"`` for the model's,
            ``"off"`` for float32. None is the model's for all.
        data_preprocessor: As in ``mmengine.model.BaseModel``, which moves the batch to the model's device.
        init_cfg: As in ``mmengine.model.BaseModule``.

    Raises:
        ConfigError: ``dim`` is no multiple of ``num_heads``, or ``block_dtypes`` has no dtype for each block.
    """

    def __init__(
        self,
        vocab_size: int,
        context: int = 128,
        dim: int = 128,
        num_layers: int = 4,
        num_heads: int = 4,
        block_dtypes: Sequence[str] | None = None,
        data_preprocessor: dict | None = None,
        init_cfg: dict | None = None,
    ) -> None:
        super().__init__(data_preprocessor=data_preprocessor, init_cfg=init_cfg)
        if dim % num_heads:
            raise ConfigError(
                f"CharGPT.dim: got {dim!r}; expected a multiple of num_heads={num_heads}; change either"
            )
        block_dtypes = ["model"] * num_layers if block_dtypes is None else list(block_dtypes)
        if len(block_dtypes) != num_layers:
            raise ConfigError(
                f"CharGPT.block_dtypes: got {block_dtypes!r}; expected num_layers={num_layers} entries; change either"
            )
        self.token_embedding = nn.Embedding(vocab_size, dim)
        self.position_embedding = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads, autocast) for autocast in block_dtypes)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        self._draw_weights(num_layers)

    def forward(
        self, inputs: Tensor, targets: Tensor | None = None, mode: str = "tensor"
    ) -> Tensor | dict[str, Tensor] | list[dict[str, float]]:
        """Run the model as mmengine asks for.

        Args:
            inputs: Character ids, int64, shape ``(batch, time)`` with ``time <= context``.
            targets: The ids that follow, int64, shape ``(batch, time)``; -100 is not scored. Not needed for ``"tensor"``.
            mode: ``"tensor"``, ``"loss"`` or ``"predict"``.

        Returns:
            ``"tensor"``: logits, shape ``(batch, time, vocab_size)``. ``"loss"``: ``loss``, the mean over scored characters in
            nats, which is trained on, and ``bpc``, the same in bits, detached. ``"predict"``: for each window ``nll``, the sum
            over its scored characters in nats, and ``characters``, their number.
        """
        logits = self._logits(inputs)
        if mode == "tensor":
            return logits
        if targets is None:
            raise ConfigError(
                f"CharGPT.forward: got targets=None; expected ids for mode={mode!r}; pass targets"
            )
        # (batch, time) of float32 nats; 0 where a target is not scored.
        nll = F.cross_entropy(logits.float().transpose(1, 2), targets, reduction="none")
        scored = targets >= 0
        if mode == "loss":
            loss = nll.sum() / scored.sum()
            return {"loss": loss, "bpc": loss.detach() / math.log(2)}
        if mode == "predict":
            sums, counts = nll.double().sum(dim=1).tolist(), scored.sum(dim=1).tolist()
            return [{"nll": nats, "characters": count} for nats, count in zip(sums, counts, strict=True)]
        raise ConfigError(
            f"CharGPT.forward: got mode={mode!r}; expected tensor, loss or predict; pass one of them"
        )

    def _logits(self, inputs: Tensor) -> Tensor:
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.token_embedding(inputs) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def _draw_weights(self, num_layers: int) -> None:
        """Draw the weights as GPT-2 does: the last layer of each branch is smaller, by how many branches are summed."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                is_branch_end = name.endswith(".proj")
                nn.init.normal_(
                    module.weight, std=INIT_STD / math.sqrt(2 * num_layers) if is_branch_end else INIT_STD
                )
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
