"""Ring attention: queries stay, blocks of keys and values travel round the ring by ppermute.

Each replica holds one block of the sequence and never sees more than two blocks of keys and
values at a time; the softmax is accumulated online, block by block. It equals full attention.

    python examples/ring_attention.py --replicas 8 --causal
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

import gpusim
from gpusim import lax

HEADS, WIDTH = 2, 8
# The score of a masked key: finite, so that a block with all keys masked gives no NaN.
NEVER = -1e30


def ring_attention(causal: bool, q: Any, k: Any, v: Any) -> Any:
    """Attention of this replica's block to the whole sequence: q, k, v (heads, block, width)."""
    replicas, me = lax.axis_size("i"), lax.axis_index("i")
    block = q.shape[1]
    onward = [(r, (r + 1) % replicas) for r in range(replicas)]
    place = np.arange(block)

    largest = np.full((HEADS, block, 1), NEVER)
    total = np.zeros((HEADS, block, 1))
    weighted = np.zeros(q.shape)
    for hop in range(replicas):
        if hop:
            k, v = lax.ppermute((k, v), "i", onward)
        source = (me - hop) % replicas  # whose block is here now
        scores = q @ np.swapaxes(k, -1, -2) / np.sqrt(WIDTH)
        if causal:
            seen = (me * block + place)[:, None] >= (source * block + place)[None, :]
            scores = np.where(seen, scores, NEVER)
        # The running sums are rescaled whenever a larger score turns up.
        larger = np.maximum(largest, scores.max(axis=-1, keepdims=True))
        rescale, weights = np.exp(largest - larger), np.exp(scores - larger)
        total = total * rescale + weights.sum(axis=-1, keepdims=True)
        weighted = weighted * rescale + weights @ v
        largest = larger
    return weighted / total


def full_attention(causal: bool, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The same on one device: q, k, v (heads, sequence, width)."""
    scores = q @ np.swapaxes(k, -1, -2) / np.sqrt(WIDTH)
    if causal:
        scores = np.where(np.tri(q.shape[1], dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True) @ v


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--block", type=int, default=16, help="tokens a replica holds")
    parser.add_argument("--causal", action="store_true", help="a token sees only those before it")
    options = parser.parse_args(arguments)

    sequence = options.replicas * options.block
    q, k, v = np.random.default_rng(0).standard_normal((3, HEADS, sequence, WIDTH))
    expected = full_attention(options.causal, q, k, v)

    # in_axes and out_axes cut and join the sequence: (heads, replicas, block, width), axis 1
    shards = [x.reshape(HEADS, options.replicas, options.block, WIDTH) for x in (q, k, v)]
    attention = partial(ring_attention, options.causal)
    kind = "causal" if options.causal else "full"
    print(f"{kind} attention over {sequence} tokens, {options.block} on each of {options.replicas}")
    for name, mapped in (
        ("vmap", gpusim.vmap(attention, in_axes=1, out_axes=1, axis_name="i")),
        ("pmap", gpusim.pmap(attention, "i", in_axes=1, out_axes=1)),
    ):
        found = mapped(*shards).reshape(expected.shape)
        print(f"  {name}: largest difference {np.max(np.abs(found - expected)):.1e}")
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)
    print("agreed with attention on one device")


if __name__ == "__main__":
    main()
