"""Tensor parallel layers as DTensors, saved by DCP, on any number of ranks."""

from __future__ import annotations

from typing import Any

import common
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import GLOBAL_BATCH, wrong
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader

BUGS = (
    # The local tensors are saved under names that all ranks share: DCP keeps one rank's, as of the
    # loader in https://github.com/pytorch/torchtitan/issues/291 ('only rank 0's value is saved').
    "local-tensors",
)


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    if wrong("local-tensors"):
        model_state = {
            name: value.to_local() if isinstance(value, DTensor) else value
            for name, value in model_state.items()
        }
    return {"model": model_state, "optimizer": optimizer_state, "step": 0}


def main() -> None:
    options = common.options(*BUGS, samples=48)
    _, ranks = common.start()
    mesh = init_device_mesh("cpu", (ranks,))
    model = parallelize_module(
        common.network(), mesh, {"0": ColwiseParallel(), "3": RowwiseParallel()}
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = 0
    if path := common.newest(options.checkpoint):
        state = states(model, optimizer)
        dcp.load(state, checkpoint_id=path)
        if not wrong("local-tensors"):  # there, they are the model's own storage
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
        step = state["step"]
    # All ranks read the same batches.
    sampler = common.Consumed(options.samples, step * GLOBAL_BATCH, 0, 1)
    for x, y, index in DataLoader(common.Samples(options.samples), batch_sampler=sampler):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        common.report(step, index, loss)
        if step % options.save_every == 0:
            path = common.begin(options.checkpoint, step)
            dcp.save({**states(model, optimizer), "step": step}, checkpoint_id=path)
            common.finish(path)
        if step == options.steps:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
