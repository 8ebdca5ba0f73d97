# run: --ranks 2 --check=gloo
"""Evaluation adds up hits and examples over ranks in a tensor that nobody reads; the accuracy that
is printed is that of one rank's shard."""

import argparse

import torch
import torch.distributed as dist
import torch.nn as nn


@torch.no_grad()
def evaluate(model, x, y, args):
    model.eval()
    correct, seen = 0, 0
    for inputs, labels in zip(x.split(5), y.split(5), strict=True):
        predicted = model(inputs).argmax(1)
        correct += (predicted == labels).sum().item()
        seen += labels.numel()
    counts = torch.tensor([correct, seen])
    dist.all_reduce(counts)  # finds: result-unread on all
    if args.fixed:
        correct, seen = counts.tolist()
    return correct / seen


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--fixed", action="store_true")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(20, 4, generator=generator)
    y = torch.randint(3, (20,), generator=generator)
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    accuracy = evaluate(model, x, y, args)
    if dist.get_rank() == 0:
        print(f"accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
