"""A small decoder of plain PyTorch, and text to train it on."""

import torch
from torch import Tensor, nn

VOCABULARY = 64


class Attention(nn.Module):
    """Causal attention; its heads are as wide where each rank has some of them."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.size = width // heads
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Perceptron(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.perceptron = Attention(width, heads), Perceptron(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.perceptron(self.norm2(x))


class Decoder(nn.Module):
    """An embedding, blocks and a head; a stage of a pipeline lacks what others have."""

    def __init__(self, layers: int = 2, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.tokens: nn.Module | None = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleDict({str(n): Block(width, heads) for n in range(layers)})
        self.norm: nn.Module | None = nn.LayerNorm(width)
        self.head: nn.Module | None = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.tokens is None else self.tokens(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def text(seed: int, batch: int, length: int = 16) -> tuple[Tensor, Tensor]:
    """Return tokens and those that follow them, (batch, length) each."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (batch, length + 1), generator=generator)
    tokens[:, 1::2] = (tokens[:, 0:-1:2] * 7 + 3) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of (batch, length, VOCABULARY) and (batch, length)."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
