"""FSDP2 and DCP with the loader's state under a key of each rank, as torchtitan keeps it.

A checkpoint of another number of ranks ends with an error (the fix of PR 816).
"""

from __future__ import annotations

from typing import Any

import common
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import GLOBAL_BATCH, wrong
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset

BUGS = (
    # https://github.com/pytorch/torchtitan/issues/811 and pull/816: saved by 4 ranks and loaded by
    # 2, dp_rank_2 and dp_rank_3 are dropped in silence. More ranks than saved end with an error.
    "dp-rank-keys",
)


class Stream(IterableDataset):
    """The samples of this rank, split by node, without shuffling."""

    def __init__(self, data: common.Samples, rank: int, ranks: int) -> None:
        self.data, self.rank, self.ranks, self.read = data, rank, ranks, 0

    def __iter__(self):
        own = range(self.rank, len(self.data), self.ranks)
        while True:
            index = own[self.read % len(own)]
            self.read += 1
            yield self.data[index]


class Loader:
    """A loader of which DCP saves the state of each rank."""

    def __init__(self, data: Stream) -> None:
        self.data = data
        self.loader = DataLoader(data, GLOBAL_BATCH // data.ranks)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {f"dp_rank_{self.data.rank}": self.data.read}
        if not wrong("dp-rank-keys"):
            state["world_size"] = self.data.ranks
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not wrong("dp-rank-keys") and state["world_size"] != self.data.ranks:
            raise RuntimeError("the loader's state is of another number of ranks")
        self.data.read = state[f"dp_rank_{self.data.rank}"]


class Trained:
    """Model and optimizer, as DCP's Stateful."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])


def main() -> None:
    options = common.options(*BUGS, samples=120)
    rank, ranks = common.start()
    model = common.network()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = Loader(Stream(common.Samples(options.samples), rank, ranks))
    progress = {"step": torch.zeros((), dtype=torch.int64)}
    state = {"trained": Trained(model, optimizer), "loader": loader, "progress": progress}
    if path := common.newest(options.checkpoint):
        dcp.load(state, checkpoint_id=path)
    step = int(progress["step"])
    for x, y, index in loader.loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        common.report(step, index, loss)
        if step % options.save_every == 0:
            progress["step"].fill_(step)
            path = common.begin(options.checkpoint, step)
            dcp.save(state, checkpoint_id=path)
            common.finish(path)
        if step == options.steps:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
