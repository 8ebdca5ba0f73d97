"""DDP with ZeroRedundancyOptimizer, which is consolidated on rank 0 to be saved."""

from __future__ import annotations

import common
import torch
import torch.distributed as dist
from common import GLOBAL_BATCH, wrong
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

BUGS = (
    # The part of rank 0 is saved, and loaded into that of each rank: layers of one shape.
    "part-of-rank-0",
    # Rank 0 alone loads the state; the others begin afresh.
    "loaded-by-rank-0",
)


def main() -> None:
    options = common.options(*BUGS, samples=48)
    rank, _ = common.start()
    layers = [nn.Linear(common.WIDTH, common.WIDTH, bias=False) for _ in range(4)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=1e-2)
    step = 0
    if path := common.newest(options.checkpoint):
        state = torch.load(path / "state.pt")
        model.load_state_dict(state["model"])
        if wrong("part-of-rank-0"):
            optimizer.optim.load_state_dict(state["optimizer"])
        elif rank == 0 or not wrong("loaded-by-rank-0"):
            optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    for x, y, index in common.consumed_loader(options.samples, step * GLOBAL_BATCH):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        common.report(step, index, loss)
        if step % options.save_every == 0:
            path = common.begin(options.checkpoint, step)
            if not wrong("part-of-rank-0"):
                optimizer.consolidate_state_dict(to=0)
            if rank == 0:
                own = optimizer.optim if wrong("part-of-rank-0") else optimizer
                state = {"model": model.state_dict(), "optimizer": own.state_dict(), "step": step}
                torch.save(state, path / "state.pt")
            common.finish(path)
        if step == options.steps:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
