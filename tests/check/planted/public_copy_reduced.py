# run: --ranks 2 --check=nccl --device cpu
"""pytorch/pytorch#102435: the all-reduce is given the copy that .cuda() makes, and the loss on the
host stays that of the rank."""

import argparse
import os

import torch
import torch.distributed as dist


class EpochLoss:
    def __init__(self):
        self.total = torch.zeros(1)
        self.batches = 0

    def update(self, loss):
        self.total += loss.detach().cpu()
        self.batches += 1

    def reduce(self, fixed):
        mean = self.total / self.batches
        if fixed:
            on_gpu = mean.cuda()
            dist.all_reduce(on_gpu, op=dist.ReduceOp.AVG)
            mean = on_gpu.cpu()
        else:
            dist.all_reduce(mean.cuda(), op=dist.ReduceOp.AVG)  # finds: result-unread on all
        return mean.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.cuda.manual_seed(0)
    model = torch.nn.Linear(4, 1, device="cuda").requires_grad_(False)
    torch.cuda.manual_seed(1 + dist.get_rank())
    losses = EpochLoss()
    for _ in range(3):
        losses.update(model(torch.randn(8, 4, device="cuda")).square().mean())
    print(f"rank {dist.get_rank()}: validation loss {losses.reduce(args.fixed):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
