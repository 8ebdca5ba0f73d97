"""JAX programs on the ground of JAX's own tests, which run alike with gpusim installed.

Each module has functions marked `@program`. A program returns a tree of arrays, numbers and texts
(shapes, shardings, messages of errors), or is skipped where JAX lacks what it `needs`. It runs on 8
devices in a process that `python -m tests.jax.ground` starts; `tests/jax/test_ground.py` compares
the results of plain JAX with those under `gpusim.jax.install`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

P = PartitionSpec
DEVICES = 8

#: The programs of all modules that are imported, by `module.function`.
PROGRAMS: dict[str, Program] = {}


@dataclass(frozen=True)
class Program:
    """A function without arguments, and how its results are compared."""

    name: str
    call: Callable[[], Any]
    #: Its values are compared to this many last bits of the largest value of each array, or of 1:
    #: programs sum numbers of about that size.
    last_bits: float = 16.0
    #: Names of JAX's settings, with the values that the program runs under.
    config: dict[str, Any] = field(default_factory=dict)


class Skip(Exception):
    """This JAX lacks what the program is about."""


def program(
    function: Callable[[], Any] | None = None, *, last_bits: float = 16.0, **config: Any
) -> Any:
    """Mark a function as a program: `@program`, or `@program(jax_enable_x64=True)`."""
    if function is None:
        return functools.partial(program, last_bits=last_bits, **config)
    name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
    if name in PROGRAMS:
        raise ValueError(f"two programs are named {name}")
    PROGRAMS[name] = Program(name, function, last_bits, config)
    return function


def needs(*names: str) -> None:
    """Skip the program where JAX lacks a public name, such as "jax.sharding.reshard"."""
    for name in names:
        found: Any = jax
        for part in name.split(".")[1:]:
            if not hasattr(found, part):
                raise Skip(f"this JAX lacks {name}")
            found = getattr(found, part)


def needs_module(name: str) -> None:
    """Skip the program where a module is not installed."""
    if importlib.util.find_spec(name) is None:
        raise Skip(f"{name} is not installed")


def mesh(
    shape: Sequence[int] | int,
    names: Sequence[str] | str,
    *,
    explicit: bool | Sequence[bool] = False,
    order: Sequence[int] | None = None,
) -> Mesh:
    """A mesh over the first devices, or those of `order`, by their numbers.

    `explicit` says which axes are JAX's explicit ones, all or by axis; the others are automatic.
    """
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    names = (names,) if isinstance(names, str) else tuple(names)
    numbers = range(math.prod(shape)) if order is None else order
    devices = np.array([jax.devices()[number] for number in numbers]).reshape(shape)
    each = [explicit] * len(shape) if isinstance(explicit, bool) else explicit
    types = tuple(AxisType.Explicit if known else AxisType.Auto for known in each)
    return Mesh(devices, names, axis_types=types)


def put(x: Any, over: Mesh, *spec: Any) -> Any:
    """The arrays on the mesh's devices, with one sharding: `put(x, mesh, "i", None)`."""
    return jax.device_put(x, NamedSharding(over, P(*spec)))


def values(shape: Sequence[int] | int, dtype: Any = "float32", *, seed: int = 0) -> np.ndarray:
    """Random values, which no two orders of summation sum to the same bits as a rule."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    rng = np.random.default_rng([seed, *shape])
    known = np.dtype(dtype)
    if known.kind in "iu":
        bits = min(8 * known.itemsize - 2, 16)
        return rng.integers(0 if known.kind == "u" else -(2**bits), 2**bits, shape).astype(known)
    if known.kind == "b":
        return rng.integers(0, 2, shape).astype(known)
    x = rng.normal(size=shape)
    if known.kind == "c":
        return (x + 1j * rng.normal(size=shape)).astype(known)
    if known.itemsize == 1 or "int" in known.name:
        return np.rint(2 * x).clip(-3, 3).astype(known)
    return x.astype(known)


def error(function: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """The type and the first line of the error that a call raises."""
    try:
        result = function(*arguments, **options)
        jax.block_until_ready(result)
    except Exception as found:
        return first_line(found)
    return f"no error, and {result!r}"


def first_line(found: BaseException) -> str:
    """The type of an error and its first line, without addresses and numbers of objects."""
    line = next(iter(str(found).splitlines()), "")
    return f"{type(found).__name__}: {re.sub(r'0x[0-9a-f]+', '0x...', line)}"


class Compilations:
    """How many programs XLA has compiled in this process."""

    total = 0

    @classmethod
    def listen(cls, event: str, seconds: float, **options: Any) -> None:
        """Count an event of JAX's."""
        cls.total += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(Compilations.listen)


@contextlib.contextmanager
def compilations() -> Iterator[list[int]]:
    """A block; the list has the number of its compilations afterwards."""
    before, found = Compilations.total, [0]
    yield found
    found[0] = Compilations.total - before


def shards(x: Any) -> list[tuple[int, str, tuple[int, ...]]]:
    """The device, the index and the shape of each shard of an array."""
    return [(each.device.id, str(each.index), each.data.shape) for each in x.addressable_shards]


def float_types() -> list[Any]:
    """The types of numbers whose sums have chosen bits, without those of 64 bits."""
    return [np.float32, np.float16, ml_dtypes.bfloat16, np.complex64]
