"""FSDP2 with bfloat16 gradients: how wrong the gradient is, by the number of ranks and the order.

A ring that rounds to bfloat16 at each hop loses more the more ranks there are. A float32
accumulator does not. Each point is FSDP2 itself, on simulated ranks.

    python examples/fsdp2_reduction.py --ranks 4 16 64 --picture fsdp2.png
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from gpusim import Reduction, figures
from gpusim.tools.tables import print_table
from gpusim.torch.distributed import launch

ROUNDED, WIDE = "bfloat16", "float32"
REDUCTIONS = {
    "ring, rounded to bfloat16 at each hop": Reduction(order="ring", accumulate=ROUNDED),
    "tree, rounded to bfloat16 at each level": Reduction(order="tree", accumulate=ROUNDED),
    "ring, float32 accumulator": Reduction(order="ring", accumulate=WIDE),
}
EXACT = Reduction(accumulate="float64")


def gradient(rank: int, width: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """The weight's gradient after one backward pass; each rank has eight samples of its own."""
    dist.init_process_group("nccl")
    weights = torch.Generator().manual_seed(seed)
    model = nn.Linear(width, width, bias=False)
    with torch.no_grad():
        model.weight.copy_(0.1 * torch.randn(width, width, generator=weights))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
    samples = torch.Generator().manual_seed(1_000_003 * (seed + 1) + rank)
    x = torch.randn(8, width, generator=samples)
    target = x.roll(1, 1) + 0.5 * torch.randn(8, width, generator=samples)
    (model(x) - target).square().mean().backward()
    assert isinstance(model.weight.grad, DTensor)
    return model.weight.grad.full_tensor().double()


def errors(ranks: int, width: int, seeds: int) -> dict[str, float]:
    """The relative error of the gradient (2-norm) for each reduction, as the mean over seeds."""
    found = dict.fromkeys(REDUCTIONS, 0.0)
    for seed in range(seeds):
        exact = launch(gradient, ranks, (width, seed, torch.float32), reduction=EXACT)[0]
        for name, reduction in REDUCTIONS.items():
            low = launch(gradient, ranks, (width, seed, torch.bfloat16), reduction=reduction)[0]
            found[name] += ((low - exact).norm() / exact.norm()).item() / seeds
    return found


def draw(path: str, ranks: Sequence[int], found: Sequence[dict[str, float]]) -> None:
    """A line for each reduction."""
    with figures.figure(path, width=6, height=2.8) as axes:
        for colour, name in zip(
            figures.COLOURS[1::-1] + figures.COLOURS[2:], REDUCTIONS, strict=False
        ):
            axes.plot(ranks, [each[name] for each in found], "o-", color=colour, label=name)
        axes.set_title("FSDP2, reduce_dtype=bfloat16: error of the gradient")
        axes.set_xlabel("ranks")
        axes.set_ylabel("relative error (2-norm)")
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, [str(number) for number in ranks])
        axes.minorticks_off()
        axes.set_ylim(0)
        axes.grid(True, axis="y")
        axes.legend(frameon=False)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--width", type=int, default=64, help="of the layer")
    parser.add_argument("--seeds", type=int, default=1, help="runs whose mean is taken")
    parser.add_argument("--picture", help="a file to draw, such as errors.png")
    options = parser.parse_args(arguments)

    found = [errors(ranks, options.width, options.seeds) for ranks in options.ranks]
    cells = [[name, *(f"{each[name]:.1e}" for each in found)] for name in REDUCTIONS]
    headings = ["bfloat16 gradients, summed", *(f"{ranks} ranks" for ranks in options.ranks)]
    print_table("FSDP2: relative error of the gradient", headings, cells, left=headings[:1])
    if options.picture:
        draw(options.picture, options.ranks, found)
    ring, _, wide = REDUCTIONS
    rounded = [each[ring] for each in found]
    flat = [each[wide] for each in found]
    assert rounded == sorted(rounded) and max(flat) < 1.2 * flat[0]
    print("agreed: the ring's error grows with the ranks, that of a float32 accumulator does not")


if __name__ == "__main__":
    main()
