"""FSDP1 with a full state of model and optimizer, which rank 0 writes.

`--original 1` keeps the original parameters.
"""

from __future__ import annotations

import warnings

import common
import torch
import torch.distributed as dist
from common import GLOBAL_BATCH, wrong
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)

BUGS = (
    # The optimizer's own state is that of this rank's shard of the flat parameter. Rank 0 saves it,
    # and all ranks load it: the shards have one shape, so nothing fails.
    "shard-of-rank-0",
    # Each rank's own state in a file of its own; at fewer ranks the shapes differ, an honest error.
    "flat-shards",
    # https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/3832: Adam's count of steps is lost.
    "steps-of-adam-lost",
)


def main() -> None:
    options = common.options(*BUGS, samples=48, original=0)
    warnings.filterwarnings("ignore", category=FutureWarning)
    rank, _ = common.start()
    model = FullyShardedDataParallel(
        common.network(),
        use_orig_params=bool(options.original),
        device_id=torch.device("cpu"),
    )
    FullyShardedDataParallel.set_state_dict_type(
        model,
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(),
        FullOptimStateDictConfig(),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    own = wrong("shard-of-rank-0") or wrong("flat-shards")
    step = 0
    if path := common.newest(options.checkpoint):
        state = torch.load(path / "state.pt")
        model.load_state_dict(state["model"])
        if own:
            owner = rank if wrong("flat-shards") else 0
            optimizer.load_state_dict(torch.load(path / f"optimizer-{owner}.pt"))
        else:
            found = FullyShardedDataParallel.optim_state_dict_to_load(
                model, optimizer, state["optimizer"]
            )
            optimizer.load_state_dict(found)
        if wrong("steps-of-adam-lost"):
            for values in optimizer.state.values():
                values["step"].zero_()
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
            state = {"model": model.state_dict(), "step": step}
            if own:
                torch.save(optimizer.state_dict(), path / f"optimizer-{rank}.pt")
            else:
                state["optimizer"] = FullyShardedDataParallel.optim_state_dict(model, optimizer)
            if rank == 0:
                torch.save(state, path / "state.pt")
            common.finish(path)
        if step == options.steps:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
