"""FSDP2 with distributed checkpoints (DCP), from the newest of which a restarted run goes on.

torchrun --standalone --nproc-per-node 4 --max-restarts 2 survive.py --checkpoints folder
gpusim torchrun --nproc-per-node 4 --max-restarts 2 \
    --faults seed=7 --runs 1000 survive.py --checkpoints {folder}

A checkpoint is written to a folder of its own, which gets its name when all of it is there. With
--overwrite each is written over the last one, in place: a rank that dies meanwhile leaves a mix.
"""

import argparse
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard


def batch(step: int, rank: int, size: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of this rank and step, and the values of a fixed function there."""
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    x = torch.randn(size, width, generator=generator)
    return x, x.sin().cumsum(1)


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint: DCP writes `.metadata` last."""
    whole = [each.parent for each in folder.glob("*/.metadata") if each.parent.suffix != ".part"]
    return max(whole, key=lambda each: each.name, default=None)


def save(state: dict, folder: Path, step: int, overwrite: bool) -> None:
    if overwrite:
        dcp.save(state, checkpoint_id=folder / "last")
        return
    part, whole = folder / f"step-{step:06}.part", folder / f"step-{step:06}"
    if dist.get_rank() == 0:
        shutil.rmtree(part, ignore_errors=True)  # of a run that died here
    dist.barrier()
    dcp.save(state, checkpoint_id=part)
    if dist.get_rank() == 0:
        part.rename(whole)
    dist.barrier()


def main(options: argparse.Namespace) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    width = options.width
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(options.layers)),
        nn.Linear(width, width),
    )
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)

    start, folder = 0, Path(options.checkpoints)
    found = newest(folder)
    if found is not None:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": 0}
        dcp.load(state, checkpoint_id=found)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        start = state["step"]
        if rank == 0:
            print(f"resuming from step {start}", flush=True)

    losses = []
    for step in range(start, options.steps):
        x, y = batch(step, rank, 8, width)
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if (step + 1) % options.save_every == 0:
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments, "step": step + 1}
            save(state, folder, step + 1, options.overwrite)
    with torch.no_grad():
        x, y = batch(options.steps, rank, 8, width)
        mean = F.mse_loss(model(x), y)
    dist.all_reduce(mean)
    norm = sum(p.to_local().double().square().sum() for p in model.parameters())
    dist.all_reduce(norm)
    if rank == 0:
        print(
            f"{options.steps} steps: loss {mean / dist.get_world_size():.6f}, |w|^2 {norm:.6f}",
            flush=True,
        )
    if options.out:
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(model, options=whole)
        if rank == 0:
            torch.save({"model": weights, "losses": losses}, options.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="FSDP2 that goes on after a failure")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--save-every", type=int, default=2, help="steps between checkpoints")
    parser.add_argument("--checkpoints", default="checkpoints", help="the folder for them")
    parser.add_argument("--overwrite", action="store_true", help="write over the last checkpoint")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--out", help="a file for the final weights")
    main(parser.parse_args())
