"""Mixture of experts: tokens travel to their experts and back by ragged_all_to_all.

Each replica holds some tokens and some experts. A router picks one expert a token; how many
tokens go where is known only at run time, and nothing is padded per pair of replicas.

    python examples/moe_dispatch.py --replicas 8 --experts 2 --skew 3
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np

import gpusim
from gpusim import lax

WIDTH, HIDDEN = 8, 16


def mixture(tokens: Any, router: Any, w_in: Any, w_out: Any) -> Any:
    """This replica's tokens (n, width), each through the expert that the router picks for it.

    Expert e lives on replica e // k, which holds w_in (k, width, hidden), w_out (k, hidden, width);
    router (width, replicas * k) is the same everywhere.
    """
    replicas, me = lax.axis_size("i"), lax.axis_index("i")
    n, k = tokens.shape[0], w_in.shape[0]
    experts = replicas * k

    # Route: the best expert of each token, and how much it counts.
    scores = tokens @ router
    expert = scores.argmax(axis=-1)
    gate = 1 / np.exp(scores - scores.max(axis=-1, keepdims=True)).sum(axis=-1)

    # Sort tokens by expert: expert e's are rows [starts[e], starts[e] + sizes[e]).
    order = np.argsort(expert, kind="stable")
    sizes = np.bincount(expert, minlength=experts)
    starts = np.cumsum(sizes) - sizes

    # Where they land: a receiver keeps its experts' tokens together, by sender within each.
    everyones = lax.all_gather(sizes, "i").reshape(
        replicas, replicas, k
    )  # sender, receiver, expert
    landing = everyones.transpose(1, 2, 0).reshape(replicas, k * replicas)  # receiver: as they lie
    landing = (np.cumsum(landing, axis=1) - landing).reshape(replicas, k, replicas)
    offsets = landing[:, :, me].reshape(experts)
    arriving = everyones[:, me].reshape(experts)  # by sender, then by expert here

    # Dispatch. All tokens may pick one replica: that is the size of what receives them.
    room = np.zeros((replicas * n, WIDTH), tokens.dtype)
    here = lax.ragged_all_to_all(
        tokens[order], room, starts, sizes, offsets, arriving, axis_name="i"
    )

    # Each expert on its rows; rows past the last token are zeros, and stay unread.
    ends = np.cumsum(arriving.reshape(replicas, k).sum(axis=0))
    owner = np.searchsorted(ends, np.arange(replicas * n), side="right")
    done = np.zeros_like(here)
    for local in range(k):
        out = np.tanh(here @ w_in[local]) @ w_out[local]
        done = np.where((owner == local)[:, None], out, done)

    # Back: sending and receiving swap, and so do the offsets of both ends.
    returned = lax.ragged_all_to_all(
        done,
        np.zeros_like(tokens),
        lax.all_to_all(offsets, "i", 0, 0, tiled=True),
        arriving,
        lax.all_to_all(starts, "i", 0, 0, tiled=True),
        sizes,
        axis_name="i",
    )
    return returned[np.argsort(order)] * gate[:, None]


def on_one_device(
    tokens: np.ndarray, router: np.ndarray, w_in: np.ndarray, w_out: np.ndarray
) -> np.ndarray:
    """The same, expert by expert: tokens (all, width), w_in and w_out (experts, ...)."""
    scores = tokens @ router
    chances = np.exp(scores - scores.max(axis=1, keepdims=True))
    chances /= chances.sum(axis=1, keepdims=True)
    result = np.zeros_like(tokens)
    for expert in range(len(w_in)):
        its = scores.argmax(axis=1) == expert
        result[its] = np.tanh(tokens[its] @ w_in[expert]) @ w_out[expert]
    return result * chances.max(axis=1, keepdims=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--experts", type=int, default=2, help="experts a replica holds")
    parser.add_argument("--tokens", type=int, default=32, help="tokens a replica holds")
    parser.add_argument("--skew", type=float, default=1.0, help="how much expert 0 is preferred")
    options = parser.parse_args(arguments)
    replicas, k, n = options.replicas, options.experts, options.tokens

    draw = np.random.default_rng(0).standard_normal
    tokens = draw((replicas, n, WIDTH))
    tokens[..., 0] = 1.0  # a constant feature, through which the router can prefer an expert
    router = draw((WIDTH, replicas * k))
    router[0, 0] += options.skew
    w_in, w_out = draw((replicas, k, WIDTH, HIDDEN)), draw((replicas, k, HIDDEN, WIDTH))

    flat = tokens.reshape(-1, WIDTH)
    expected = on_one_device(
        flat, router, w_in.reshape(-1, WIDTH, HIDDEN), w_out.reshape(-1, HIDDEN, WIDTH)
    )
    load = np.bincount((flat @ router).argmax(axis=1), minlength=replicas * k)
    print(
        f"{replicas} replicas, {n} tokens and {k} experts each; tokens by expert: {load.tolist()}"
    )
    for name, mapped in (
        ("vmap", gpusim.vmap(mixture, in_axes=(0, None, 0, 0), axis_name="i")),
        ("pmap", gpusim.pmap(mixture, "i", in_axes=(0, None, 0, 0))),
    ):
        found = mapped(tokens, router, w_in, w_out).reshape(expected.shape)
        print(f"  {name}: largest difference {np.max(np.abs(found - expected)):.1e}")
        np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)
    print("agreed with all experts on one device")


if __name__ == "__main__":
    main()
