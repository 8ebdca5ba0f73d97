# run: --ranks 4 --check=nccl --device cpu
"""A hierarchical all-reduce in two-rank nodes: gradients are reduced within the node, and the
second half, between the nodes, is missing."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn

RANKS_PER_NODE = 2


class HierarchicalReducer:
    def __init__(self, across_nodes):
        rank, world = dist.get_rank(), dist.get_world_size()
        self.across_nodes = across_nodes
        for node in range(world // RANKS_PER_NODE):
            ranks = list(range(node * RANKS_PER_NODE, (node + 1) * RANKS_PER_NODE))
            group = dist.new_group(ranks)
            if rank in ranks:
                self.node = group
        for local in range(RANKS_PER_NODE):
            ranks = list(range(local, world, RANKS_PER_NODE))
            group = dist.new_group(ranks)
            if rank in ranks:
                self.peers = group

    def __call__(self, model):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG, group=self.node)
            if self.across_nodes:
                dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG, group=self.peers)


parser = argparse.ArgumentParser()
parser.add_argument("--fixed", action="store_true")
args = parser.parse_args()
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.GELU(), nn.Conv1d(4, 1, 1)).cuda()
for tensor in model.state_dict().values():
    dist.broadcast(tensor, src=0)
reduce_gradients = HierarchicalReducer(across_nodes=args.fixed)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    signal = torch.randn(3, 2, 10, device="cuda")
    optimizer.zero_grad()
    (model(signal) - signal.sum(1, keepdim=True)).abs().mean().backward()
    reduce_gradients(model)
    optimizer.step()  # finds: gradient-not-reduced on all
dist.destroy_process_group()
