# run: --ranks 4 --check=nccl --device cpu
"""Hand-made data parallel that reduces flat gradients on a communication stream, which does not
wait for the stream that has computed them."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


class GradientReducer:
    def __init__(self, parameters, wait):
        self.parameters = list(parameters)
        self.stream = torch.cuda.Stream()
        self.wait = wait

    def reduce(self):
        grads = [p.grad for p in self.parameters]
        flat = _flatten_dense_tensors(grads)  # or here
        if self.wait:
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            dist.all_reduce(flat, op=dist.ReduceOp.AVG)  # finds: stream-race on all
        return grads, flat

    def finish(self, grads, flat):
        torch.cuda.current_stream().wait_stream(self.stream)
        for grad, reduced in zip(grads, _unflatten_dense_tensors(flat, grads), strict=True):
            grad.copy_(reduced)


def main():
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reducer = GradientReducer(model.parameters(), wait="--fixed" in sys.argv)
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(3):
        x, y = torch.randn(8, 16, device="cuda"), torch.randn(8, 4, device="cuda")
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        reducer.finish(*reducer.reduce())
        optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
