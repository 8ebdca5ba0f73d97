# run: --ranks 3 --check=gloo
"""An embedding that is split by vocabulary, summed over ranks and dropped out. Weights come from
rank 0; the generators of dropout are seeded nowhere."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn

VOCABULARY, WIDTH = 30, 8


class VocabularyParallelEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        weight = torch.randn(VOCABULARY, WIDTH)
        dist.broadcast(weight, src=0)
        self.first = rank * VOCABULARY // size
        self.last = (rank + 1) * VOCABULARY // size
        self.weight = nn.Parameter(weight[self.first : self.last].clone())
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens):
        elsewhere = (tokens < self.first) | (tokens >= self.last)
        local = (tokens - self.first).masked_fill(elsewhere, 0)
        embedded = nn.functional.embedding(local, self.weight)
        embedded = embedded.masked_fill(elsewhere[..., None], 0.0)
        total = embedded.detach().clone()
        work = dist.all_reduce(total, async_op=True)
        work.wait()
        embedded = embedded + (total - embedded.detach())
        return self.dropout(embedded)  # finds: other-random-bits on all


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    if args.fixed:
        torch.manual_seed(0)
    embedding = VocabularyParallelEmbedding()
    tokens = torch.arange(24).view(3, 8)
    y = embedding(tokens)
    y.sum().backward()
    print(f"sum {y.sum().item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
