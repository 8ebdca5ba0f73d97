"""The suites' cases on arrays of a GPU's library, CuPy or the stand-in for it, beside NumPy.
Wrap what a case calls, and its NumPy arrays go to the device and its results come back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, SimpleNamespace
from typing import Any

import numpy as np
import optree
import pytest

from gpusim import collectives
from gpusim.collectives import Result
from gpusim.collectives.record import Collective as Record
from gpusim.libraries import on_device
from gpusim.maps import MappedArray
from tests.oracles import programs, replicated


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
        return Collective(self.library, self.function.transpose)

    def __call__(self, *args: Any, **options: Any) -> Any:
        given = [_as_arrays(self.library, argument) for argument in args]
        named = {
            name: _as_arrays(self.library, value) if name in DATA else value
            for name, value in options.items()
        }
        if not any(map(_is_there, (*given, *named.values()))):
            return self.function(*args, **options)  # of Python's numbers
        return self._back(self.function(*given, **named))

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


def _is_there(value: Any) -> bool:
    return on_device(value[0] if isinstance(value, list) and value else value)


def _as_arrays(library: Library, value: Any) -> Any:
    """An array, or a list of arrays, on the device; what collectives make of numbers stays."""
    if isinstance(value, np.ndarray):
        if value.size and 0 in value.strides:  # one value for all stays one
            once = value[tuple(slice(None) if stride else slice(1) for stride in value.strides)]
            return np.broadcast_to(library.to_device(once.copy()), value.shape)
        return library.to_device(value)
    arrays = isinstance(value, list) and value and isinstance(value[0], (np.ndarray, np.generic))
    if arrays:
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


def chooses_by_cupy(program: programs.Program) -> bool:
    """Whether pmap's replicas choose among bfloat16 values: CuPy's `where` makes them float32."""
    steps = {step.function for step in program.steps}
    return "on_even" in steps and "bfloat16" in str(program.tree)


# Functions of mapped operands.


def check_on(library: Library) -> Callable[..., Any]:
    """`replicated.check` for the device: NumPy's results, without the per-replica route."""

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
            excused(found.error, library.lacking)
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
    entries = replicated.new_axes(tuple(replicated.SIZES), tuple(replicated.SIZES.values()))
    for entry in entries:
        entry.like = library.to_device(np.zeros(1))
    with replicated.extend_axis_environment(entries):
        values = [item.on(entries) if isinstance(item, OnDevice) else item for item in operands]
        try:
            leaves, _ = replicated.trees.flatten(function(*values))
        except Exception as error:
            return replicated.Outcome(error=error)
        return replicated.Outcome(tuple(_whole(library, leaf, entries) for leaf in leaves))


def _whole(library: Library, leaf: Any, entries: Any) -> Any:
    if not isinstance(leaf, MappedArray):
        return leaf
    whole = replicated.lead_full(leaf, entries)
    if not leaf.mapped_axes and not on_device(whole):  # a constant of the case itself
        return np.array(whole)
    return np.array(back(library, whole, "a mapped result"))


def excused(error: Exception, lacking: Sequence[str]) -> None:
    """Only functions that CuPy lacks, and NumPy arrays in the case itself, may be refused."""
    if lacking or isinstance(error, NotImplementedError):
        return
    text = str(error)
    if "two libraries" in text or any(words in text for words in CUPYS_WORDS):
        return
    raise AssertionError(f"refused on the device: {error!r}") from error


CUPYS_WORDS = (
    " lacks ",  # gpusim's own word for what CuPy has not
    "got an unexpected keyword argument",  # where=, initial= and others that CuPy lacks
    "Wrong arguments",
    "Unsupported dtype",
    "too many positional arguments",
    "no implementation found",
    "is not supported",
    "'tuple' object has no attribute 'ndim'",  # lexsort, which takes one array
    "'list' object has no attribute 'ndim'",  # interp between points of the host
    "Python integer -1 out of bounds for uint8",  # where and select, which promote no numbers
    "Cannot cast",
    # Of the real CuPy; docs/cuda.md lists what is behind them.
    "returned NotImplemented",  # ufuncs that it lacks: spacing, vecdot, matvec, vecmat
    "Wrong type",  # logical ufuncs of complex numbers
    "not defined on empty arrays",  # cond
    "zero-size array",  # medians and means of nothing
    "kth(=-1) out of bounds",  # medians of nothing, of CuPy 14.2
    "cannot reshape array of size 0 into shape",  # nanmedians of nothing
    "out of bounds for array of dimension 0",  # prod and cumprod of 0-d arrays along an axis
    "cannot be used for fill",  # assigning an array of NumPy
    "accessing nested subarrays",  # fields of a structured dtype that are arrays
    # A kernel of CuPy's that NVRTC refuses, on the fake too: floats as take's indices, isin of
    # complex numbers in integers, mean(dtype=float) of complex numbers, nanmean of bfloat16.
    "detected in the compilation of",
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
    from tests.cuda import device_arrays

    with device_arrays.installed() as counts:
        yield Library(
            "stand-in",
            device_arrays.to_device,
            lambda array: array._host.copy(),
            exact=True,
            lacking=counts.lacking,
        )


# The suites.


def on_the_device(
    patch: pytest.MonkeyPatch, library: Library, mapping: Sequence[Any], stacked: Sequence[Any]
) -> None:
    """The modules' tests check, and call collectives, on the device."""
    for module in mapping:
        patch.setattr(module, "check", check_on(library))
    for module in stacked:
        for name, value in list(vars(module).items()):
            if value is collectives:
                patch.setattr(module, name, Collectives(library))
            elif isinstance(value, Record):
                patch.setattr(module, name, Collective(library, value))


NUMPYS_OWN = (
    "read_only",  # a GPU's arrays are not
    "view",  # results come back as copies, in which sharing is not seen
    "by_reference",
    "returned_as_it_is",
    "is_a_broadcast",
    "stored_once",
    "look_like",
    "scalars_come_out",  # of replicas, as 0-d arrays: NumPy's scalars, not CuPy's
    "axis_index",
    "change_nothing",
)


def cases_of(modules: Sequence[Any], leave_out: Sequence[str] = ()) -> dict[str, Any]:
    """The modules' tests that use what `on_the_device` replaces, and their fixtures."""
    found: dict[str, Any] = {}
    for module in modules:
        for name, value in vars(module).items():
            if type(value).__name__ == "FixtureFunctionDefinition":
                found[name] = value
            if not name.startswith("test_") or not callable(value):
                continue
            if any(part in name for part in (*leave_out, *NUMPYS_OWN)):
                continue
            if _uses(value, ("check", "collectives", "ragged_all_to_all", "agree", "call")):
                short = module.__name__.rpartition("test_")[2]
                found[name if name not in found else f"{name}_of_{short}"] = value
    return found


def _uses(test: Any, names: Sequence[str]) -> bool:
    inner = getattr(getattr(test, "hypothesis", None), "inner_test", test)
    codes = [inner.__code__]
    while codes:
        code = codes.pop()
        if set(names) & {*code.co_names, *code.co_varnames}:
            return True
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return False
