# run: --ranks 4 --check=nccl --device cpu
"""Hand-made data parallel with masked frames: the loss is divided by the rank's own mask, and the
gradients by the number of ranks."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn

FIXED = "--fixed" in sys.argv


class MaskedRegression:
    def __init__(self, model):
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def loss(self, frames, mask):
        errors = (self.model(frames) - frames).square().mean(-1)
        total = (errors * mask).sum()
        count = mask.sum()
        if FIXED:
            dist.all_reduce(count)
            return total / count * dist.get_world_size()
        return total / count  # or here

    def step(self, frames, mask):
        self.optimizer.zero_grad()
        self.loss(frames, mask).backward()  # or here
        for parameter in self.model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)  # finds: mean-of-means on all
        self.optimizer.step()


def main():
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank))
    torch.cuda.manual_seed(0)
    with torch.device("cuda"):
        model = nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 8))
    trainer = MaskedRegression(model)
    torch.cuda.manual_seed(1 + local_rank)
    for _ in range(2):
        frames = torch.randn(5, 10, 8, device="cuda")
        lengths = torch.randint(2, 11, (5, 1), device="cuda")
        mask = (torch.arange(10, device="cuda") < lengths).float()
        trainer.step(frames, mask)
    dist.destroy_process_group()


main()
