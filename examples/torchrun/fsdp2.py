"""FSDP2: a sharded transformer, with distributed checkpoints (DCP) from which it goes on.

torchrun --standalone --nproc-per-node 4 fsdp2.py --checkpoint checkpoint
gpusim torchrun --nproc-per-node 64 --reduction nccl-ring fsdp2.py --mixed-precision
"""

import argparse
import os
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

VOCABULARY, LENGTH = 16, 12


class Block(nn.Module):
    """Attention and a feed-forward network, both with normalisation before them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.positions(places)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def batch(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences in which each token is the sum of the two before it, and what follows."""
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    tokens = torch.randint(VOCABULARY, (size, 2), generator=generator)
    while tokens.shape[1] <= LENGTH:
        tokens = torch.cat([tokens, tokens[:, -2:].sum(1, keepdim=True) % VOCABULARY], 1)
    return tokens[:, :-1], tokens[:, 1:]


def main(options: argparse.Namespace) -> None:
    rank = int(os.environ["RANK"])
    if torch.accelerator.is_available():
        device_type = torch.accelerator.current_accelerator().type
        device = torch.device(f"{device_type}:{os.environ['LOCAL_RANK']}")
        torch.accelerator.set_device_index(device.index)
    else:
        device = torch.device("cpu")
    dist.init_process_group(backend=dist.get_default_backend_for_device(device))
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))

    torch.manual_seed(0)
    with torch.device("meta"):
        model = Transformer(options.width, options.layers, heads=2)
    named = {}
    if options.mixed_precision:
        named["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.bfloat16)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **named)
    fully_shard(model, mesh=mesh, **named)
    assert isinstance(model, FSDPModule)
    model.to_empty(device=device)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)

    start = 0
    folders = sorted(Path(options.checkpoint).glob("step-*")) if options.checkpoint else []
    if folders:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=folders[-1])
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        start = int(folders[-1].name.removeprefix("step-"))
        if rank == 0:
            print(f"loaded {folders[-1].name}", flush=True)

    losses = []
    for step in range(start, options.steps):
        x, y = (t.to(device) for t in batch(step, rank, options.batch_size))
        loss = F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        losses.append(mean.item())
        if rank == 0 and (step % 10 == 0 or step + 1 == options.steps):
            print(f"step {step}: loss {losses[-1]:.6f}, norm {norm.item():.6f}", flush=True)
        if options.checkpoint and (step + 1) % options.save_every == 0:
            weights, moments = get_state_dict(model, optimizer)
            folder = Path(options.checkpoint, f"step-{step + 1:06}")
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)

    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=whole)
    if rank == 0 and options.out:
        torch.save({"model": weights, "losses": losses}, options.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="FSDP2 with distributed checkpoints")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16, help="of a rank")
    parser.add_argument("--lr", type=float, default=1e-2)
    parser.add_argument("--mixed-precision", action="store_true")
    parser.add_argument("--checkpoint", help="a folder for checkpoints, or with some")
    parser.add_argument("--save-every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--out", help="a file for the final weights")
    main(parser.parse_args())
