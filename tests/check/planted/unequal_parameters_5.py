# run: --ranks 3 --check=gloo
"""A guard against spikes of the loss leaves out the update; each rank decides by the loss of its
own batch."""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class SpikeGuard:
    def __init__(self, factor, fixed):
        self.factor = factor
        self.fixed = fixed
        self.average = None

    def skips(self, loss):
        loss = loss.detach().clone()
        if self.fixed:
            dist.all_reduce(loss, op=dist.ReduceOp.MAX)
        value = loss.item()
        spike = self.average is not None and value > self.factor * self.average
        if not spike:
            self.average = value if self.average is None else 0.9 * self.average + 0.1 * value
        return spike


def batches(rank, steps):
    generator = torch.Generator().manual_seed(rank)
    for step in range(steps):
        x = torch.randn(16, 10, generator=generator)
        y = x[:, :1] - x[:, 1:2]
        if rank == 2 and step == 2:
            y = y * 40  # an outlier, as data has them
        yield x, y


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(10, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
guard = SpikeGuard(factor=5.0, fixed="--fixed" in sys.argv)
for step, (x, y) in enumerate(batches(dist.get_rank(), 5)):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    if guard.skips(loss):
        print(f"step {step}: loss {loss.item():.1f}, update left out")
        continue
    optimizer.step()  # finds: unequal-parameters on 2
dist.destroy_process_group()
