# run: --ranks 2 --check=nccl --device cpu
"""Attention whose heads are split over two ranks, with dropout of the attention's weights; both
ranks draw the same bits for their heads."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distnn
import torch.nn as nn
import torch.nn.functional as F


class ParallelAttention(nn.Module):
    def __init__(self, width, heads, dropout):
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        self.heads, self.dropout = heads // size, dropout
        qkv = torch.randn(size, 3 * width // size, width, device="cuda") / 4
        out = torch.randn(size, width, width // size, device="cuda") / 4
        self.qkv = nn.Parameter(qkv[rank].clone())
        self.out = nn.Parameter(out[rank].clone())

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = (x @ self.qkv.t()).view(batch, length, 3, self.heads, -1).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=p)  # finds: same-random-bits on all
        y = y.transpose(1, 2).flatten(2) @ self.out.t()
        return distnn.all_reduce(y)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl")
    torch.cuda.manual_seed(args.seed)
    attention = ParallelAttention(width=16, heads=4, dropout=0.3)
    x = torch.randn(2, 6, 16, device="cuda")
    if args.fixed:
        torch.cuda.manual_seed(args.seed + local_rank)
    for _ in range(2):
        y = attention(x)
        y.square().mean().backward()
        x = y.detach()
    if local_rank == 0:
        print(f"norm {x.norm().item():.4f}")
    dist.destroy_process_group()


main()
