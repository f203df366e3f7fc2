"""A small model with weights, inputs and an output gradient that no random generator had a hand in."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """A norm, two linear layers, a value used three times and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up = nn.Linear(4, 6)
        self.down = nn.Linear(6, 4)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.linspace(-1.0, 1.5, parameter.numel()).view_as(parameter))

    def forward(self, x, mask):
        h = self.norm(x)
        h = torch.nn.functional.gelu(self.up(h))
        h, _unused = self.down(h).chunk(2, 1)
        y = torch.cat([h, h * mask], 1)
        return (x + y).cos()


def block_inputs() -> tuple[Tensor, Tensor]:
    """One input that needs a gradient, and one that does not."""
    x = torch.linspace(-2, 2, 12).view(3, 4).sin().requires_grad_()
    return x, torch.tensor([[1.0, 0.0], [0.5, 2.0], [3.0, -1.0]])


def block_gradient() -> Tensor:
    """A gradient of the output."""
    return torch.linspace(-1.0, 2.0, 12).view(3, 4)
