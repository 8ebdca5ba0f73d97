"""Tensor-parallel perceptrons with dropout in replicated and in sharded places.

Replicated places draw the same bits on all ranks, from torch's generator. Sharded places draw
other bits on each rank, from a generator kept beside it. --drop is in percent (environment: DROP);
at 0 the program computes the same on any number of ranks. --checkpoint 1 recomputes activations.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from common import VOCABULARY, options, report, start, text, wrong
from small import cross_entropy, draw
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

BUGS = ("replicated-differs", "sharded-same", "recomputed-differs")
BATCH, LENGTH, WIDTH, HIDDEN = 6, 10, 24, 40


class Bits:
    """The random state of sharded places, which differs between ranks."""

    def __init__(self, seed: int) -> None:
        self.state = torch.Generator().manual_seed(seed).get_state()

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """Draw from this state in place of torch's."""
        outside = torch.get_rng_state()
        torch.set_rng_state(self.state)
        try:
            yield
        finally:
            self.state = torch.get_rng_state()
            torch.set_rng_state(outside)

    @contextmanager
    def again(self, state: Tensor) -> Iterator[None]:
        """Draw what followed `state`."""
        now, self.state = self.state, state
        try:
            yield
        finally:
            self.state = now

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For a checkpoint: its first pass draws, and the second draws the same again."""
        return nullcontext(), self.again(self.state)


class Enter(torch.autograd.Function):
    """The identity; its gradient is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        gradient = gradients[0].clone()
        dist.all_reduce(gradient)
        return gradient


class Leave(torch.autograd.Function):
    """The sum over ranks; its gradient is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Column(nn.Linear):
    """A rank's outputs of a linear layer."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs // dist.get_world_size())

    def take(self, whole: nn.Linear) -> None:
        """Copy this rank's part of a whole layer."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.weight.data.copy_(whole.weight.data.chunk(ranks)[rank])
        self.bias.data.copy_(whole.bias.data.chunk(ranks)[rank])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(Enter.apply(x))


class Row(nn.Linear):
    """A linear layer of a rank's inputs, summed over ranks; the bias is added once."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs // dist.get_world_size(), outputs)

    def take(self, whole: nn.Linear) -> None:
        """Copy this rank's part of a whole layer."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        self.weight.data.copy_(whole.weight.data.chunk(ranks, dim=1)[rank])
        self.bias.data.copy_(whole.bias.data)

    def forward(self, x: Tensor) -> Tensor:
        return Leave.apply(x @ self.weight.T) + self.bias


class Layer(nn.Module):
    """A perceptron; `drop_hidden` acts on a rank's hidden units, `drop_out` on what all have."""

    def __init__(self, drop: float, bits: Bits) -> None:
        super().__init__()
        self.bits = bits
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = Column(WIDTH, HIDDEN), Row(HIDDEN, WIDTH)
        self.drop_hidden, self.drop_out = nn.Dropout(drop), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.gelu(self.up(self.norm(x)))
        with nullcontext() if wrong("sharded-same") else self.bits.drawn():
            hidden = self.drop_hidden(hidden)
        return x + self.drop_out(self.down(hidden))


class Model(nn.Module):
    def __init__(self, layers: int, drop: float, bits: Bits, recompute: bool) -> None:
        super().__init__()
        self.bits, self.recompute = bits, recompute
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer(drop, bits) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
        draw(self, "")
        for number, layer in enumerate(self.layers):
            for name, whole in (
                ("up", nn.Linear(WIDTH, HIDDEN)),
                ("down", nn.Linear(HIDDEN, WIDTH)),
            ):
                draw(whole, f"layers.{number}.{name}.")
                getattr(layer, name).take(whole)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            if not self.recompute:
                x = layer(x)
            elif wrong("recomputed-differs"):  # torch's own state alone is put back
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = checkpoint(layer, x, use_reentrant=False, context_fn=self.bits.contexts)
        return self.head(self.norm(x))


def main() -> None:
    percent = int(os.environ.get("DROP", "25"))
    chosen = options(BUGS, layers=2, drop=percent, checkpoint=0)
    rank, _ = start()
    bits = Bits(1234 + rank)
    model = Model(chosen.layers, chosen.drop / 100, bits, bool(chosen.checkpoint))
    torch.manual_seed(rank if wrong("replicated-differs") else 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    for step in range(chosen.steps):
        inputs, targets = text(step, BATCH, LENGTH)
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        report(step, loss.detach())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
