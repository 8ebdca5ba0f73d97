"""The parts of a small decoder, with weights that follow from their names alone."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor, nn

__all__ = ["Attention", "Block", "Perceptron", "cross_entropy", "draw"]


def draw(module: nn.Module, prefix: str) -> None:
    """Draw a module's parameters, each by a seed of its name in the whole model."""
    for name, parameter in module.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32((prefix + name).encode()))
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            values /= parameter.shape[-1] ** 0.5
        else:
            values = 0.1 * values + ("norm" in prefix + name and name.endswith("weight"))
        parameter.data.copy_(values)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        return self.out(self.mix(q, k, v).transpose(1, 2).flatten(2))


class Perceptron(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and a perceptron; `scale` multiplies what each of them adds."""

    def __init__(self, width: int, heads: int, hidden: int, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention: nn.Module = Attention(width, heads)
        self.perceptron = Perceptron(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale * self.attention(self.norm1(x))
        return x + self.scale * self.perceptron(self.norm2(x))


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """The cross-entropy of (batch, length, vocabulary) and (batch, length); -100 is ignored."""
    loss = nn.functional.cross_entropy
    return loss(logits.flatten(0, 1), targets.flatten(), reduction=reduction)
