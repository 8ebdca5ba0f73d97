# run: --ranks 2 --check
"""A distributed transpose: blocks are exchanged by all_to_all into the blocks that are sent."""

import sys

import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv


def transpose(x, world):
    """Rows r of the matrix are those of rank r, before and after."""
    blocks = [block.t().contiguous() for block in x.chunk(world, dim=1)]
    received = [torch.empty_like(block) for block in blocks] if FIXED else blocks
    dist.all_to_all(received, blocks)  # finds: aliased-operands on all
    return torch.cat(received, dim=1)


def fft2(x, world):
    columns = transpose(torch.view_as_real(torch.fft.fft(x, dim=1)).sum(-1), world)
    return torch.fft.fft(columns, dim=1).abs()


dist.init_process_group()
rank, world = dist.get_rank(), dist.get_world_size()
x = torch.randn(4, 4 * world, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
print("spectrum", fft2(x, world).sum().item())
dist.destroy_process_group()
