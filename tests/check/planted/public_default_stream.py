# run: --ranks 2 --check=nccl --device cpu
"""deepspeedai/DeepSpeed#7898: the reduction's stream waits for the default stream, while the
gradient comes from the stream on which its forward pass has run."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn


class PartitionedGradients:
    def __init__(self, module, fixed):
        self.parameters = list(module.parameters())
        self.stream = torch.cuda.Stream()
        self.fixed = fixed
        self.partitions = {}

    def reduce(self):
        world = dist.get_world_size()
        current = torch.cuda.current_stream()
        self.stream.wait_stream(current if self.fixed else torch.cuda.default_stream())
        with torch.cuda.stream(self.stream):
            for parameter in self.parameters:
                bucket = parameter.grad.flatten() / world  # finds: stream-race on all
                partition = bucket.new_empty(bucket.numel() // world)
                dist.reduce_scatter_tensor(partition, bucket)
                self.partitions[parameter] = partition

    def finish(self):
        torch.cuda.current_stream().wait_stream(self.stream)
        return sum(partition.square().sum() for partition in self.partitions.values())


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.cuda.manual_seed(0)
    layer = nn.Linear(6, 4, device="cuda")
    gradients = PartitionedGradients(layer, fixed="--fixed" in sys.argv)
    compute = torch.cuda.Stream()
    compute.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(compute):
        x = torch.ones(5, 6, device="cuda") * (1 + dist.get_rank())
        layer(x).square().mean().backward()  # or here
        gradients.reduce()
    print(f"squares {gradients.finish().item():.4f}")
    dist.destroy_process_group()


main()
