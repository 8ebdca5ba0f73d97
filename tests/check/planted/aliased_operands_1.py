# run: --ranks 3 --check=gloo
"""Predictions are gathered into a list that holds one and the same tensor three times."""

import sys

import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv


def gather_predictions(predictions):
    world = dist.get_world_size()
    if FIXED:
        gathered = [torch.zeros_like(predictions) for _ in range(world)]
    else:
        gathered = [torch.zeros_like(predictions)] * world
    dist.all_gather(gathered, predictions)  # finds: aliased-operands on all
    return torch.cat(gathered)


dist.init_process_group("gloo")
rank = dist.get_rank()
scores = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))
predictions = gather_predictions(scores.argmax(-1))
counts = torch.bincount(predictions, minlength=3)
print("predictions by class", counts.tolist())
dist.destroy_process_group()
