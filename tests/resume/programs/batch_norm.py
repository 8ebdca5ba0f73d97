"""DDP of a model with batch normalization, whose running statistics are those of each rank.

Each rank saves its buffers. With `--broadcast 1` DDP sends rank 0's before each forward pass, and
rank 0's alone are saved.
"""

from __future__ import annotations

import common
import torch
import torch.distributed as dist
from common import GLOBAL_BATCH, WIDTH, wrong
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# Rank 0 saves the model, as with DDP's default, but buffers are not sent.
BUGS = ("statistics-of-rank-0",)


def main() -> None:
    options = common.options(*BUGS, samples=48, broadcast=0)
    rank, _ = common.start()
    model = DistributedDataParallel(
        nn.Sequential(
            nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, common.CLASSES)
        ),
        broadcast_buffers=bool(options.broadcast),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    own = not options.broadcast and not wrong("statistics-of-rank-0")
    step = 0
    if path := common.newest(options.checkpoint):
        state = torch.load(path / f"state-{rank if own else 0}.pt")
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    for x, y, index in common.consumed_loader(options.samples, step * GLOBAL_BATCH):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        # Running statistics act in evaluation alone.
        statistics = common.digest([model.module[1].running_mean, model.module[1].running_var])
        own_report = {} if options.broadcast and rank else {"statistics": statistics}
        common.report(step, index, loss, **own_report)
        if step % options.save_every == 0:
            path = common.begin(options.checkpoint, step)
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            if rank == 0 or own:
                torch.save({**state, "step": step}, path / f"state-{rank}.pt")
            common.finish(path)
        if step == options.steps:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
