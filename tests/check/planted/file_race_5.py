# run: --ranks 4 --check=gloo
"""Rank 0 writes converted weights to a shared folder; the barrier that follows is that of each
node, so that the second node does not wait for rank 0."""

import argparse
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from safetensors.torch import load_file, save_file


def node_groups(ranks_per_node):
    groups = []
    for first in range(0, dist.get_world_size(), ranks_per_node):
        groups.append(dist.new_group(list(range(first, first + ranks_per_node))))
    return groups[dist.get_rank() // ranks_per_node]


def convert(path):
    torch.manual_seed(0)
    legacy = {"w": torch.randn(6, 3), "b": torch.zeros(3)}
    save_file({"weight": legacy["w"].t().contiguous(), "bias": legacy["b"]}, path)  # or here


def load_model(path):
    model = nn.Linear(6, 3)
    model.load_state_dict(load_file(path))  # finds: file-race on 2, 3
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    node = node_groups(2)
    folder = os.environ.get("SCRATCH", tempfile.gettempdir())
    path = os.path.join(folder, f"converted-{os.environ['MASTER_PORT']}.safetensors")
    if dist.get_rank() == 0:
        convert(path)
    dist.barrier(group=None if args.fixed else node)
    model = load_model(path)
    total = model(torch.ones(1, 6)).detach().sum()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"checksum {total.item():.4f}")
        os.remove(path)
    dist.destroy_process_group()


main()
