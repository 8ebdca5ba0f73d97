"""Tensor and sequence parallelism within a node, FSDP2 across nodes: a 2-D mesh.

torchrun --standalone --nproc-per-node 4 tensor_parallel.py --tp 2
gpusim torchrun --nproc-per-node 64 tensor_parallel.py --tp 8
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

VOCABULARY, LENGTH = 32, 16


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # The heads that are here: all of them, or those of the rank's columns.
        q, k, v = (
            projected(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for projected in (self.query, self.key, self.value)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(seen.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.feed_forward = Attention(width, heads), FeedForward(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Model(nn.Module):
    def __init__(self, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def parallelize(model: Model, mesh: DeviceMesh) -> None:
    """Columns and rows of the weights over the ranks; the sequence over them in between."""
    ends: dict[str, ParallelStyle] = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(model, mesh, ends)
    gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    for layer in model.layers:
        inside: dict[str, ParallelStyle] = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(**gathered),
            "attention.query": ColwiseParallel(),
            "attention.key": ColwiseParallel(),
            "attention.value": ColwiseParallel(),
            "attention.out": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(**gathered),
            "feed_forward.gate": ColwiseParallel(),
            "feed_forward.up": ColwiseParallel(),
            "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, mesh, inside)


def batch(step: int, rank: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences that count up by a step of their own, and what follows."""
    generator = torch.Generator().manual_seed(step * 1000 + rank)
    first, stride = torch.randint(1, VOCABULARY, (2, size, 1), generator=generator)
    tokens = (first + stride * torch.arange(LENGTH + 1)) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def main() -> None:
    parser = argparse.ArgumentParser(description="tensor and sequence parallelism with FSDP2")
    parser.add_argument("--tp", type=int, default=2, help="ranks that share a layer's weights")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8, help="of a tensor-parallel group")
    parser.add_argument("--out", help="a file for the final weights")
    options = parser.parse_args()

    ranks = int(os.environ["WORLD_SIZE"])
    if ranks % options.tp:
        parser.error(f"--tp {options.tp} does not divide {ranks} ranks")
    accelerated = torch.accelerator.is_available()
    device_type = torch.accelerator.current_accelerator().type if accelerated else "cpu"
    if accelerated:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    shape = (ranks // options.tp, options.tp)
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=("dp", "tp"))  # makes the groups

    torch.manual_seed(0)
    model = Model(options.width, options.heads, options.layers).to(device_type)
    parallelize(model, mesh["tp"])
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)

    losses = []
    for step in range(options.steps):
        x, y = batch(step, mesh.get_local_rank("dp"), options.batch_size)
        optimizer.zero_grad()
        with loss_parallel():
            logits = model(x.to(device_type))
            loss = F.cross_entropy(logits.flatten(0, 1), y.to(device_type).flatten())
            loss.backward()
        optimizer.step()
        mean = loss.full_tensor().detach().clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG, group=mesh["dp"].get_group())
        losses.append(mean.item())
        if dist.get_rank() == 0 and (step % 10 == 0 or step + 1 == options.steps):
            print(f"step {step}: loss {losses[-1]:.6f}", flush=True)

    weights = {name: value.full_tensor().cpu() for name, value in model.state_dict().items()}
    if dist.get_rank() == 0 and options.out:
        torch.save({"model": weights, "losses": losses}, options.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
