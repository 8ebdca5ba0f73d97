"""Context parallelism: the sequence is sharded, and all ranks' keys and values are gathered.

--zigzag 1 gives each rank a piece of the front and one of the back. --cp is how many ranks share
a sequence (0: all); the others are data-parallel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from common import VOCABULARY, options, report, start, text, wrong
from small import Attention, Block, cross_entropy, draw
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

BUGS = (
    "mask-local",
    "positions-local",
    "zigzag-contiguous",
    "gather-splits",
    "loss-local-mean",
    "vectors-not-reduced",
    "data-group-only",
)
BATCH, WIDTH, HEADS, HIDDEN = 10, 28, 4, 44


@dataclass(frozen=True)
class Context:
    """The ranks that share a sequence, and how its positions are dealt to them."""

    rank: int
    ranks: int
    group: dist.ProcessGroup
    length: int
    zigzag: bool

    def places(self, rank: int) -> Tensor:
        """A rank's positions in the whole sequence."""
        pieces = torch.arange(self.length).chunk(2 * self.ranks if self.zigzag else self.ranks)
        if self.zigzag:
            return torch.cat([pieces[rank], pieces[2 * self.ranks - 1 - rank]])
        return pieces[rank]

    def positions(self, rank: int) -> Tensor:
        """Where the model takes a rank's tokens to be."""
        if wrong("zigzag-contiguous"):
            return torch.arange(self.length).chunk(self.ranks)[rank]
        return self.places(rank)


class Gather(torch.autograd.Function):
    """All ranks' parts of the sequence; each gets the sum of the gradients of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, context: Context) -> Tensor:
        ctx.context = context
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(context.ranks)]
        dist.all_gather(parts, x, group=context.group)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        context = ctx.context
        parts = [part.contiguous() for part in gradients[0].chunk(context.ranks, dim=2)]
        if wrong("gather-splits"):
            return parts[context.rank], None
        mine = torch.empty_like(parts[0])
        dist.reduce_scatter(mine, parts, group=context.group)
        return mine, None


class ContextAttention(Attention):
    """Attention of a rank's own positions to all that are not after them."""

    def __init__(self, width: int, heads: int, context: Context) -> None:
        super().__init__(width, heads)
        self.context = context

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        context = self.context
        k, v = Gather.apply(k, context), Gather.apply(v, context)
        mine = context.positions(context.rank)
        if wrong("mask-local"):
            mine = torch.arange(q.shape[2])
        theirs = torch.cat([context.positions(rank) for rank in range(context.ranks)])
        mask = mine[:, None] >= theirs
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Decoder(nn.Module):
    def __init__(self, layers: int, context: Context) -> None:
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(context.length, WIDTH)
        self.layers = nn.ModuleList(Block(WIDTH, HEADS, HIDDEN) for _ in range(layers))
        for layer in self.layers:
            layer.attention = ContextAttention(WIDTH, HEADS, context)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        draw(self, "")

    def forward(self, tokens: Tensor) -> Tensor:
        places = self.context.positions(self.context.rank)
        if wrong("positions-local"):
            places = torch.arange(tokens.shape[1])
        x = self.tokens(tokens) + self.positions(places)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def padded(step: int, length: int) -> tuple[Tensor, Tensor]:
    """A global batch of sequences of different lengths; -100 is the target after their ends."""
    inputs, targets = text(step, BATCH, length)
    ends = length - 3 * (torch.arange(BATCH) % 4)
    return inputs, targets.masked_fill(torch.arange(length) >= ends[:, None], -100)


def main() -> None:
    chosen = options(BUGS, layers=2, length=24, cp=0, zigzag=0)
    rank, ranks = start()
    size = min(chosen.cp, ranks) or ranks
    mesh = init_device_mesh("cpu", (ranks // size, size), mesh_dim_names=("data", "context"))
    group = mesh.get_group("context")
    context = Context(rank % size, size, group, chosen.length, bool(chosen.zigzag))
    model = Decoder(chosen.layers, context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
    for step in range(chosen.steps):
        inputs, targets = (
            each.chunk(ranks // size)[rank // size][:, context.places(context.rank)]
            for each in padded(step, chosen.length)
        )
        count = (targets != -100).sum()
        dist.all_reduce(count)
        logits = model(inputs)
        if wrong("loss-local-mean"):
            loss = cross_entropy(logits, targets) / ranks
        else:
            loss = cross_entropy(logits, targets, reduction="sum") / count
        loss.backward()
        for parameter in model.parameters():
            if wrong("vectors-not-reduced") and parameter.ndim == 1:
                continue
            if wrong("data-group-only"):
                dist.all_reduce(parameter.grad, group=mesh.get_group("data"))
            else:
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        report(step, total)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
