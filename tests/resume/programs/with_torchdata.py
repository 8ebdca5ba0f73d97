"""torchdata's StatefulDataLoader of each rank, whose state is saved beside FSDP2's by DCP."""

from __future__ import annotations

from typing import Any

import common
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import GLOBAL_BATCH, wrong
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

BUGS = (
    # https://github.com/pytorch/torchtitan/issues/291: the loader's state is not saved at all.
    "loader-not-saved",
    # https://github.com/huggingface/accelerate/issues/4195: the position is restored, and the
    # epoch's order is not, as set_epoch is not called before the loader is read.
    "order-not-restored",
)


def main() -> None:
    options = common.options(*BUGS, samples=24)
    rank, ranks = common.start()
    model = common.network()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = common.Samples(options.samples)
    sampler = DistributedSampler(data, ranks, rank, seed=3, drop_last=True)
    loader = StatefulDataLoader(data, GLOBAL_BATCH // ranks, sampler=sampler, drop_last=True)
    step, epoch = 0, 0
    if path := common.newest(options.checkpoint):
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": model_state, "optimizer": optimizer_state}
        state |= {"step": 0, "epoch": 0}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        step, epoch = state["step"], state["epoch"]
        if not wrong("loader-not-saved"):
            loader.load_state_dict(torch.load(path / f"loader-{rank}.pt", weights_only=False))
    resumed = step
    while step < options.steps:
        if not (wrong("order-not-restored") and resumed == step > 0):
            sampler.set_epoch(epoch)
        for x, y, index in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            common.report(step, index, loss)
            if step % options.save_every == 0:
                path = common.begin(options.checkpoint, step)
                model_state, optimizer_state = get_state_dict(model, optimizer)
                state = {"model": model_state, "optimizer": optimizer_state}
                dcp.save({**state, "step": step, "epoch": epoch}, checkpoint_id=path)
                torch.save(loader.state_dict(), path / f"loader-{rank}.pt")
                common.finish(path)
            if step == options.steps:
                break
        epoch += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
