"""A pipeline of torch.distributed.pipelining: 1F1B, or with --interleave 1 two stages a rank.

With --accumulate 2 the optimizer makes one step for every two of the schedule's.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import VOCABULARY, options, report, start, text, wrong
from small import Block, cross_entropy, draw
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

BUGS = ("gradients-not-scaled", "scaled-each-time", "layers-by-rank")
BATCH, LENGTH, WIDTH, HEADS, HIDDEN = 24, 10, 28, 4, 44


class Decoder(nn.Module):
    """A decoder, or those of its layers that are in `numbers`."""

    def __init__(self, numbers: range, first: bool, last: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH) if first else None
        self.positions = nn.Embedding(LENGTH, WIDTH) if first else None
        self.layers = nn.ModuleDict({str(n): Block(WIDTH, HEADS, HIDDEN) for n in numbers})
        self.norm = nn.LayerNorm(WIDTH) if last else None
        self.head = nn.Linear(WIDTH, VOCABULARY) if last else None
        draw(self, "")

    def forward(self, x: Tensor) -> Tensor:
        if self.tokens is not None and self.positions is not None:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for layer in self.layers.values():
            x = layer(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def part(index: int, stages: int, layers: int) -> Decoder:
    """The layers of one stage of several."""
    place = index
    if wrong("layers-by-rank"):  # a rank's layers side by side, though its stages are not
        ranks = dist.get_world_size()
        place = index % ranks * (stages // ranks) + index // ranks
    numbers = range(layers * place // stages, layers * (place + 1) // stages)
    return Decoder(numbers, first=index == 0, last=index == stages - 1)


def main() -> None:
    chosen = options(BUGS, layers=7, micro=4, interleave=0, accumulate=1)
    rank, ranks = start()
    rounds, micro = chosen.accumulate, chosen.micro
    if ranks == 1:
        parts = [part(0, 1, chosen.layers)]
    else:
        stages = ranks * (2 if chosen.interleave else 1)
        own = list(range(rank, stages, ranks))
        parts = [part(index, stages, chosen.layers) for index in own]
        scaled = rounds == 1 or wrong("scaled-each-time")
        if wrong("gradients-not-scaled"):
            scaled = False
        pieces = [
            PipelineStage(each, index, stages, torch.device("cpu"))
            for each, index in zip(parts, own, strict=True)
        ]
        schedule = (
            ScheduleInterleaved1F1B(pieces, micro, loss_fn=cross_entropy, scale_grads=scaled)
            if chosen.interleave
            else Schedule1F1B(pieces[0], micro, loss_fn=cross_entropy, scale_grads=scaled)
        )
    parameters = [each for module in parts for each in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.01, eps=1e-4)
    for step in range(chosen.steps):
        total = torch.zeros(())
        inputs, targets = text(step, BATCH, LENGTH)
        if ranks == 1:
            loss = cross_entropy(parts[0](inputs), targets)
            loss.backward()
            total += loss.detach()
        else:
            for x, y in zip(inputs.chunk(rounds), targets.chunk(rounds), strict=True):
                losses: list[Tensor] = []
                last = {"target": y, "losses": losses} if rank == ranks - 1 else {}
                schedule.step(*((x,) if rank == 0 else ()), **last)
                if losses:
                    total += torch.stack(losses).mean().detach() / rounds
            if rounds > 1:
                for parameter in parameters:
                    parameter.grad /= rounds if scaled else rounds * micro
        dist.broadcast(total, ranks - 1)
        optimizer.step()
        optimizer.zero_grad()
        report(step, total)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
