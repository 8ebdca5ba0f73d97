"""torch.compile of DistributedDataParallel, or of FSDP2's blocks."""

import argparse

import digest
import tiny
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fsdp2", action="store_true")
    options = parser.parse_args()
    digest.watch()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: nn.Module = tiny.Decoder()
    if options.fsdp2:
        for block in model.blocks.values():
            block.compile()
            fully_shard(block)
        fully_shard(model)
    else:
        model = torch.compile(DistributedDataParallel(model, bucket_cap_mb=1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(10):
        inputs, targets = tiny.text(step * 1000 + dist.get_rank(), batch=2)
        loss = tiny.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    digest.say("loss", loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
