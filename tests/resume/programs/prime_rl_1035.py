"""FSDP2 and DCP with a loader whose position each rank counts for itself, as samples are packed.

A rank packs samples until their lengths fill a micro batch, so ranks advance at different speed.
"""

from __future__ import annotations

from typing import Any

import common
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import wrong
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset

# https://github.com/PrimeIntellect-ai/prime-rl/pull/1035: the loader's state of each rank is put
# under one key of DCP's state. DCP keeps one value of what is not a DTensor, so that all ranks load
# that of one rank: the others read samples again, or never. The fix: a file for each rank.
BUGS = ("one-key",)
TOKENS = 10


class Packed(IterableDataset):
    """Batches of the samples rank, rank + ranks, ... until TOKENS are reached."""

    def __init__(self, data: common.Samples, rank: int, ranks: int) -> None:
        self.data, self.rank, self.ranks, self.step = data, rank, ranks, 0

    def __iter__(self):
        while True:
            packed: list[int] = []
            length = 0
            while length < TOKENS:
                index = (self.step * self.ranks + self.rank) % len(self.data)
                packed.append(index)
                length += 1 + index % 4
                self.step += 1
            yield self.data.x[packed], self.data.y[packed], packed

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def main() -> None:
    options = common.options(*BUGS, samples=400)
    rank, ranks = common.start()
    model = common.network()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = Packed(common.Samples(options.samples), rank, ranks)
    step = 0
    if path := common.newest(options.checkpoint):
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state, "step": 0}
        if wrong("one-key"):
            state["loader"] = data.state_dict()
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        step = state["step"]
        data.load_state_dict(state.get("loader") or torch.load(path / f"loader-{rank}.pt"))
    for x, y, index in DataLoader(data, batch_size=None):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        common.report(step, index, loss)
        if step % options.save_every == 0:
            path = common.begin(options.checkpoint, step)
            model_state, optimizer_state = get_state_dict(model, optimizer)
            state = {"model": model_state, "optimizer": optimizer_state, "step": step}
            if wrong("one-key"):
                state["loader"] = data.state_dict()
            else:
                torch.save(data.state_dict(), path / f"loader-{rank}.pt")
            dcp.save(state, checkpoint_id=path)
            common.finish(path)
        if step == options.steps:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
