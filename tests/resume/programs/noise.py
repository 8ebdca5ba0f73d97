"""DDP of a denoiser: noise from a generator of its own, dropout from torch's, choices from NumPy's.

The generators are those of each rank. With `--dropout 0` the noise follows from the samples, so
that any number of ranks may resume.
"""

from __future__ import annotations

import common
import numpy as np
import torch
import torch.distributed as dist
from common import GLOBAL_BATCH, WIDTH, wrong
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BUGS = (
    # https://github.com/ByteDance-Seed/VeOmni/pull/1189: only torch's default generator is
    # restored; that of the noise is made anew, and replays the noise from the start.
    "generator-seeded-again",
    # https://github.com/modelscope/ms-swift/pull/9935: the states are restored, and a loader of
    # resampling, built later, seeds the generators with the initial seed.
    "seeded-by-loader",
)


def main() -> None:
    options = common.options(*BUGS, samples=48, dropout=0.2)
    rank, _ = common.start()
    model = DistributedDataParallel(
        nn.Sequential(
            nn.Linear(WIDTH, 16), nn.Tanh(), nn.Dropout(options.dropout), nn.Linear(16, WIDTH)
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1000 + rank)
    step = 0
    if path := common.newest(options.checkpoint):
        state = torch.load(path / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    batches = common.consumed_loader(options.samples, step * GLOBAL_BATCH)
    if path and options.dropout:
        states = torch.load(path / f"random-{rank}.pt")
        common.set_random_states(states)
        if not wrong("generator-seeded-again"):
            generator.set_state(states["noise"])
        if wrong("seeded-by-loader"):
            torch.manual_seed(0)
            np.random.seed(0)  # noqa: NPY002
    for number, (x, _, index) in enumerate(batches):
        if number == 0 and path and options.dropout and not wrong("seeded-by-loader"):
            common.set_random_states(states)  # the loader draws a seed as it begins
        if options.dropout:
            noise = torch.randn(x.shape, generator=generator)
            noise *= float(np.random.choice([0.5, 1.0]))  # noqa: NPY002
        else:
            seeds = [torch.Generator().manual_seed(int(i) + 1000 * step) for i in index]
            noise = torch.stack([torch.randn(WIDTH, generator=own) for own in seeds])
        loss = nn.functional.mse_loss(model(x + noise), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        common.report(step, index, loss)
        if step % options.save_every == 0:
            path = common.begin(options.checkpoint, step)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            if rank == 0:
                torch.save(state, path / "state.pt")
            own = {**common.random_states(), "noise": generator.get_state()}
            torch.save(own, path / f"random-{rank}.pt")
            common.finish(path)
        if step == options.steps:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
