"""FSDP2 and DCP with a scheduler, clipping and consumed samples, on any number of ranks."""

from __future__ import annotations

from typing import Any

import common
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import GLOBAL_BATCH, wrong
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

BUGS = (
    # https://github.com/KempnerInstitute/KempnerForge/pull/115: the optimizer's own state_dict is
    # empty before its first step, so that dcp.load fills none of its moments.
    "raw-optimizer-state",
    # A copy of the state (here, off to the CPU) is loaded, and not set back.
    "not-set-back",
    # The weights are saved in bfloat16, without the float32 masters.
    "weights-in-bfloat16",
    # https://github.com/pytorch/torchtitan/pull/4598: the scheduler is restored, and the learning
    # rates in the optimizer's groups are those of its construction.
    "learning-rate-of-construction",
    # As a Trainer that counts batches of the ranks: consumed samples are steps times the batch of a
    # rank times the ranks, and at another number of ranks too many or too few are skipped.
    "consumed-by-ranks",
)
COPY = StateDictOptions(full_state_dict=True, cpu_offload=True)


def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Model and optimizer, to save or to load into."""
    if wrong("raw-optimizer-state"):
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    model_state, optimizer_state = get_state_dict(
        model, optimizer, options=COPY if wrong("not-set-back") else None
    )
    if wrong("weights-in-bfloat16"):
        model_state = {name: value.bfloat16() for name, value in model_state.items()}
    return {"model": model_state, "optimizer": optimizer_state}


def main() -> None:
    options = common.options(*BUGS, samples=48)
    _, ranks = common.start()
    model = common.network()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=2e-2, total_steps=options.steps + 1
    )
    step, consumed = 0, 0
    if path := common.newest(options.checkpoint):
        state = states(model, optimizer)
        state |= {"scheduler": scheduler.state_dict(), "step": 0, "consumed": 0}
        dcp.load(state, checkpoint_id=path)
        step, consumed = state["step"], state["consumed"]
        if wrong("raw-optimizer-state"):
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        elif not wrong("not-set-back"):
            fresh = [{**group} for group in optimizer.param_groups]
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
            if wrong("learning-rate-of-construction"):
                for group, first in zip(optimizer.param_groups, fresh, strict=True):
                    group["lr"] = first["lr"]
        scheduler.load_state_dict(state["scheduler"])
        if wrong("consumed-by-ranks"):
            consumed = step * (GLOBAL_BATCH // 2) * ranks  # 4 for each rank
    for x, y, index in common.consumed_loader(options.samples, consumed):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.7)
        lr = optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()
        step, consumed = step + 1, consumed + GLOBAL_BATCH
        common.report(step, index, loss, lr=lr)
        if step % options.save_every == 0:
            state = states(model, optimizer)
            state |= {"scheduler": scheduler.state_dict(), "step": step, "consumed": consumed}
            path = common.begin(options.checkpoint, step)
            dcp.save(state, checkpoint_id=path)
            common.finish(path)
        if step == options.steps:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
