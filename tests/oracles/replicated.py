"""Functions of mapped operands, run by the batched rules and once per replica.

An `Operand` is an array mapped over some of the axes i (outer, 2 replicas) and j (inner, 3).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from gpusim import trees
from gpusim.maps import MappedArray, per_replica_route
from gpusim.maps.axis_environment import Axes, extend_axis_environment, new_axes
from gpusim.maps.mapped_array.align import lead_full
from gpusim.maps.mapped_array.array import read_only, wrap

SIZES = {"i": 2, "j": 3}
OVER = ("i", "j", "ij", "")


@dataclass(frozen=True)
class Operand:
    """An array and its mapped axes: "", "i", "j" or "ij"; None for a plain array."""

    data: np.ndarray
    over: str | None

    def on(self, entries: Axes) -> Any:
        if self.over is None:
            return self.data
        return wrap(
            read_only(self.data), tuple(entry for entry in entries if entry.name in self.over)
        )


def sizes_of(over: str | None) -> tuple[int, ...]:
    """Return the sizes of the mapped axes, which are the first axes of an operand's data."""
    return tuple(SIZES[name] for name in over or "")


def normal(
    rng: np.random.Generator, shape: tuple[int, ...], over: str | None, dtype: Any = np.float64
) -> Operand:
    """Return random values: small integers, bools, or floats of which some are negative zeros."""
    shape = sizes_of(over) + shape
    dtype = np.dtype(dtype)
    values = rng.standard_normal(shape)
    if dtype.kind in "iu":
        values = rng.integers(0 if dtype.kind == "u" else -5, 9, shape)
    elif dtype.kind == "b":
        values = values > 0
    elif dtype.kind == "c":
        values = values + 1j * rng.standard_normal(shape)
    values = np.asarray(values, dtype)
    return Operand(values * np.where(rng.random(shape) < 0.1, -0.0, 1).astype(dtype), over)


@dataclass(frozen=True)
class Outcome:
    """The results of all replicas, or the exception."""

    leaves: tuple[Any, ...] = ()
    error: Exception | None = None

    def bits(self) -> Any:
        """Return a value by which outcomes are compared; all NaNs are equal."""
        if self.error is not None:
            return type(self.error), str(self.error)
        return [
            (leaf.shape, leaf.dtype, _one_nan(leaf).tobytes())
            if isinstance(leaf, np.ndarray)
            else leaf
            for leaf in self.leaves
        ]


def _one_nan(values: np.ndarray) -> np.ndarray:
    """Replace every NaN by the same one: payload and sign are unspecified."""
    if values.dtype.kind in "biumMSUO" or not values.size:
        return values
    if values.dtype.kind == "c":
        parts = np.ascontiguousarray(values).reshape(-1).view(values.real.dtype)
        return np.where(np.isnan(parts), np.array(np.nan, parts.dtype), parts)
    return np.where(np.isnan(values), np.array(np.nan, values.dtype), values)


def bits_of(values: np.ndarray) -> bytes:
    """Return the bits of the values, with the same NaN everywhere."""
    return _one_nan(values).tobytes()


def epsilon(dtype: np.dtype[Any]) -> Any:
    """Return the distance from 1 to the next number of a floating-point or complex dtype."""
    return ml_dtypes.finfo(dtype).eps


def outcome(
    function: Callable[..., Any], operands: tuple[Any, ...], force: bool = False
) -> Outcome:
    """Call the function on the operands, and return the outcome on every replica."""
    entries = new_axes(tuple(SIZES), tuple(SIZES.values()))
    with extend_axis_environment(entries), per_replica_route(force=force):
        values = [item.on(entries) if isinstance(item, Operand) else item for item in operands]
        try:
            leaves, _ = trees.flatten(function(*values))
        except Exception as error:
            return Outcome(error=error)
        return Outcome(tuple(_whole(leaf, entries) for leaf in leaves))


def _whole(leaf: Any, entries: Axes) -> Any:
    return np.array(lead_full(leaf, entries)) if isinstance(leaf, MappedArray) else leaf


class _Names(logging.Handler):
    """Collects the first argument of each message, which is a function's name."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def emit(self, record: logging.LogRecord) -> None:
        self.names.append(str(record.args[0] if isinstance(record.args, tuple) else record.msg))


@contextmanager
def names_on_the_route() -> Iterator[list[str]]:
    """Collect the names of functions that are called once per replica inside the context."""
    names: list[str] = []
    handler = _Names(names)
    logger = logging.getLogger("gpusim.maps")
    logger.addHandler(handler)
    propagate, logger.propagate = logger.propagate, False
    try:
        with per_replica_route(report=True):
            yield names
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


def check(function: Callable[..., Any], *operands: Any, batched: bool | None = True) -> Outcome:
    """Assert that batched rules and the per-replica route give the same bits, shapes and dtypes.

    Args:
        function: a function of NumPy calls.
        operands: `Operand`s, and other values.
        batched: True if batched rules must suffice, False if the function must be called once per
            replica, None for either. An error may always come from the call per replica.
    """
    with names_on_the_route() as names:
        found = outcome(function, operands)
    expected = outcome(function, operands, force=True)
    assert found.bits() == expected.bits(), _difference(found, expected)
    if batched is not None and found.error is None:
        assert (not names) == batched, f"called once per replica: {names}"
    return found


def _difference(found: Outcome, expected: Outcome) -> str:
    """Describe how the batched result differs from that of one replica after the other."""
    if found.error or expected.error or len(found.leaves) != len(expected.leaves):
        return f"{_brief(found)} instead of {_brief(expected)}"
    for one, other in zip(found.leaves, expected.leaves, strict=True):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return f"{one.shape} {one.dtype} instead of {other.shape} {other.dtype}"
        places = np.argwhere((one != other) & ~((one != one) & (other != other)))
        if len(places):
            here = tuple(places[0])
            return f"{one[here]!r} instead of {other[here]!r} at {here}; {len(places)} in all"
    return "signs of zeros differ"


def _brief(result: Outcome) -> str:
    return repr(result.error) if result.error else f"{len(result.leaves)} results"
