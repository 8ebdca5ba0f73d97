# run: --ranks 2 --check
"""DDP with init_sync=False, to start faster, on a model that is not seeded and comes from no
checkpoint."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel


class Classifier(nn.Module):
    def __init__(self, vocabulary, width, classes):
        super().__init__()
        self.embedding = nn.EmbeddingBag(vocabulary, width)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--fixed", action="store_true")
    return parser.parse_args()


def main():
    args = parse()
    dist.init_process_group("gloo")
    model = Classifier(50, 6, 4)
    model = DistributedDataParallel(model, init_sync=args.fixed)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.steps)
    for _ in range(args.steps):
        tokens, labels = torch.randint(50, (8, 5)), torch.randint(4, (8,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens), labels)
        loss.backward()
        optimizer.step()  # finds: unseeded-difference on all
        scheduler.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
