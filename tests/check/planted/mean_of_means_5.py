# run: --ranks 4 --check
"""Context parallel, two by two: each rank's part of the sequence has its own number of labelled
tokens, and the mean over parts is the mean of their means."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distnn
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh


def answer_labels(tokens, prompt):
    labels = tokens.roll(-1, dims=1)
    labels[:, :prompt] = -100
    labels[:, -1] = -100
    return labels


class ContextParallelLoss(nn.Module):
    def __init__(self, group, fixed):
        super().__init__()
        self.group = group
        self.fixed = fixed

    def forward(self, logits, labels):
        logits, labels = logits.flatten(0, 1), labels.flatten()
        if self.fixed:
            total = F.cross_entropy(logits, labels, reduction="sum")
            count = (labels != -100).sum()
            dist.all_reduce(count, group=self.group)
            return distnn.all_reduce(total, group=self.group) / count
        mean = F.cross_entropy(logits, labels)  # or here
        total = distnn.all_reduce(mean, group=self.group)  # finds: mean-of-means on all
        return total / dist.get_world_size(self.group)


def main():
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    cp = mesh["cp"]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(17, 6), nn.Linear(6, 17))
    criterion = ContextParallelLoss(cp.get_group(), fixed="--fixed" in sys.argv)
    torch.manual_seed(1 + mesh["dp"].get_local_rank())
    tokens = torch.randint(17, (3, 16))
    labels = answer_labels(tokens, prompt=5)
    part = cp.get_local_rank()
    loss = criterion(model(tokens.chunk(2, 1)[part]), labels.chunk(2, 1)[part])
    loss.backward()
    print(f"loss {loss.item():.4f}")
    dist.destroy_process_group()


main()
