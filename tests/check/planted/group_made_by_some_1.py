# run: --ranks 4 --check
"""Only the ranks that will evaluate make the group for evaluation."""

import sys

import torch
import torch.distributed as dist

FIXED = "--fixed" in sys.argv
EVALUATORS = [0, 1]

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
group = None
if rank in EVALUATORS or FIXED:
    group = dist.new_group(EVALUATORS)  # finds: group-made-by-some on 0, 1

scores = torch.randn(20, generator=torch.Generator().manual_seed(rank))
if rank in EVALUATORS:
    correct = (scores > 0).sum()
    dist.all_reduce(correct, group=group)
    print("accuracy", correct.item() / (20 * len(EVALUATORS)))
steps = torch.tensor(rank)
dist.all_reduce(steps)
print("steps", steps.item())
dist.destroy_process_group()
