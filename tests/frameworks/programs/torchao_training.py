"""torchao's quantised training under FSDP2: int8 weights, or float8 products with its all-gather.

The products in float8 are emulated, which a CPU can do.
"""

import argparse
from typing import Any

import digest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)
from torchao.prototype.quantized_training import int8_weight_only_quantized_training
from torchao.quantization import quantize_

WIDTH = CLASSES = 64  # a row for each of 64 ranks: int8's weights have no empty shards


def quantised(model: nn.Sequential, kind: str, gather: str) -> nn.Sequential:
    if kind == "int8":
        quantize_(model, int8_weight_only_quantized_training())
        return model
    config: Any = Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=gather == "float8")
    return convert_to_float8_training(model, config=config)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=["int8", "float8"], default="int8")
    parser.add_argument("--gather", choices=["float8", "float32"], default="float8")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    digest.watch()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, CLASSES)
    )
    inputs = torch.randn(args.steps, ranks, 16, WIDTH)
    targets = inputs[..., :CLASSES].argmax(-1)
    model = quantised(model, args.kind, args.gather)
    for layer in model[::2]:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)  # int8 weights are rounded at random after each step
    losses = []
    for x, y in zip(inputs[:, rank], targets[:, rank], strict=True):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if args.kind == "float8" and args.gather == "float8":
            precompute_float8_dynamic_scale_for_fsdp(model)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean / ranks)
    digest.say("losses", losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
