"""Data parallelism of a small language model: torch's DDP, or gradients averaged by hand.

The samples differ in their numbers of tokens, and a step has microbatches. `--hand 1` averages by
hand in buckets, `--tied 1` ties the head to the embedding, `--clip 1` clips by the norm, and
`--strided 1` deals the samples out one by one, as DistributedSampler does.
"""

from __future__ import annotations

import argparse
import zlib
from contextlib import AbstractContextManager, nullcontext

import common
import torch
import torch.distributed as dist
from common import VOCABULARY, wrong
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

BUGS = (
    "added-after-wrapping",
    "averaged-again",
    "clipped-before-reduction",
    "different-weights",
    "last-bucket-not-reduced",
    "last-microbatch-in-no-sync",
    "learning-rate-scaled",
    "local-token-mean",
    "microbatch-means",
    "reduced-after-each-microbatch",
    "same-shard",
    "skipped-on-one-rank",
    "summed-not-averaged",
    "sync-on-first-microbatch",
    "tied-parameter-reduced-twice",
)
BATCH, LENGTH, WIDTH, HEADS, HIDDEN = 24, 11, 20, 4, 44
IGNORED = -100
BUCKET = 1500
SPIKE = 4.6


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Adapter(nn.Module):
    """A bottleneck beside the last layers, added to the model when it is fine-tuned."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(nn.functional.silu(self.down(x)))


class TokenLoss(nn.Module):
    """The cross-entropy of the tokens that count, over `count`."""

    def forward(self, logits: Tensor, targets: Tensor, count: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        return loss / count


class Model(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.empty(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.adapter: nn.Module = nn.Identity()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.loss = TokenLoss()

    def forward(self, tokens: Tensor, targets: Tensor, count: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.loss(self.head(self.adapter(self.norm(x))), targets, count)


@torch.no_grad()
def fill(model: nn.Module, seed: int = 0) -> None:
    """Draw each parameter by a seed of its own."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()) + seed)
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            parameter.copy_(values / parameter.shape[1] ** 0.5)
        else:
            parameter.copy_(0.1 * values + ("norm" in name and name.endswith("weight")))


def batches(
    step: int, rank: int, ranks: int, options: argparse.Namespace
) -> list[tuple[Tensor, Tensor]]:
    """This rank's microbatches: tokens, and their targets."""
    tokens, targets = common.text(step, BATCH, LENGTH)
    generator = torch.Generator().manual_seed(2000 + step)
    lengths = torch.randint(3, LENGTH + 1, (BATCH, 1), generator=generator)
    targets = targets.masked_fill(torch.arange(LENGTH) >= lengths, IGNORED)
    own = 0 if wrong("same-shard") else rank
    return [
        tuple(x[own::ranks] if options.strided else x.chunk(ranks)[own] for x in pair)
        for pair in zip(tokens.chunk(options.micro), targets.chunk(options.micro), strict=True)
    ]


def count_tokens(pieces: list[tuple[Tensor, Tensor]], ranks: int) -> Tensor:
    """How many tokens count on an average rank: gradients are averaged over the ranks."""
    count = torch.stack([(targets != IGNORED).sum() for _, targets in pieces]).sum()
    if wrong("local-token-mean"):
        return count
    dist.all_reduce(count)
    return count if wrong("averaged-again") else count / ranks


def sum_gradients(model: nn.Module) -> None:
    """Sum gradients over the ranks, in buckets that are filled from the last layer."""
    parameters = list(model.parameters())
    if wrong("tied-parameter-reduced-twice"):
        parameters = [p for module in model.modules() for p in module.parameters(recurse=False)]
    bucket: list[Tensor] = []
    for parameter in reversed(parameters):
        bucket.append(parameter.grad)
        if sum(gradient.numel() for gradient in bucket) >= BUCKET:
            sum_bucket(bucket)
            bucket = []
    if bucket and not wrong("last-bucket-not-reduced"):
        sum_bucket(bucket)


def sum_bucket(gradients: list[Tensor]) -> None:
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, values in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(values.view_as(gradient))


def synchronised(model: nn.Module, number: int, micro: int) -> AbstractContextManager[None]:
    """DDP reduces the gradients in the last microbatch alone."""
    if not isinstance(model, DistributedDataParallel):
        return nullcontext()
    if wrong("last-microbatch-in-no-sync"):
        return model.no_sync()
    last = 0 if wrong("sync-on-first-microbatch") else micro - 1
    return nullcontext() if number == last else model.no_sync()


def main() -> None:
    options = common.options(BUGS, micro=2, hand=0, tied=0, clip=0, strided=0)
    rank, ranks = common.start()
    inner = Model(bool(options.tied))
    if not wrong("added-after-wrapping"):
        inner.adapter = Adapter()
    fill(inner, rank if wrong("different-weights") else 0)
    model = inner if options.hand else DistributedDataParallel(inner)
    if wrong("added-after-wrapping"):
        inner.adapter = Adapter()
        fill(inner)
    rate = 0.2 * (ranks if wrong("learning-rate-scaled") else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=0.01)

    for step in range(options.steps):
        pieces = batches(step, rank, ranks, options)
        count = count_tokens(pieces, ranks)
        losses = []
        for number, piece in enumerate(pieces):
            if wrong("microbatch-means"):
                count = count_tokens([piece], ranks) * len(pieces)
            with synchronised(model, number, len(pieces)):
                loss = model(*piece, count)
                loss.backward()
            losses.append(loss.detach())
            if wrong("reduced-after-each-microbatch") and number < len(pieces) - 1:
                sum_gradients(model)
        if options.clip and wrong("clipped-before-reduction"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.4)
        if options.hand:
            sum_gradients(model)
            for parameter in model.parameters():
                if not wrong("summed-not-averaged"):
                    parameter.grad /= ranks
        if options.clip and not wrong("clipped-before-reduction"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.4)
        own = torch.stack(losses).sum()
        total = own.clone()
        dist.all_reduce(total)
        if (own if wrong("skipped-on-one-rank") else total / ranks) < SPIKE:
            optimizer.step()
        optimizer.zero_grad()
        common.report(step, total / ranks)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
