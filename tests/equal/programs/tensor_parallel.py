"""A decoder whose layers and vocabulary are cut by hand over a tensor-parallel group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from common import VOCABULARY, options, report, start, text, wrong
from megatron_layers import (
    ColumnParallelLinear,
    Copy,
    Grid,
    Reduce,
    RowParallelLinear,
    draw,
    grid,
    replicated,
)
from megatron_vocabulary import (
    VocabularyParallelCrossEntropy,
    VocabularyParallelEmbedding,
    average,
    clip,
    finish_gradients,
    part,
)
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, SIZE, HIDDEN, LAYERS = 20, 12, 3, 60, 2
BATCH, LENGTH = 6, 11
BUGS = (
    "output-not-reduced",
    "output-reduced-twice",
    "output-reduced-over-data",
    "input-gradient-not-reduced",
    "input-gradient-reduced-twice",
    "bias-before-reduce",
    "bias-drawn-by-rank",
    "shards-all-alike",
    "qkv-cut-contiguously",
    "gate-up-cut-contiguously",
    "scale-of-local-heads",
    "rows-not-masked",
    "logits-gathered",
    "exponentials-not-reduced",
    "target-not-masked",
    "target-not-reduced",
    "smoothing-not-reduced",
    "clip-counts-copies",
)


def layer_norm(name: str, width: int) -> nn.LayerNorm:
    norm = nn.LayerNorm(width)
    norm.weight = replicated(1 + draw(f"{name}.weight", width, scale=0.1))
    norm.bias = replicated(draw(f"{name}.bias", width))
    return norm


class Attention(nn.Module):
    """Heads are cut over the ranks."""

    def __init__(self, name: str, width: int, heads: int, size: int, grid: Grid) -> None:
        super().__init__()
        n = heads * size
        self.size, self.scale = size, size**-0.5
        if wrong("scale-of-local-heads"):
            self.scale = (n // (heads // grid.size)) ** -0.5
        self.qkv = ColumnParallelLinear(
            f"{name}.qkv",
            width,
            [3 * n] if wrong("qkv-cut-contiguously") else [n, n, n],
            grid,
            sums_gradient=not wrong("input-gradient-not-reduced"),
        )
        self.out = RowParallelLinear(f"{name}.out", n, width, grid)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, self.size)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return self.out(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """A gate's and its values' projection are one weight, one above the other."""

    def __init__(self, name: str, width: int, hidden: int, grid: Grid) -> None:
        super().__init__()
        self.grid = grid
        sections = [2 * hidden] if wrong("gate-up-cut-contiguously") else [hidden, hidden]
        self.gate_up = ColumnParallelLinear(f"{name}.gate_up", width, sections, grid)
        group = grid.data if wrong("output-reduced-over-data") else grid.tensor
        self.down = RowParallelLinear(f"{name}.down", hidden, width, grid, group=group)

    def forward(self, x: Tensor) -> Tensor:
        if wrong("input-gradient-reduced-twice"):
            x = Copy.apply(x, self.grid.tensor)
        gate, up = self.gate_up(x).chunk(2, -1)
        y = self.down(F.silu(gate) * up)
        if wrong("output-reduced-twice"):
            y = Reduce.apply(y, self.grid.tensor)
        return y


class Layer(nn.Module):
    def __init__(self, name: str, grid: Grid) -> None:
        super().__init__()
        self.norm1 = layer_norm(f"{name}.norm1", WIDTH)
        self.attention = Attention(f"{name}.attention", WIDTH, HEADS, SIZE, grid)
        self.norm2 = layer_norm(f"{name}.norm2", WIDTH)
        self.mlp = Mlp(f"{name}.mlp", WIDTH, HIDDEN, grid)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """The loss of each token."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.tokens = VocabularyParallelEmbedding("tokens", VOCABULARY, WIDTH, grid)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.positions.weight = replicated(draw("positions", LENGTH, WIDTH))
        self.layers = nn.ModuleList(Layer(f"layers.{n}", grid) for n in range(LAYERS))
        self.norm = layer_norm("norm", WIDTH)
        gathers = wrong("logits-gathered")
        self.head = ColumnParallelLinear(
            "head", WIDTH, [VOCABULARY], grid, bias=False, gathers=gathers
        )
        self.criterion = VocabularyParallelCrossEntropy(grid, smoothing=0.1)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.size(1)))
        for layer in self.layers:
            x = layer(x)
        return self.criterion(self.head(self.norm(x)), targets)


def main() -> None:
    chosen = options(BUGS, tp=2)
    start()
    cells = grid(chosen.tp)
    model = Decoder(cells)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    for step in range(chosen.steps):
        tokens, targets = (part(x, cells) for x in text(step, BATCH, LENGTH))
        loss = model(tokens, targets).mean()
        loss.backward()
        finish_gradients(model, cells)
        clip(model, cells, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        report(step, average(loss, cells))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
