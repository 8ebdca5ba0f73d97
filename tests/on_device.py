"""The suites' cases on arrays of a GPU's library, compared with NumPy: CuPy, or the stand-in for it.
Wrap what a case calls, and its NumPy arrays go to the device and its results come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import optree

from gpusim import collectives
from gpusim.collectives import Result
from gpusim.libraries import on_device
from gpusim.mapping import MappedArray
import replicated


@dataclass
class Library:
    """A library of device arrays.

    Attributes:
        to_device, to_host: copies.
        exact: whether its functions, and not gpusim's kernels alone, have NumPy's bits.
        lacking: fills with names of NumPy's functions that were asked for in vain.
    """

    name: str
    to_device: Callable[[np.ndarray], Any]
    to_host: Callable[[Any], np.ndarray]
    exact: bool
    lacking: list[str] = field(default_factory=list)


def moved(library: Library, tree: Any) -> Any:
    """The tree with its NumPy arrays on the device."""
    if isinstance(tree, list | tuple) and not hasattr(tree, "_fields"):
        return type(tree)(moved(library, part) for part in tree)
    if isinstance(tree, dict):
        return {key: moved(library, part) for key, part in tree.items()}
    return library.to_device(tree) if isinstance(tree, np.ndarray) else tree


def back(library: Library, value: Any, what: str) -> np.ndarray:
    """A result on the host; it must have been on the device."""
    assert on_device(value), f"{what} is a {type(value).__name__}, not on the device"
    return library.to_host(value)


# Collectives on stacked arrays and lists.


class Collectives(SimpleNamespace):
    """gpusim.collectives, by way of the device."""

    def __init__(self, library: Library) -> None:
        super().__init__(library=library)
        for name in collectives.__all__:
            found = getattr(collectives, name)
            setattr(self, name, Collective(library, found) if callable(found) else found)
        self.Result = Result
        self.axis_index = collectives.axis_index


class Collective:
    """One of them."""

    def __init__(self, library: Library, function: Callable[..., Any]) -> None:
        self.library, self.function = library, function

    @property
    def transpose(self) -> Collective:
        return Collective(self.library, self.function.transpose)  # type: ignore[attr-defined]

    def __call__(self, *args: Any, **options: Any) -> Any:
        given = [_as_arrays(self.library, argument) for argument in args]
        options = {
            name: _as_arrays(self.library, value) if name in DATA else value
            for name, value in options.items()
        }
        return self._back(self.function(*given, **options))

    def _back(self, result: Any) -> Any:
        if not isinstance(result, Result):
            return tuple(self._back(part) for part in result)
        value, mapped = result
        if isinstance(value, list):
            return Result([back(self.library, part, "a result") for part in value], mapped)
        return Result(back(self.library, value, "the result"), mapped)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)

    def __repr__(self) -> str:
        return repr(self.function)


DATA = ("input_offsets", "send_sizes", "output_offsets", "recv_sizes", "operand", "output", "ct")


def _as_arrays(library: Library, value: Any) -> Any:
    """An array, or a list of arrays, on the device; what collectives make of numbers stays."""
    if isinstance(value, np.ndarray):
        return library.to_device(value)
    if isinstance(value, list) and value and isinstance(value[0], (np.ndarray, np.generic)):
        once = {id(part): library.to_device(np.asarray(part)) for part in value}
        return [once[id(part)] for part in value]
    return value


# Programs of lax in maps.


def run_on(library: Library, run: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """An executor of tests/programs.py, with its argument and its results on the device."""

    def on(program: Any, x: Any) -> Any:
        leaves, structure = optree.tree_flatten(x)
        there = [library.to_device(np.asarray(leaf)) for leaf in leaves]
        results = run(program, optree.tree_unflatten(structure, there))
        return optree.tree_map(
            lambda leaf: library.to_host(leaf) if on_device(leaf) else leaf, results
        )

    return on


# Functions of mapped operands.


def check_on(library: Library) -> Callable[..., Any]:
    """`replicated.check` for the device: each case has NumPy's results there, and needs no route."""

    def check(function: Callable[..., Any], *operands: Any, batched: bool | None = True) -> Any:
        with replicated.names_on_the_route() as usual:
            expected = replicated.outcome(function, operands)
        there = tuple(
            OnDevice(library.to_device(item.data), item.over)
            if isinstance(item, replicated.Operand)
            else moved(library, item)
            for item in operands
        )
        library.lacking.clear()
        with replicated.names_on_the_route() as names:
            found = outcome(library, function, there)
        if found.error is not None and expected.error is None:
            excused(library, found.error)
            return expected
        if expected.error is not None:
            return expected  # CuPy asks for less: it wraps indices, say
        assert found.error is None
        assert len(found.leaves) == len(expected.leaves)
        for mine, other in zip(found.leaves, expected.leaves, strict=True):
            alike(mine, other, library.exact)
        if batched and expected.error is None and not usual:
            assert not names, f"on the per-replica route: {names}"
        return expected

    return check


class OnDevice(replicated.Operand):
    """An operand whose data is on the device."""


def outcome(library: Library, function: Callable[..., Any], operands: Any) -> Any:
    frames = replicated.new_frames(tuple(replicated.SIZES), tuple(replicated.SIZES.values()))
    for frame in frames:
        frame.like = library.to_device(np.zeros(1))
    with replicated.bound(frames):
        values = [item.on(frames) if isinstance(item, OnDevice) else item for item in operands]
        try:
            leaves, _ = replicated.trees.flatten(function(*values))
        except Exception as error:
            return replicated.Outcome(error=error)
        return replicated.Outcome(tuple(_whole(library, leaf, frames) for leaf in leaves))


def _whole(library: Library, leaf: Any, frames: Any) -> Any:
    if not isinstance(leaf, MappedArray):
        return leaf
    return np.array(back(library, replicated.lead_full(leaf, frames), "a mapped result"))


def excused(library: Library, error: Exception) -> None:
    """Nothing but what CuPy has not, and arrays of NumPy in the case itself, may be refused."""
    if library.lacking or isinstance(error, NotImplementedError):
        return
    text = str(error)
    if "two libraries" in text or any(words in text for words in CUPYS_WORDS):
        return
    raise AssertionError(f"refused on the device: {error!r}") from error


CUPYS_WORDS = (
    "got an unexpected keyword argument",  # where=, initial= and such, which CuPy has not
    "Wrong arguments",
    "Unsupported dtype",
    "too many positional arguments",
    "no implementation found",
    "is not supported",
)


def alike(found: Any, expected: Any, exact: bool) -> None:
    """Equal values, shapes and dtypes; up to rounding where floats were added in another order."""
    if not isinstance(expected, np.ndarray):
        assert not isinstance(found, np.ndarray) and found == expected
        return
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    if replicated.bits_of(found) == replicated.bits_of(expected):
        return
    assert expected.dtype.kind not in "biu" or expected.dtype.name == "bfloat16", (found, expected)
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    tolerance = 64 * float(replicated.epsilon(expected.dtype))
    with np.errstate(all="ignore"):
        scale = np.abs(expected.astype(wide))
        scale = float(np.max(scale[np.isfinite(scale)], initial=1.0))
        np.testing.assert_allclose(
            found.astype(wide), expected.astype(wide), rtol=tolerance, atol=tolerance * scale
        )


def standing_in() -> Iterator[Library]:
    """The stand-in, installed as cupy meanwhile."""
    from tests import device_arrays

    with device_arrays.installed() as counts:
        yield Library(
            "stand-in",
            device_arrays.to_device,
            lambda array: array._host.copy(),
            exact=True,
            lacking=counts.lacking,
        )


def patched(module: Any, name: str, value: Any) -> AbstractContextManager[Any]:
    """module.name is `value` meanwhile."""
    from unittest import mock

    return mock.patch.object(module, name, value)
