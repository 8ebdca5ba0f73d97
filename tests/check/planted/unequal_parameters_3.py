# run: --ranks 5 --check=nccl --device cpu
"""A trainer reduces gradients and clips them, by the norm that its rank's gradients have had before
the reduction."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn


class Trainer:
    def __init__(self, model, fixed):
        self.model = model
        self.fixed = fixed
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def grads(self):
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def reduce(self):
        works = [dist.all_reduce(g, dist.ReduceOp.AVG, async_op=True) for g in self.grads()]
        for work in works:
            work.wait()

    def step(self, batch):
        inputs, targets = batch
        self.optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.smooth_l1_loss(self.model(inputs), targets)
        loss.backward()
        if self.fixed:
            self.reduce()
            norm = nn.utils.get_total_norm(self.grads())
        else:
            norm = nn.utils.get_total_norm(self.grads())
            self.reduce()
        nn.utils.clip_grads_with_norm_(self.model.parameters(), 0.1, norm)
        self.optimizer.step()  # finds: unequal-parameters on all
        return norm.item()


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.cuda.manual_seed(42)
    with torch.device("cuda"):
        model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2))
    trainer = Trainer(model, fixed="--fixed" in sys.argv)
    torch.cuda.manual_seed(43 + dist.get_rank())
    for step in range(3):
        batch = torch.randn(4, 6, device="cuda"), 3 * torch.randn(4, 2, device="cuda")
        norm = trainer.step(batch)
        if dist.get_rank() == 0:
            print(f"step {step}: norm {norm:.4f}")
    dist.destroy_process_group()


main()
