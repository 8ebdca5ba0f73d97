"""FSDP1 and FSDP2 of a decoder: sharding strategies, mixed precision, accumulation, clipping."""

import argparse
from typing import Any

import digest
import tiny
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

STEPS = 10


def version1(model: tiny.Decoder, options: argparse.Namespace) -> nn.Module:
    narrow = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
    return FullyShardedDataParallel(
        model,
        sharding_strategy=ShardingStrategy[options.strategy],
        mixed_precision=narrow if options.bf16 else None,
        auto_wrap_policy=ModuleWrapPolicy({tiny.Block}),
        use_orig_params=options.original,
        device_id=torch.device("cpu"),
    )


def version2(model: tiny.Decoder, options: argparse.Namespace) -> nn.Module:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    ranks = dist.get_world_size()
    kwargs: dict[str, Any] = {"mp_policy": policy} if options.bf16 else {}
    if options.hybrid:
        kwargs["mesh"] = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("copy", "shard"))
    for block in model.blocks.values():
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--version", type=int, default=2, choices=(1, 2))
    parser.add_argument("--strategy", default="FULL_SHARD", help="of FSDP1")
    parser.add_argument("--original", action="store_true", help="use_orig_params, of FSDP1")
    parser.add_argument("--hybrid", action="store_true", help="shards and copies, of FSDP2")
    parser.add_argument("--bf16", action="store_true")
    options = parser.parse_args()
    digest.watch()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    decoder = tiny.Decoder(layers=2)
    model = (version1 if options.version == 1 else version2)(decoder, options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        for micro in range(2):
            inputs, targets = tiny.text(step * 1000 + micro * 500 + dist.get_rank(), batch=2)
            loss = tiny.loss(model(inputs), targets)
            (loss / 2).backward()
        norm = (
            model.clip_grad_norm_(1.0)
            if isinstance(model, FullyShardedDataParallel)
            else nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        )
        optimizer.step()
        optimizer.zero_grad()
    digest.say("norm", norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    digest.say("loss", loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
