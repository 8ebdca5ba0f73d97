"""torch.distributed.checkpoint: a state saved by all ranks, loaded by 1, 2, 4 and all of them."""

import digest
import tiny
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard


def sharded(mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = tiny.Decoder()
    for block in model.blocks.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int
) -> torch.Tensor:
    for step in steps:
        inputs, targets = tiny.text(step * 1000 + rank, batch=2)
        loss = tiny.loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss


def main() -> None:
    digest.watch()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, optimizer = sharded(DeviceMesh("cpu", range(ranks)))
    train(model, optimizer, range(10), rank)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id="state")
    for size in sorted({1, 2, min(4, ranks), ranks}):
        members = list(range(size))
        group = dist.new_group(members)
        if rank in members:
            mesh = DeviceMesh.from_group(group, "cpu")
            model, optimizer = sharded(mesh)
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments}
            dcp.load(state, checkpoint_id="state", process_group=group)
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
            digest.say(f"loss on {size}", train(model, optimizer, range(10, 13), rank))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
