"""A decoder cut by hand over a tensor-parallel group; between its layers the length is cut."""

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
    cut,
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

WIDTH, HEADS, KEY_HEADS, SIZE, HIDDEN, LAYERS = 28, 8, 2, 10, 72, 2
BATCH, LENGTH = 6, 16
BUGS = (
    "norm-gradients-not-reduced",
    "norm-gradients-averaged",
    "bias-gradient-not-reduced",
    "gather-gradient-only-split",
    "gathered-out-of-order",
    "gathered-over-data",
    "output-only-split",
    "shared-heads-not-summed",
    "mean-not-reduced",
    "mean-gradient-not-reduced",
)


def rms_norm(name: str, width: int) -> nn.RMSNorm:
    """A norm of a part of the length."""
    norm = nn.RMSNorm(width, eps=1e-6)
    weight = 1 + draw(f"{name}.weight", width, scale=0.1)
    norm.weight = replicated(weight, sequence=not wrong("norm-gradients-not-reduced"))
    return norm


def rotate(x: Tensor) -> Tensor:
    """Rotary positions of (batch, heads, length, size)."""
    length, half = x.size(-2), x.size(-1) // 2
    angles = torch.arange(length)[:, None] / 50 ** (torch.arange(half) / half)
    a, b = x.chunk(2, -1)
    sine, cosine = angles.sin().to(x), angles.cos().to(x)
    return torch.cat((a * cosine - b * sine, a * sine + b * cosine), -1)


class HeadsNorm(nn.Module):
    """The RMSNorm over all heads, which are cut over the ranks."""

    def __init__(self, name: str, width: int, grid: Grid, shares: int = 1) -> None:
        super().__init__()
        self.grid, self.width, self.shares = grid, width, shares
        self.weight = cut(1 + draw(f"{name}.weight", width, scale=0.1), grid, shares=shares)

    def forward(self, x: Tensor) -> Tensor:
        if wrong("mean-not-reduced"):
            mean = x.square().mean(-1, keepdim=True)
        else:
            squares = Reduce.apply(x.square().sum(-1, keepdim=True), self.grid.tensor)
            if not wrong("mean-gradient-not-reduced"):
                squares = Copy.apply(squares, self.grid.tensor)
            mean = squares / (self.width * self.shares)
        return x * torch.rsqrt(mean + 1e-6) * self.weight


class Attention(nn.Module):
    """Heads are cut over the ranks; where keys' heads are fewer, `shares` ranks have the same."""

    def __init__(self, name: str, grid: Grid) -> None:
        super().__init__()
        shares = max(1, grid.size // KEY_HEADS)
        queries, keys = HEADS * SIZE, KEY_HEADS * SIZE

        def project(what: str, outputs: int, shares: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(
                f"{name}.{what}", WIDTH, [outputs], grid, bias=False, sequence=True, shares=shares
            )

        self.q = project("q", queries, 1)
        self.k = project("k", keys, shares)
        self.v = project("v", keys, shares)
        self.q_norm = HeadsNorm(f"{name}.q_norm", queries, grid)
        self.k_norm = HeadsNorm(f"{name}.k_norm", keys, grid, shares)
        self.out = RowParallelLinear(f"{name}.out", queries, WIDTH, grid, sequence=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            x.unflatten(-1, (-1, SIZE)).transpose(1, 2)
            for x in (self.q_norm(self.q(x)), self.k_norm(self.k(x)), self.v(x))
        )
        y = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, name: str, grid: Grid) -> None:
        super().__init__()
        self.gate_up = ColumnParallelLinear(
            f"{name}.gate_up",
            WIDTH,
            [HIDDEN, HIDDEN],
            grid,
            bias=False,
            sequence=True,
            group=grid.data if wrong("gathered-over-data") else grid.tensor,
        )
        self.down = RowParallelLinear(f"{name}.down", HIDDEN, WIDTH, grid, sequence=True)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, name: str, grid: Grid) -> None:
        super().__init__()
        self.norm1, self.norm2 = (rms_norm(f"{name}.norm{n}", WIDTH) for n in (1, 2))
        self.attention = Attention(f"{name}.attention", grid)
        self.mlp = Mlp(f"{name}.mlp", grid)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    """The loss of each token."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.tokens = VocabularyParallelEmbedding("tokens", VOCABULARY, WIDTH, grid, sequence=True)
        self.layers = nn.ModuleList(Layer(f"layers.{n}", grid) for n in range(LAYERS))
        self.norm = rms_norm("norm", WIDTH)
        self.head = ColumnParallelLinear(
            "head", WIDTH, [VOCABULARY], grid, bias=False, sequence=True
        )
        self.criterion = VocabularyParallelCrossEntropy(grid)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.criterion(self.head(self.norm(x)), targets)


def main() -> None:
    chosen = options(BUGS, tp=2)
    _, ranks = start()
    cells = grid(chosen.tp, shares=max(1, min(chosen.tp, ranks) // KEY_HEADS))
    model = Decoder(cells)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(chosen.steps):
        tokens, targets = (part(x, cells) for x in text(step, BATCH, LENGTH))
        loss = model(tokens, targets).mean()
        loss.backward()
        finish_gradients(model, cells)
        clip(model, cells, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        report(step, average(loss, cells))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
