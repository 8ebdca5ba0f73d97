"""FSDP2 and FSDP1 of a small decoder, with microbatches and a clipped norm.

`--version 2` sums gradients (a divide factor of 1 in each module, and a loss over the tokens of all
ranks); `--replicas 2` shards within halves of the ranks (HSDP). `--version 1` averages;
`--original 1` is its use_orig_params. `--clip 1` clips by the norm.
"""

from __future__ import annotations

import argparse
import warnings
import zlib

import common
import torch
import torch.distributed as dist
from common import VOCABULARY, wrong
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

BUGS = (
    "clipped-by-utils",
    "divide-factor-of-root-alone",
    "ignored-not-reduced",
    "microbatches-not-divided",
    "norm-of-local-shards",
    "reduced-in-bfloat16",
    "replicas-not-reduced",
    "sync-on-first-microbatch",
)
BATCH, LENGTH, WIDTH, HEADS, HIDDEN = 24, 9, 28, 4, 52
MAX_NORM = 0.5


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
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


class TokenLoss(nn.Module):
    """The cross-entropy of all tokens, over `count`."""

    def forward(self, logits: Tensor, targets: Tensor, count: float) -> Tensor:
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return loss / count


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.loss = TokenLoss()

    def forward(self, tokens: Tensor, targets: Tensor, count: float) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.loss(self.head(self.norm(x)), targets, count)


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Draw each parameter by a seed of its own."""
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            parameter.copy_(values / parameter.shape[1] ** 0.5)
        else:
            parameter.copy_(0.1 * values + ("norm" in name and name.endswith("weight")))


def version1(model: Model, options: argparse.Namespace) -> nn.Module:
    """Return the model in FSDP1, a unit for each block."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    narrow = MixedPrecision(reduce_dtype=torch.bfloat16) if wrong("reduced-in-bfloat16") else None
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=bool(options.original),
        mixed_precision=narrow,
        device_id=torch.device("cpu"),
    )


def version2(model: Model, options: argparse.Namespace) -> nn.Module:
    """Return the model in FSDP2 over one mesh, or over replicas and shards."""
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    if options.replicas > 1 and ranks > 1:
        shape = (options.replicas, ranks // options.replicas)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replica", "shard"))
        if wrong("replicas-not-reduced"):
            mesh = mesh["shard"]
    policy = MixedPrecisionPolicy()
    if wrong("reduced-in-bfloat16"):
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    ignored = {model.positions.weight} if wrong("ignored-not-reduced") else None
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, ignored_params=ignored)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sum, of bfloat16
            module.set_gradient_divide_factor(1.0)
            if wrong("divide-factor-of-root-alone"):
                break
    return model


def clip(model: nn.Module) -> None:
    """Clip gradients by the norm of all shards."""
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    if isinstance(model, FullyShardedDataParallel) and not wrong("clipped-by-utils"):
        # Its own clip_grad_norm_ computes in float32, and fails for gradients in float64.
        square = nn.utils.get_total_norm([p.grad for p in parameters]) ** 2
        dist.all_reduce(square)
        nn.utils.clip_grads_with_norm_(parameters, MAX_NORM, square.sqrt())
    elif wrong("norm-of-local-shards"):
        norm = nn.utils.get_total_norm([p.grad.to_local() for p in parameters])
        nn.utils.clip_grads_with_norm_(parameters, MAX_NORM, norm)
    else:
        nn.utils.clip_grad_norm_(parameters, MAX_NORM)


def main() -> None:
    options = common.options(BUGS, version=2, replicas=1, original=0, micro=2, clip=0)
    rank, ranks = common.start()
    model = Model()
    fill(model)
    model = (version1 if options.version == 1 else version2)(model, options)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, weight_decay=0.05, eps=1e-4, foreach=False
    )
    parts = options.micro
    # FSDP1 averages over the ranks, FSDP2 sums.
    tokens_of_step = BATCH * LENGTH / (ranks if options.version == 1 else 1)
    for step in range(options.steps):
        inputs, targets = common.text(step, BATCH, LENGTH)
        total = torch.zeros(())
        for number in range(parts):
            x, y = (part.chunk(parts)[number].chunk(ranks)[rank] for part in (inputs, targets))
            if isinstance(model, FSDPModule):
                last = 0 if wrong("sync-on-first-microbatch") else parts - 1
                model.set_requires_gradient_sync(number == last)
            count = tokens_of_step
            if wrong("microbatches-not-divided"):
                count /= parts
            loss = model(x, y, count)
            loss.backward()
            total += loss.detach()
        if options.clip:
            clip(model)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        common.report(step, total / ranks if options.version == 1 else total)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
