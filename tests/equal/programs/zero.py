"""ZeRO by hand: a flat buffer of all weights, and an optimizer for this rank's shard of it.

`--stage 1` reduces the gradients of a step once, and each rank takes its shard. `--stage 2` reduces
and scatters them after each microbatch. Then the norm of all is clipped, AdamW updates the shard,
and the shards are gathered. Matrices alone decay, by a mask over the flat buffer.
"""

from __future__ import annotations

import zlib

import common
import torch
import torch.distributed as dist
from common import VOCABULARY, wrong
from torch import Tensor, nn

BUGS = (
    "buffer-not-cleared",
    "decay-mask-not-shifted",
    "gathered-before-step",
    "gathered-in-wrong-order",
    "norm-of-own-shard",
    "norms-added",
    "offset-without-padding",
    "remainder-not-updated",
)
BATCH, LENGTH, WIDTH, HIDDEN, LAYERS = 24, 10, 21, 37, 2
RATE, DECAY, MAX_NORM = 1e-2, 0.1, 0.5


class Mixer(nn.Module):
    """A causal convolution over the tokens, for each channel alone."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.convolution(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return self.out(nn.functional.silu(y))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.mixer = nn.RMSNorm(WIDTH, eps=1e-6), Mixer()
        self.norm2, self.gated = nn.RMSNorm(WIDTH, eps=1e-6), Gated()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x))
        return x + self.gated(self.norm2(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Draw each parameter by a seed of its own."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            parameter.copy_(values / parameter[0].numel() ** 0.5)
        else:
            parameter.copy_(0.1 * values + ("norm" in name and name.endswith("weight")))


class Zero:
    """The flat weights and gradients of a model, and AdamW for this rank's shard."""

    def __init__(self, model: nn.Module, rank: int, ranks: int, stage: int) -> None:
        self.rank, self.ranks, self.stage = rank, ranks, stage
        parameters = list(model.parameters())
        count = sum(parameter.numel() for parameter in parameters)
        size = -(-count // ranks)
        if wrong("remainder-not-updated"):
            size = count // ranks
        self.whole = max(size * ranks, count)
        self.sharded = size * ranks
        self.weights, self.gradients = torch.zeros(self.whole), torch.zeros(self.whole)
        decay = torch.zeros(self.whole)
        start = 0
        for parameter in parameters:
            piece = slice(start, start + parameter.numel())
            self.weights[piece] = parameter.detach().flatten()
            parameter.data = self.weights[piece].view_as(parameter)
            parameter.grad = self.gradients[piece].view_as(parameter)
            decay[piece] = float(parameter.dim() > 1)
            start = piece.stop
        first = rank * (count // ranks if wrong("offset-without-padding") else size)
        own = slice(rank * size, (rank + 1) * size)
        self.own = own
        self.shard = nn.Parameter(self.weights[first : first + size].clone())
        self.shard.grad = torch.zeros(size)
        self.decay = decay[:size] if wrong("decay-mask-not-shifted") else decay[own]
        self.optimizer = torch.optim.AdamW([self.shard], lr=RATE, weight_decay=0, eps=1e-5)

    def after_microbatch(self, last: bool) -> None:
        """Add to the shard's gradient what the ranks' microbatches give, by the stage."""
        if self.stage == 1 and not last:
            return
        gradients = self.gradients[: self.sharded]
        if self.stage == 1:
            dist.all_reduce(gradients)
            self.shard.grad += gradients[self.own] / self.ranks
        else:
            piece = torch.empty_like(self.shard)
            dist.reduce_scatter_tensor(piece, gradients)
            self.shard.grad += piece / self.ranks
        if last or not wrong("buffer-not-cleared"):
            self.gradients.zero_()

    def clip(self) -> None:
        """Clip the shard's gradient by the norm of all shards."""
        norm = nn.utils.get_total_norm([self.shard.grad])
        if wrong("norms-added"):
            dist.all_reduce(norm)
        elif not wrong("norm-of-own-shard"):
            square = norm**2
            dist.all_reduce(square)
            norm = square.sqrt()
        nn.utils.clip_grads_with_norm_([self.shard], MAX_NORM, norm)

    @torch.no_grad()
    def step(self) -> None:
        """Update the shard, and gather all."""
        self.clip()
        if wrong("gathered-before-step"):
            self.gather()
        self.shard.mul_(1 - RATE * DECAY * self.decay)
        self.optimizer.step()
        self.shard.grad.zero_()
        if not wrong("gathered-before-step"):
            self.gather()

    def gather(self) -> None:
        pieces = [torch.empty_like(self.shard.detach()) for _ in range(self.ranks)]
        dist.all_gather(pieces, self.shard.detach())
        if wrong("gathered-in-wrong-order"):
            pieces.reverse()
        self.weights[: self.sharded] = torch.cat(pieces)


def main() -> None:
    options = common.options(BUGS, stage=2, micro=2)
    rank, ranks = common.start()
    model = Model()
    fill(model)
    zero = Zero(model, rank, ranks, options.stage)
    for step in range(options.steps):
        tokens, targets = common.text(step, BATCH, LENGTH)
        total = torch.zeros(())
        for number in range(options.micro):
            x, y = (
                part.chunk(options.micro)[number].chunk(ranks)[rank] for part in (tokens, targets)
            )
            logits = model(x)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()) / options.micro
            loss.backward()
            total += loss.detach() / ranks
            zero.after_microbatch(number == options.micro - 1)
        zero.step()
        dist.all_reduce(total)
        common.report(step, total)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
