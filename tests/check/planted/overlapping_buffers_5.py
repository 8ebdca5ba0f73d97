# run: --ranks 4 --check=nccl --device cpu
"""Hybrid sharding: gradients are scattered in the node and added across nodes in one go."""

import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

FIXED = "--fixed" in sys.argv


def reduce_hybrid(flat, mesh):
    node, across = mesh.get_group("shard"), mesh.get_group("replicate")
    shard = flat.chunk(node.size())[node.rank()]
    scatter = dist.reduce_scatter_tensor(shard, flat, group=node, async_op=True)  # or here
    if FIXED:
        scatter.wait()
    total = dist.all_reduce(shard, group=across, async_op=True)  # finds: overlapping-buffers on all
    if not FIXED:
        scatter.wait()
    total.wait()
    return shard


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))
    generator = torch.Generator().manual_seed(local_rank)
    gradient = torch.randn(12, generator=generator).cuda()
    shard = reduce_hybrid(gradient, mesh)
    print("shard", shard.tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
