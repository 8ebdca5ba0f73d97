"""A Triton kernel of one's own under DDP, which Triton interprets on the host."""

import os

os.environ["TRITON_INTERPRET"] = "1"

from typing import Any

import digest
import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


@triton.autotune(configs=[triton.Config({"BLOCK": size}) for size in (64, 128)], key=["count"])
@triton.jit
def scaled_square(x_ptr: Any, y_ptr: Any, scale: Any, count: Any, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count)
    tl.store(y_ptr + at, x * x * scale, mask=at < count)


class ScaledSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.scale = scale
        y = torch.empty_like(x)
        count = x.numel()
        scaled_square[lambda meta: (triton.cdiv(count, meta["BLOCK"]),)](x, y, scale, count)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradients[0] * 2 * ctx.scale * x, None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 24), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(ScaledSquare.apply(self.first(x), 0.5))


def main() -> None:
    digest.watch()
    dist.init_process_group("nccl")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    torch.manual_seed(0)
    model = DistributedDataParallel(Model().cuda(), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    losses = []
    for step in range(10):
        x = (
            torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
            .chunk(ranks)[rank]
            .cuda()
        )
        loss = (model(x).squeeze(1) - x.sum(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean / ranks)
    digest.say("losses", losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
