# run: --ranks 4 --check=gloo
"""ecmwf/anemoi-core#595: all ranks of a model group have one seed, so that dropout loses the same
places in each rank's part of the grid."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as distnn
import torch.nn as nn


class GridProcessor(nn.Module):
    """Each rank has a part of the points; the mean over all of them is exchanged."""

    def __init__(self, channels, group, p=0.15):
        super().__init__()
        self.group = group
        self.encode = nn.Linear(channels, channels)
        self.mix = nn.Linear(2 * channels, channels)
        self.dropout = nn.Dropout(p)

    def forward(self, points):
        hidden = self.dropout(torch.tanh(self.encode(points)))  # finds: same-random-bits on all
        total = distnn.all_reduce(hidden.sum(0), group=self.group)
        mean = total / (len(points) * dist.get_world_size(self.group))
        return points + self.mix(torch.cat([hidden, mean.expand_as(hidden)], dim=-1))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    number, place = divmod(rank, 2)
    base_seed = torch.tensor(900 + number)
    torch.manual_seed(900)
    model = GridProcessor(5, model_groups[number])
    grid = torch.randn(24, 5, generator=torch.Generator().manual_seed(number))
    seed = base_seed.item()
    if "--fixed" in sys.argv:
        seed = 1000 * seed + place
    torch.manual_seed(seed)
    y = model(grid.chunk(2)[place])
    y.square().mean().backward()
    print(f"rank {rank}: norm {y.norm().item():.4f}")
    dist.destroy_process_group()


main()
