"""A Megatron block: attention split by heads, an MLP split by columns and rows, one psum for each.

python examples/gallery/megatron.py
"""

from __future__ import annotations

from typing import Any

import numpy as np

import gpusim
from gpusim import P, lax

REPLICAS, HEADS, TOKENS, WIDTH, HIDDEN = 4, 8, 10, 32, 128


def normed(x: Any) -> Any:
    return (x - x.mean(axis=-1, keepdims=True)) / x.std(axis=-1, keepdims=True)


def attention(x: Any, qkv: Any, out: Any) -> Any:
    """Of some heads: qkv (3, heads, width, size), out (heads, size, width)."""
    q, k, v = x @ qkv[0], x @ qkv[1], x @ qkv[2]
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1])
    scores = np.where(np.tri(TOKENS, dtype=bool), scores, -1e30)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True) @ v @ out).sum(axis=0)


def mlp(x: Any, up: Any, down: Any) -> Any:
    return np.maximum(x @ up, 0) @ down


def block(x: Any, w: Any, total: Any = lambda part: part) -> Any:
    """The block on some heads and hidden columns; `total` adds the parts of all replicas."""
    x = x + total(attention(normed(x), w["qkv"], w["out"]))
    return x + total(mlp(normed(x), w["up"], w["down"]))


def main() -> None:
    draw = np.random.default_rng(0).standard_normal
    size = WIDTH // HEADS
    w = {
        "qkv": draw((3, HEADS, WIDTH, size)) / WIDTH**0.5,
        "out": draw((HEADS, size, WIDTH)) / WIDTH**0.5,
        "up": draw((WIDTH, HIDDEN)) / WIDTH**0.5,
        "down": draw((HIDDEN, WIDTH)) / HIDDEN**0.5,
    }
    split = {"qkv": P(None, "tp"), "out": P("tp"), "up": P(None, "tp"), "down": P("tp")}
    parallel = gpusim.shard_map(
        lambda x, w: block(x, w, lambda part: lax.psum(part, "tp")),
        mesh=gpusim.Mesh(REPLICAS, "tp"), in_specs=(P(), split), out_specs=P(),
    )  # fmt: skip
    x = draw((TOKENS, WIDTH))
    count = sum(leaf.size for leaf in gpusim.tree.leaves(w))
    print(
        f"{count} parameters, {count // REPLICAS} on each of {REPLICAS} replicas; 2 psums a block"
    )
    np.testing.assert_allclose(parallel(x, w), block(x, w), rtol=1e-9, atol=1e-12)
    print("agreed with the block on one replica")


if __name__ == "__main__":
    main()
