"""Context parallelism: the sequence sharded in two pieces a rank, keys passed round a ring.

PyTorch's own `context_parallel` has kernels of GPUs alone; this one is of plain operations.
"""

from __future__ import annotations

from typing import Any

import digest
import tiny
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce


class Pass(torch.autograd.Function):
    """Send a tensor to the next rank, and its gradient back to the one before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, distance: int) -> Tensor:
        ctx.distance = distance
        rank, ranks = dist.get_rank(), dist.get_world_size()
        received = torch.empty_like(x)
        swaps = [
            dist.P2POp(dist.isend, x.contiguous(), (rank + distance) % ranks),
            dist.P2POp(dist.irecv, received, (rank - distance) % ranks),
        ]
        for work in dist.batch_isend_irecv(swaps):
            work.wait()
        return received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return Pass.apply(gradients[0], -ctx.distance), None


def positions(rank: int, ranks: int, length: int) -> Tensor:
    """A rank's positions: a piece from the front and one from the back, so that work is even."""
    pieces = torch.arange(length).chunk(2 * ranks)
    return torch.cat([pieces[rank], pieces[2 * ranks - 1 - rank]])


class RingAttention(tiny.Attention):
    """Causal attention over all ranks' positions, merged piece by piece (FlashAttention's rule)."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        rank, ranks = dist.get_rank(), dist.get_world_size()
        length = x.shape[1] * ranks
        mine = positions(rank, ranks, length)
        top = q.new_full((*q.shape[:-1], 1), -torch.inf)
        total, weights = torch.zeros_like(q), torch.zeros_like(top)
        for turn in range(ranks):
            if turn:
                k, v = Pass.apply(torch.stack([k, v]), 1)
            theirs = positions((rank - turn) % ranks, ranks, length)
            scores = q @ k.mT / self.size**0.5
            scores = scores.masked_fill(mine[:, None] < theirs, -torch.inf)
            largest = torch.maximum(top, scores.detach().amax(-1, keepdim=True))
            shared = largest.clamp(min=-1e30)  # rows that see nothing yet
            share, old = (scores - shared).exp(), (top - shared).exp()
            total, weights = total * old + share @ v, weights * old + share.sum(-1, keepdim=True)
            top = largest
        return self.out((total / weights).transpose(1, 2).flatten(2))


def main() -> None:
    digest.watch()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tiny.Attention = RingAttention
    torch.manual_seed(0)
    model: nn.Module = tiny.Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    length = 32 * ranks
    for step in range(10):
        inputs, targets = (
            each[:, positions(rank, ranks, length)] for each in tiny.text(step, 2, length)
        )
        loss = tiny.loss(model(inputs), targets) / ranks
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        digest.say("loss", all_reduce(loss.detach()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
