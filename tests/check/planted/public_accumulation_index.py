# run: --ranks 2 --check
"""modelscope/FunASR#3472: no_sync is decided by another index than the step, so that the first
micro-batch of a window is reduced and the last is not."""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel


class Trainer:
    def __init__(self, model, accum_grad, fixed):
        self.model = DistributedDataParallel(model)
        self.accum_grad = accum_grad
        self.offset = 1 if fixed else 0
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def context(self, batch_index):
        if (batch_index + self.offset) % self.accum_grad == 0:
            return nullcontext()
        return self.model.no_sync()

    def train_epoch(self, loader):
        for batch_index, (features, labels) in enumerate(loader):
            with self.context(batch_index):
                loss = nn.functional.cross_entropy(self.model(features), labels)
                (loss / self.accum_grad).backward()
            if (batch_index + 1) % self.accum_grad == 0:
                self.optimizer.step()  # finds: gradient-not-reduced on all
                self.optimizer.zero_grad()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(dist.get_rank())
    loader = [
        (torch.randn(5, 6, generator=generator), torch.randint(3, (5,), generator=generator))
        for _ in range(8)
    ]
    Trainer(nn.Linear(6, 3), accum_grad=4, fixed=args.fixed).train_epoch(loader)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
