"""python -m tests.gpu.launches: each kernel once or twice, for compute-sanitizer and ncu.

Every array is an allocation of its own, without CuPy's memory pool: an access outside an array is
one outside an allocation, and memory is uninitialised until it is written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from bench import gpu
from gpusim import Reduction, Wire, collectives, fallback
from gpusim.cuda import fold, ragged_copy, round_to
from gpusim.cuda.launch import require_cupy, update_at
from tests.contract.test_fold_passed_on import passed_on, subtrees
from tests.contract.test_ragged_copy import random_segments
from tests.contract.test_schedules import FOLDS, schedule
from tests.cuda.host_cuda.values import moderate, same
from tests.gpu.cupy_arrays import to_device, to_host
from tests.gpu.smoke import NARROW, ORDERS, WIRES, dtype_of

Case = tuple[str, Callable[[], tuple[Any, np.ndarray]]]


def folded(shape: tuple[int, ...], dtype: str = "float32", **how: Any) -> Case:
    def run() -> tuple[Any, np.ndarray]:
        x = moderate(shape, dtype_of(dtype))
        return fold(to_device(x), **how), fallback.fold(x, **how)

    return f"fold {shape} {dtype} {how or ''}", run


def folded_as(what: str, take: Callable[[Any], Any], order: str) -> Case:
    """A fold of members that are a view, or a list."""

    def run() -> tuple[Any, np.ndarray]:
        x = moderate((9, 4099), np.float32)
        return fold(take(to_device(x)), order=order), fallback.fold(take(x), order=order)

    return f"fold of {what}, {order}", run


def in_parts(order: str) -> Case:
    """A fold that is continued from an unrounded partial result."""

    def run() -> tuple[Any, np.ndarray]:
        x = moderate((12, 3, 1025), np.float16)
        how: dict[str, Any] = {"rounding": "stochastic", "seed": 5, "batch_ndim": 1}
        if order == "tree":
            found = subtrees(to_device(x), 4, fold, **how)
        else:
            found = passed_on(to_device(x), [2, 7], order, fold, **how)
        return found, fallback.fold(x, order=order, **how)

    return f"fold in parts, {order}", run


def rounded(dtype: str, rounding: str) -> Case:
    def run() -> tuple[Any, np.ndarray]:
        x = moderate((7001,), np.float32)
        how: dict[str, Any] = {"rounding": rounding, "seed": 4}
        return round_to(to_device(x), dtype_of(dtype), **how), fallback.round_to(
            x, dtype_of(dtype), **how
        )

    return f"round to {dtype}, {rounding}", run


def copied(row: int) -> Case:
    def run() -> tuple[Any, np.ndarray]:
        random = np.random.default_rng(row)
        sources = random.integers(0, 100, (3, 400, row)).astype(np.float32)
        segments = random_segments(random, 3, 400, 90)
        found, expected = to_device(np.zeros_like(sources)), np.zeros_like(sources)
        ragged_copy(to_device(sources), found, segments)
        fallback.ragged_copy(sources, expected, segments)
        return found, expected

    return f"ragged copy of rows of {row}", run


def sent(how: Reduction) -> Case:
    """A sum with a wire or in levels."""

    def run() -> tuple[Any, np.ndarray]:
        x = moderate((5, 777), np.float32)
        found = collectives.psum(to_device(x), reduction=how).value
        return found, collectives.psum(x, reduction=how).value

    return f"sum, {how}", run


def scattered(dtype: str) -> Case:
    """Additions at repeated places."""

    def run() -> tuple[Any, np.ndarray]:
        x, values = (moderate((size,), dtype_of(dtype)) for size in (100, 900))
        places = np.random.default_rng(6).integers(0, 50, 900)
        found, expected = to_device(x), x.copy()
        update_at(np.add, found, to_device(places), to_device(values))
        np.add.at(expected, places, values)
        return found, expected

    return f"scatter of {dtype}", run


def cases() -> Iterator[Case]:
    """Every kernel and code path, at sizes that a hundredfold slower GPU ends with."""
    every: dict[str, Any] = {"rounding": "stochastic", "accumulate": "float16", "seed": 3}
    for order in ORDERS:
        yield folded((8, 4099), order=order)
        yield folded((70, 333), "float16", order=order)
        yield folded((9, 4, 6, 37), order=order, batch_ndim=2, divisor=9)
    yield folded((9, 4099), "bfloat16")
    for dtype in ("float8_e4m3fn", "float8_e5m2", "float64", "int8", "int64"):
        yield folded((9, 517), dtype)
    for dtype in ("float16", "float8_e4m3fn"):
        yield folded((9, 517), dtype, **every)
    yield folded((9, 517), "float16", **(every | {"order": "tree"}))
    yield folded((5000, 33))
    yield folded((5000, 33), order="tree")
    yield folded((5000, 33), "int32")
    yield folded((5000, 33), op="max")
    for op in ("min", "prod", "logical_and", "logical_or"):
        yield folded((11, 1234), op=op)
    for order in ("linear", "tree"):
        yield folded_as("every third element", lambda x: x[:, ::3], order)
        yield folded_as("unaligned rows", lambda x: x[:, 1:], order)
        yield folded_as("a list", list, order)
    for order in ("linear", "reverse", "tree"):
        yield in_parts(order)
    for dtype in NARROW:
        yield rounded(dtype, "nearest")
    yield rounded("float16", "stochastic")
    for row in (1, 3, 16, 256):
        yield copied(row)
    for wire, order in zip(WIRES, ("linear", "reverse", "tree", "ring"), strict=True):
        yield sent(Reduction(order=order, wire=wire, seed=3))
    by_block = Reduction(order="ring", wire=Wire("float8_e4m3fn", "amax", 100))  # no whole chunks
    yield sent(by_block)
    yield sent(Reduction(order="tree", groups_of=2, across=by_block))
    for dtype in ("float32", "int8", "bfloat16", "float8_e4m3fn"):
        yield scattered(dtype)
    for name in ("NCCL's ring", "a binary tree"):
        yield folded((7, 5003), order=schedule(FOLDS[name]))


def profiled(shift: int) -> None:
    """Six folds of the size of the benchmark's."""
    cupy = require_cupy()
    for case in gpu.six_folds():
        call = gpu.prepare(case, cupy, shift, ()).calls[gpu.OURS]
        call()
        cupy.cuda.get_current_stream().synchronize()
        print(case.name, flush=True)
        del call


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.launches", description=__doc__)
    parser.add_argument("--profile", action="store_true", help="six large folds instead")
    parser.add_argument("--shift", type=int, default=0, help="divide their sizes by 2 ** this")
    given = parser.parse_args(arguments)
    require_cupy().cuda.set_allocator(None)
    if given.profile:
        profiled(given.shift)
        return 0
    return judge(cases())


def judge(chosen: Iterable[Case]) -> int:
    """Run the cases, and say of each whether its bits are the CPU's: 1 if one has failed, else 0.

    The fake CUDA finds writes beyond an array when the array is freed, where nothing can be raised.
    """
    ignored: list[str] = []
    usual, sys.unraisablehook = (
        sys.unraisablehook,
        lambda found: ignored.append(str(found.exc_value)),
    )
    failed = False
    try:
        for name, run in chosen:
            try:
                found, expected = run()
                same(to_host(found), expected)
                said = "equal"
            except Exception as error:
                said = "DIFFERENT" if isinstance(error, AssertionError) else repr(error)
            found = None  # and its memory is freed
            said = ", ".join([said, *ignored])
            ignored.clear()
            failed |= said != "equal"
            print(f"{name}: {said}", flush=True)
    finally:
        sys.unraisablehook = usual
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
