"""A plain decoder made parallel by a plan of DTensor's styles; --sequence 0 keeps the length whole.

The batch is cut over the data, and gradients are averaged by hand.
"""

from __future__ import annotations

import zlib

import torch
import torch.distributed as dist
from common import VOCABULARY, options, report, start, text, wrong
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

WIDTH, HEADS, SIZE, HIDDEN, LAYERS = 28, 4, 10, 36, 2
BATCH, LENGTH = 12, 16
BUGS = (
    "partial-output-kept",
    "output-reduced-twice",
    "sequence-layout-left",
    "batch-for-sequence",
    "norms-not-planned",
    "head-norms-not-planned",
    "partial-gradient-taken-as-whole",
    "weights-drawn-by-rank",
)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS * SIZE) for _ in range(3))
        self.q_norm, self.k_norm = (nn.RMSNorm(SIZE, eps=1e-6) for _ in range(2))
        self.out = nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, SIZE)) for layer in (self.q, self.k, self.v))
        q, k, v = (x.transpose(1, 2) for x in (self.q_norm(q), self.k_norm(k), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(WIDTH, eps=1e-6) for _ in range(2))
        self.attention, self.mlp = Attention(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                seed = zlib.crc32(name.encode())
                if wrong("weights-drawn-by-rank"):
                    seed += dist.get_rank()
                generator = torch.Generator().manual_seed(seed)
                parameter.normal_(0, 0.2, generator=generator)
                parameter += "norm" in name

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def plan(sequence: bool) -> dict[str, ParallelStyle]:
    """How each module is cut; with `sequence` the length is, between attention and perceptron."""
    between = Shard(1) if sequence else Replicate()
    first = Shard(0) if wrong("batch-for-sequence") else between
    left = Partial() if wrong("partial-output-kept") else between
    styles: dict[str, ParallelStyle] = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=first),
        "layers.*.attention.out": RowwiseParallel(output_layouts=left),
        "layers.*.mlp.down": RowwiseParallel(output_layouts=between),
        "head": ColwiseParallel(
            input_layouts=between, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"):
        styles[f"layers.*.{name}"] = ColwiseParallel()
    if not wrong("head-norms-not-planned"):
        heads = SequenceParallel(sequence_dim=2, use_local_output=True)
        styles |= {f"layers.*.attention.{name}": heads for name in ("q_norm", "k_norm")}
    gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    if sequence:
        styles |= {"layers.*.attention": gather, "layers.*.mlp": gather}
        if not wrong("norms-not-planned"):
            norm = SequenceParallel(use_local_output=True)
            styles |= {"norm": norm, "layers.*.norm1": norm, "layers.*.norm2": norm}
    elif wrong("sequence-layout-left"):
        styles["layers.*.mlp"] = gather
        styles["layers.*.mlp.down"] = RowwiseParallel(output_layouts=Shard(1))
    elif wrong("output-reduced-twice"):
        styles["layers.*.mlp"] = PrepareModuleOutput(
            output_layouts=Partial(), desired_output_layouts=Replicate()
        )
    return styles


def finish_gradients(model: nn.Module, data: DeviceMesh | None) -> None:
    """Gradients as their weights are cut, averaged over the data."""
    for parameter in model.parameters():
        if isinstance(parameter, DTensor):
            gradient, layout = parameter.grad, parameter.placements
            if layout == (Replicate(),) and wrong("partial-gradient-taken-as-whole"):
                local = gradient.to_local()
                parameter.grad = DTensor.from_local(local, parameter.device_mesh, layout)
            else:
                parameter.grad = gradient.redistribute(placements=layout)
        if data is not None:
            gradient = parameter.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            dist.all_reduce(local, group=data.get_group())
            local /= data.size()


def main() -> None:
    chosen = options(BUGS, tp=2, sequence=1)
    rank, ranks = start()
    tp = min(chosen.tp, ranks)
    model, data = Decoder(), None
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks // tp, tp), mesh_dim_names=("data", "tensor"))
        source = None if wrong("weights-drawn-by-rank") else 0
        styles = plan(bool(chosen.sequence))
        parallelize_module(model, mesh["tensor"], styles, src_data_rank=source)
        data = mesh["data"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    for step in range(chosen.steps):
        tokens, targets = (x.chunk(ranks // tp)[rank // tp] for x in text(step, BATCH, LENGTH))
        with loss_parallel():
            logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss.backward()
        finish_gradients(model, data)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
        loss = loss.detach().clone()
        if data is not None:
            dist.all_reduce(loss, group=data.get_group())
        report(step, loss / (ranks // tp))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
