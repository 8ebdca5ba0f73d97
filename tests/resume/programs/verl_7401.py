"""DDP with a loader that keeps its state, over epochs; checkpoints at the ends of epochs too."""

from __future__ import annotations

from typing import Any

import common
import torch
import torch.distributed as dist
from common import GLOBAL_BATCH, wrong
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

# https://github.com/verl-project/verl/issues/7401: at an epoch's end the loader's state is 'all
# read', and the epoch to begin is the next. After a restart it finds all read, and ends.
BUGS = ("finished-loader",)


class Loader:
    """A DataLoader that goes on at the batch where it was."""

    def __init__(self, data: common.Samples) -> None:
        self.sampler = DistributedSampler(data, seed=5, drop_last=True)
        size = GLOBAL_BATCH // dist.get_world_size()
        self.loader = DataLoader(data, size, sampler=self.sampler, drop_last=True)
        self.read, self.first = 0, 0

    def __iter__(self):
        first, self.first = self.first, 0
        self.read = first
        for number, batch in enumerate(self.loader):
            if number < first:
                continue
            self.read = number + 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.first = state["read"]
        if self.first == len(self.loader) and not wrong("finished-loader"):
            self.first = 0


def main() -> None:
    options = common.options(*BUGS, samples=24, epochs=4, save_every=3)
    rank, _ = common.start()
    model = DistributedDataParallel(common.network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = Loader(common.Samples(options.samples))
    step = 0
    if path := common.newest(options.checkpoint):
        state = torch.load(path / "state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
        loader.load_state_dict(state["loader"])
    per_epoch = len(loader.loader)
    for epoch in range(step // per_epoch, options.epochs):
        loader.sampler.set_epoch(epoch)
        for x, y, index in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            common.report(step, index, loss)
            if step % options.save_every == 0:
                path = common.begin(options.checkpoint, step)
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                state |= {"step": step, "loader": loader.state_dict()}
                if rank == 0:
                    torch.save(state, path / "state.pt")
                common.finish(path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
