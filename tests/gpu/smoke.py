"""python -m tests.gpu.smoke: what has to be right before anything else is worth its time.

About a minute: versions, the bits of every kind of kernel, maps, tensors of PyTorch, and a first
look at the speed; the many folds come late, as the run may be cut. Each finding is printed as a
line of JSON as soon as it is known. A failed check does not stop the others. The exit code is 1 if
one has failed.
"""

from __future__ import annotations

import argparse
import importlib
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
from gpusim import Reduction, Wire, collectives, fallback, lax
from gpusim.cuda import fold, ragged_copy, round_to
from gpusim.cuda.launch import require_cupy, update_at
from tests.cuda.host_cuda.values import same
from tests.gpu.cupy_arrays import to_device, to_host
from tests.gpu.results import record

NARROW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
DTYPES = ("float32", "float64", *NARROW)
ORDERS = ("linear", "reverse", "tree", "ring", "exact")
ROUNDINGS = ("nearest", "stochastic")
# A value of many chunks; more members than are loaded at once; as many as are split over blocks.
SHAPES = ((8, 4099), (70, 333), (5000, 33))
#: One of each kind: a dtype, scales of blocks, of rows by "ends", and random numbers.
WIRES = (
    Wire("bfloat16"),
    Wire("float8_e4m3fn", "amax", 32),
    Wire("int8", "even", "row", at="ends"),
    Wire("float8_e5m2", "floor", rounding="stochastic"),
)
RANKS = 3
LINES = 8  # of a long list of failures
Found = dict[str, Any]


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def random_values(shape: tuple[int, ...], name: str) -> np.ndarray:
    x = np.random.default_rng(5).normal(size=shape) * 3
    dtype = dtype_of(name)
    return (x + 1j * x[::-1]).astype(dtype) if dtype.kind == "c" else x.astype("f4").astype(dtype)


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


def in_threads(run: Callable[[Any], str | None], cases: Sequence[Any]) -> Found:
    """Each thread compiles a kernel; with one, NVRTC takes minutes."""
    with ThreadPoolExecutor(min(14, machine.cores())) as threads:
        return judge(list(threads.map(run, cases)))


# --- checks -------------------------------------------------------------------------------------


def versions() -> Found:
    """The GPU and all that takes part."""
    cupy, python = require_cupy(), sys.version.split()[0]
    nvrtc = ".".join(map(str, cupy.cuda.nvrtc.getVersion()))
    return {"ok": True, **gpu.describe(cupy), "python": python, "nvrtc": nvrtc}


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

    return in_threads(run, cases[::7] if small else cases)


def wires() -> Found:
    """Sums of which every part is sent, by every order, and conversions to wires."""

    def run(case: tuple[str, Wire, str]) -> str | None:
        name, wire, order = case
        x = random_values((5, 777), name)
        sent = compare(case, lambda: gpusim.round_to(to_device(x), wire), gpusim.round_to(x, wire))
        return sent or summed(case, x, Reduction(order=order, wire=wire, seed=3))

    cases = product(("float32", "bfloat16"), WIRES, ("linear", "reverse", "tree", "ring"))
    return in_threads(run, [*cases])


def summed(what: object, x: np.ndarray, how: Reduction) -> str | None:
    expected = collectives.psum(x, reduction=how).value
    return compare(what, lambda: collectives.psum(to_device(x), reduction=how).value, expected)


def levels() -> Found:
    """Sums of groups' sums, with a wire in both levels, in one, and in none."""

    def run(case: tuple[Wire | None, Wire | None, str]) -> str | None:
        inner, outer, order = case
        across = Reduction(order=order, wire=outer, seed=3)
        how = Reduction(order=order, wire=inner, seed=3, groups_of=2, across=across)
        return summed(case, random_values((5, 777), "float32"), how)

    some = (None, WIRES[1])
    return in_threads(run, [*product(some, some, ("linear", "tree", "ring"))])


def exact() -> Found:
    """Exact sums of numbers that cancel."""

    def run(name: str) -> str | None:
        x = random_values((70, 333), name)
        x[35:] = -x[:35]
        x[3] = 2.0**-9
        return compare(
            name, lambda: fold(to_device(x), order="exact"), fallback.fold(x, order="exact")
        )

    return in_threads(run, DTYPES)


def logical() -> Found:
    """Operators of truth, of values of every size."""

    def run(case: tuple[str, str]) -> str | None:
        name, op = case
        x = random_values((11, 1234), name)
        x[:, ::3] = 0
        x[4, ::5] = 0
        return compare(case, lambda: fold(to_device(x), op=op), fallback.fold(x, op=op))

    names = ("int8", "float16", "float32", "float64", "complex64", "complex128")
    return in_threads(run, [*product(names, ("logical_and", "logical_or"))])


def scatter() -> Found:
    """Additions and maxima at repeated places, in the places' order."""
    places = np.random.default_rng(6).integers(0, 50, 900)

    def run(case: tuple[str, np.ufunc]) -> str | None:
        name, ufunc = case
        x, values = random_values((100,), name), random_values((900,), name)
        on_gpu, expected = to_device(x), x.copy()
        ufunc.at(expected, places, values)

        def update() -> Any:
            update_at(ufunc, on_gpu, to_device(places), to_device(values))
            return on_gpu

        return compare((name, ufunc.__name__), update, expected)

    names = ("float32", "float16", "int8", "bfloat16", "float8_e4m3fn", "complex64")
    return in_threads(run, [*product(names, (np.add, np.maximum))])


def torch(device: str = "cuda") -> Found:
    """The sum of tensors of a device on simulated ranks has the bits of that on the host."""
    try:
        library: Any = importlib.import_module("torch")
    except Exception as error:  # `needs` says so, too
        return {"ok": True, "cases": 0, "not run": f"{type(error).__name__}: {error}"[:200]}
    if device == "cuda" and not library.cuda.is_available():
        return {"ok": True, "cases": 0, "not run": "PyTorch sees no GPU"}
    dist: Any = importlib.import_module("torch.distributed")
    launch = importlib.import_module("gpusim.torch.distributed").launch

    def program(rank: int, where: str, dtype: Any) -> Any:
        dist.init_process_group()
        generator = library.Generator().manual_seed(rank)
        x = library.randn(1000, generator=generator).to(dtype).to(where)
        dist.all_reduce(x)
        return x.cpu()

    wrong = []
    for dtype, order in product((library.float32, library.bfloat16), ("ring", "tree")):
        found, expected = (
            launch(program, RANKS, (where, dtype), reduction=order) for where in (device, "cpu")
        )
        equal = all(map(library.equal, found, expected))
        wrong.append(None if equal else f"{dtype} {order}")
    return judge(wrong)


def rounding() -> Found:
    """Conversions to every format, to nearest and with random numbers."""
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
    """Collectives of vmap and pmap, and writes at indices."""
    x = np.random.default_rng(4).normal(size=(6, 1000)).astype(np.float32)

    def exchange(v: Any) -> Any:
        return lax.psum(v * 2, "i") + lax.ppermute(v, "i", [(0, 1)]) + lax.axis_index("i")

    def written(v: Any) -> Any:
        places = np.array([0, 2, 2])
        return v.at[places].add(1.0).at[places].max(v[:3]).at[5:].multiply(2).at[1].set(v[0])

    on_gpu, vmap = to_device(x), gpusim.vmap(exchange, axis_name="i")
    return judge([
        compare("vmap", lambda: vmap(on_gpu), vmap(x)),
        compare("pmap", lambda: gpusim.pmap(exchange, "i")(on_gpu), vmap(x)),
        compare("at", lambda: gpusim.vmap(written)(on_gpu), gpusim.vmap(written)(x)),
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
        "rounding": rounding,
        "ragged copy": ragged,
        "maps": maps,
        "scatter": scatter,
        "logical": logical,
        "exact": exact,
        "wires": wires,
        "levels": levels,
        "torch": torch,
        "folds": partial(folds, small=shift > 0),
        "speed": partial(speed, shift),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.smoke", description=__doc__)
    parser.add_argument("--shift", type=int, default=0, help="divide sizes by 2 ** this")
    parser.add_argument("--skip", action="append", default=[], help="leave this check out")
    given = parser.parse_args(arguments)
    began, failed = time.monotonic(), False
    for name, check in checks(given.shift).items():
        if name in given.skip:
            continue
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
