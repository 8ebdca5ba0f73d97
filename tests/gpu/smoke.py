"""python -m tests.gpu.smoke: what has to be right before anything else is worth its time.

About a minute: versions, subnormals, the bits of folds, rounding and copies, maps, and a first look
at the speed. Each finding is printed as a line of JSON as soon as it is known. A failed check does
not stop the others. The exit code is 1 if one has failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np

import gpusim
from bench import gpu, machine
from gpusim import fallback, lax
from gpusim.cuda import fold, ragged_copy, round_to
from gpusim.cuda.launch import require_cupy
from tests.cuda.host_cuda.values import same
from tests.gpu.cupy_arrays import to_device, to_host
from tests.gpu.results import record

NARROW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
DTYPES = ("float32", "float64", *NARROW)
ORDERS = ("linear", "reverse", "tree", "ring", "exact")
ROUNDINGS = ("nearest", "stochastic")
# A value of many chunks; more members than are loaded at once; as many as are split over blocks.
SHAPES = ((8, 4099), (70, 333), (5000, 33))
LINES = 8  # of a long list of failures
Found = dict[str, Any]


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def compare(what: object, compute: Callable[[], Any], expected: np.ndarray) -> str | None:
    """None if the bits are equal, else what differs, or why it could not be computed."""
    try:
        same(to_host(compute()), expected)
    except AssertionError:
        return str(what)
    except Exception as error:
        return f"{what}: {type(error).__name__}: {error}"[:200]
    return None


def judge(differing: Sequence[str | None]) -> Found:
    wrong = [what for what in differing if what]
    return {"ok": not wrong, "cases": len(differing), "wrong": wrong[:LINES]}


# --- checks -------------------------------------------------------------------------------------


def versions() -> Found:
    """The GPU and all that takes part."""
    return {"ok": True, **gpu.describe(require_cupy()), "python": sys.version.split()[0]}


def subnormals() -> Found:
    """Sums and extremes of subnormal numbers; of 8-bit formats, of every code."""
    differing = []
    for name in DTYPES:
        dtype = dtype_of(name)
        codes = np.arange(256) if dtype.itemsize == 1 else np.arange(1, 200)
        every = codes.astype(f"u{dtype.itemsize}").view(dtype)
        x = np.stack([every, every])
        for op in ("sum", "max", "min"):
            expected = fallback.fold(x, op=op)
            differing.append(compare((name, op), partial(fold, to_device(x), op=op), expected))
    return judge(differing)


def folds(small: bool) -> Found:
    """Folds of stacked members and of lists, against the CPU's."""
    cases = [*product(DTYPES, ORDERS, ROUNDINGS, SHAPES)]
    cases += product(["int32"], ORDERS, ["nearest"], SHAPES)

    def run(case: tuple[str, str, str, tuple[int, int]]) -> str | None:
        name, order, rounding, shape = case
        random = np.random.default_rng(1)
        x = (random.normal(size=shape) * 3).astype(np.float32)
        x[random.random(x.shape) < 0.05] *= np.float32(1e-39)
        x = x.astype(dtype_of(name))
        how: dict[str, Any] = {"order": order, "rounding": rounding, "seed": 3}
        if rounding == "stochastic":
            how["accumulate"] = "float16"
        expected = fallback.fold(x, **how)
        stacked = compare(case, partial(fold, to_device(x), **how), expected)
        members = [to_device(row) for row in x]
        return stacked or compare((*case, "list"), partial(fold, members, **how), expected)

    # Each thread compiles a kernel; with one, NVRTC takes minutes.
    with ThreadPoolExecutor(min(14, machine.cores())) as threads:
        return judge(list(threads.map(run, cases[::7] if small else cases)))


def rounding() -> Found:
    """Conversions to every format."""
    x = (np.random.default_rng(2).normal(size=70_001) * 3).astype(np.float32)
    differing = []
    for name, how in product(NARROW, ROUNDINGS):
        options: dict[str, Any] = {"dtype": dtype_of(name), "rounding": how, "seed": 4}
        expected = fallback.round_to(x, **options)
        differing.append(compare((name, how), partial(round_to, to_device(x), **options), expected))
    return judge(differing)


def ragged() -> Found:
    """Segments of rows, from two replicas to two."""
    sources = np.random.default_rng(3).random((3, 400, 16)).astype(np.float32)
    segments = np.array([[0, 3, 2, 7, 90], [1, 0, 0, 300, 100]])
    found, expected = to_device(np.zeros_like(sources)), np.zeros_like(sources)
    ragged_copy(to_device(sources), found, segments)
    fallback.ragged_copy(sources, expected, segments)
    return judge([compare("rows", lambda: found, expected)])


def maps() -> Found:
    """Collectives of vmap and pmap, and additions at repeated indices."""
    x = np.random.default_rng(4).normal(size=(6, 1000)).astype(np.float32)

    def exchange(v: Any) -> Any:
        return lax.psum(v * 2, "i") + lax.ppermute(v, "i", [(0, 1)]) + lax.axis_index("i")

    def scatter(v: Any) -> Any:
        return v.at[np.array([0, 2, 2])].add(1.0)

    on_gpu, vmap = to_device(x), gpusim.vmap(exchange, axis_name="i")
    return judge([
        compare("vmap", lambda: vmap(on_gpu), vmap(x)),
        compare("pmap", lambda: gpusim.pmap(exchange, "i")(on_gpu), vmap(x)),
        compare("at add", lambda: gpusim.vmap(scatter)(on_gpu), gpusim.vmap(scatter)(x)),
    ])  # fmt: skip


def speed(shift: int) -> Found:
    """Folds beside the copy: a first look, in which only the bits decide."""
    found: Found = {"ok": True}
    for case in gpu.first_look():
        outcome = gpu.attempt(case, require_cupy(), shift, seconds=0.05, peers=())
        if outcome.error is not None:
            found[case.name] = outcome.error
            continue
        found["ok"] &= outcome.bits == "equal"
        ours = outcome.entries[gpu.OURS]
        found[case.name] = {
            "us": round(ours.timing.min * 1e6, 1),
            "host us": round(ours.host * 1e6, 1),
            "of the copy": round(ours.fraction, 2),
            "bits": outcome.bits,
        }
    return found


# --- running ------------------------------------------------------------------------------------


def checks(shift: int) -> dict[str, Callable[[], Found]]:
    return {
        "versions": versions,
        "subnormals": subnormals,
        "folds": partial(folds, small=shift > 0),
        "rounding": rounding,
        "ragged copy": ragged,
        "maps": maps,
        "speed": partial(speed, shift),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.smoke", description=__doc__)
    parser.add_argument("--shift", type=int, default=0, help="divide sizes by 2 ** this")
    given = parser.parse_args(arguments)
    began, failed = time.monotonic(), False
    for name, check in checks(given.shift).items():
        try:
            found = check()
        except Exception as error:
            where = [f"{f.name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)[-4:]]
            said = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            found = {"ok": False, "error": said, "where": where}
        line = {"check": name, "t": round(time.monotonic() - began, 1), **found}
        print(json.dumps(line, default=str), flush=True)
        record(**line)
        failed |= not found["ok"]
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
