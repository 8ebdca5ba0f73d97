"""Draws of gpusim.rng: a scalar account of their words, and the maps that run them."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

import gpusim

FLOATS = tuple(map(np.dtype, ("float16", ml_dtypes.bfloat16, "float32", "float64")))
WORD = 2**64


# --- a second, scalar account of the streams, on words that NumPy draws -------------------------


def philox_words(seed: int, call: int, replica: int, count: int, candidate: int = 0) -> list[int]:
    key, counter = np.array([seed, 1], np.uint64), [0, call, replica, candidate]
    generator = np.random.Philox(key=key, counter=np.array(counter, np.uint64))
    return generator.random_raw(count).tolist()


def rounded(exact: Fraction, dtype: np.dtype) -> Any:
    """The nearest number of `dtype`, ties to even, from comparisons with its neighbours."""
    near = np.asarray(float(exact)).astype(dtype)[()]
    step = [np.nextafter(near, dtype.type(s * np.inf)) for s in (-1, 1)]
    finite = [c for c in (near, *step) if np.isfinite(c)]
    unsigned = np.dtype(f"u{dtype.itemsize}")
    return min(
        finite,
        key=lambda c: (abs(Fraction(float(c)) - exact), int(np.asarray(c).view(unsigned)) % 2),
    )


# --- running under every executor ---------------------------------------------------------------

MAPS: dict[str, Callable[..., Any]] = {
    "vmap": gpusim.vmap,
    "pmap": gpusim.pmap,
    "pmap one": partial(gpusim.pmap, schedule="one"),
}
Axes = tuple[tuple[str, int], ...]


def nested(kinds: tuple[str, ...], axes: Axes) -> Callable[[Callable[[], Any]], Any]:
    """Runs a function without arguments under one map for each axis, the first outermost."""

    def run(f: Callable[[], Any]) -> Any:
        for kind, (name, size) in reversed(list(zip(kinds, axes, strict=True))):
            f = MAPS[kind](f, axis_name=name, axis_size=size)
        return f()

    return run


def per_replica(f: Callable[[], Any], size: int, axis_name: str = "i") -> Any:
    return gpusim.vmap(f, axis_name=axis_name, axis_size=size)()


def assert_same_bits(ours: Any, theirs: Any, where: str = "") -> None:
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, where
    assert ours.tobytes() == theirs.tobytes(), where
