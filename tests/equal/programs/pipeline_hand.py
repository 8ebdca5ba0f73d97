"""A pipeline by hand: stages, microbatches, and an embedding that the first and last stage share.

--schedule 0 is GPipe, 1 is 1F1B. With --renumber 1 each stage numbers its layers from 0.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import VOCABULARY, options, report, start, text, wrong
from small import Block, cross_entropy, draw
from torch import Tensor, nn

BUGS = (
    "tied-not-summed",
    "tied-differ",
    "loss-summed",
    "zeroed-between",
    "last-saved-first",
    "received-out-of-order",
    "layer-twice",
    "layer-skipped",
    "local-depth",
)
BATCH, LENGTH, WIDTH, HEADS, HIDDEN = 6, 10, 24, 4, 40


class Stage(nn.Module):
    """Some layers of the decoder; the first stage has embeddings, the last one the head."""

    def __init__(self, rank: int, ranks: int, layers: int, renumber: bool) -> None:
        super().__init__()
        self.first, self.last = rank == 0, rank == ranks - 1
        begin, end = layers * rank // ranks, layers * (rank + 1) // ranks
        if wrong("layer-twice") and not self.last:
            end += 1
        if wrong("layer-skipped") and not self.first:
            begin += 1
        offset = begin if renumber else 0
        if self.first or self.last:
            self.tokens = nn.Embedding(VOCABULARY, WIDTH)
            draw(self.tokens, "head." if wrong("tied-differ") and self.last else "tokens.")
        if self.first:
            self.positions = nn.Embedding(LENGTH, WIDTH)
            draw(self.positions, "positions.")
        self.layers = nn.ModuleDict()
        for number in range(begin, end):
            depth = number - begin if wrong("local-depth") else number
            block = Block(WIDTH, HEADS, HIDDEN, scale=(1 + depth) ** -0.5)
            draw(block, f"layers.{number}.")
            self.layers[str(number - offset)] = block
        if self.last:
            self.norm = nn.LayerNorm(WIDTH)
            draw(self.norm, "norm.")
            self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for layer in self.layers.values():
            x = layer(x)
        return self.head(self.norm(x)) if self.last else x


class Pipeline:
    """One rank's part of a step: its stage's forward and backward passes of all microbatches."""

    def __init__(self, stage: Stage, optimizer: torch.optim.Optimizer, micro: int) -> None:
        self.stage, self.optimizer, self.micro = stage, optimizer, micro
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.saved: list[tuple[Tensor, Tensor]] = []
        self.sends: list[tuple[dist.Work | None, Tensor]] = []
        self.total = torch.zeros(())

    def send(self, x: Tensor, to: int, number: int) -> None:
        x = x.detach().contiguous()
        self.sends.append((dist.isend(x, to, tag=number), x))

    def receive(self, source: int, number: int) -> Tensor:
        x = torch.empty(BATCH // self.micro, LENGTH, WIDTH)
        dist.recv(x, source, tag=number)
        return x

    def forward(self, number: int, inputs: Tensor, targets: Tensor) -> None:
        x = inputs
        if not self.stage.first:
            tag = self.micro - 1 - number if wrong("received-out-of-order") else number
            x = self.receive(self.rank - 1, tag).requires_grad_()
        y = self.stage(x)
        if self.stage.last:
            y = cross_entropy(y, targets)
            if not wrong("loss-summed"):
                y = y / self.micro
            self.total += y.detach()
        else:
            self.send(y, self.rank + 1, number)
        self.saved.append((x, y))

    def backward(self, number: int) -> None:
        if wrong("zeroed-between"):
            self.optimizer.zero_grad()
        x, y = self.saved.pop(-1 if wrong("last-saved-first") else 0)
        y.backward(None if self.stage.last else self.receive(self.rank + 1, number))
        if x.grad is not None:
            self.send(x.grad, self.rank - 1, number)

    def step(self, inputs: Tensor, targets: Tensor, early: int) -> Tensor:
        """Run all microbatches, `early` forward passes before the first backward pass."""
        self.total.zero_()
        parts = list(zip(inputs.chunk(self.micro), targets.chunk(self.micro), strict=True))
        for number, part in enumerate(parts):
            self.forward(number, *part)
            if number >= early:
                self.backward(number - early)
        for number in range(self.micro - early, self.micro):
            self.backward(number)
        for work, _ in self.sends:
            if work is not None:
                work.wait()
        self.sends.clear()
        dist.broadcast(self.total, self.ranks - 1)
        return self.total


def main() -> None:
    chosen = options(BUGS, layers=5, micro=3, schedule=0, renumber=0)
    rank, ranks = start()
    model = Stage(rank, ranks, chosen.layers, bool(chosen.renumber))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ends = dist.new_group(sorted({0, ranks - 1}))
    micro = chosen.micro if ranks > 1 else 1
    pipeline = Pipeline(model, optimizer, micro)
    early = min(ranks - 1 - rank, micro) if chosen.schedule else micro
    for step in range(chosen.steps):
        loss = pipeline.step(*text(step, BATCH, LENGTH), early)
        if ranks > 1 and (model.first or model.last) and not wrong("tied-not-summed"):
            dist.all_reduce(model.tokens.weight.grad, group=ends)
        optimizer.step()
        optimizer.zero_grad()
        report(step, loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
