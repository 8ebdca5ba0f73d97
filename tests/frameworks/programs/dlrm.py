"""A recommendation model in the manner of DLRM: tables on their ranks, all-to-all, dense DDP."""

import digest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.nn.functional import all_to_all_single
from torch.nn.parallel import DistributedDataParallel

ROWS, WIDTH, BATCH = 50, 8, 6


class Interaction(nn.Module):
    """Products of all pairs of embeddings and the dense features, and two layers."""

    def __init__(self, tables: int) -> None:
        super().__init__()
        self.bottom = nn.Linear(5, WIDTH)
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(WIDTH + pairs, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        x = self.bottom(dense).relu()
        features = torch.cat([x[:, None], sparse], 1)
        products = features @ features.mT
        below = torch.tril_indices(features.shape[1], features.shape[1], -1)
        return self.top(torch.cat([x, products[:, below[0], below[1]]], 1)).squeeze(1)


def exchange(mine: Tensor, tables: list[int], rank: int) -> Tensor:
    """Turn (ranks * BATCH, own tables, WIDTH) into (BATCH, all tables, WIDTH): columns to rows."""
    ranks = len(tables)
    sent = [BATCH * tables[rank] * WIDTH] * ranks
    received = [BATCH * count * WIDTH for count in tables]
    flat = mine.new_empty(sum(received))
    flat = all_to_all_single(flat, mine.flatten(), received, sent)
    parts = flat.split(received)
    return torch.cat(
        [part.view(BATCH, count, WIDTH) for part, count in zip(parts, tables, strict=True)], 1
    )


def main() -> None:
    digest.watch()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    count = max(8, ranks)
    tables = [count * (n + 1) // ranks - count * n // ranks for n in range(ranks)]
    torch.manual_seed(0)
    bags = [nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True) for _ in range(count)]
    first = sum(tables[:rank])
    own = nn.ModuleList(bags[first : first + tables[rank]])
    model = DistributedDataParallel(Interaction(count))
    dense_optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2)
    sparse_optimizer = torch.optim.Adagrad(own.parameters(), lr=1e-2)
    for step in range(10):
        generator = torch.Generator().manual_seed(step)
        dense = torch.randn(ranks * BATCH, 5, generator=generator)
        sparse = torch.randint(ROWS, (count, ranks * BATCH, 3), generator=generator)
        clicks = (dense.sum(1) > 0).float()
        here = slice(rank * BATCH, (rank + 1) * BATCH)
        columns = [bag(sparse[first + n]) for n, bag in enumerate(own)]
        rows = exchange(torch.stack(columns, 1), tables, rank)
        loss = nn.functional.binary_cross_entropy_with_logits(
            model(dense[here], rows), clicks[here]
        )
        loss.backward()
        for optimizer in (dense_optimizer, sparse_optimizer):
            optimizer.step()
            optimizer.zero_grad()
    digest.say("loss", loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
