"""JAX programs with gpusim's sums and without, in turns in one process.

python -m bench.in_jax_program reads cases of `bench.in_jax` as lines of JSON. It answers each with
a line: the timings and the mean CPU seconds of a call by reduction, "" for plain JAX's, and
problems.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gpusim.jax
from bench.in_jax import COMPILE, INSERTED, PSUM
from bench.timing import Timing, interleave, timed
from gpusim import collectives
from gpusim.reduction import as_reduction

P = PartitionSpec
BATCH, LENGTH, WIDTH, HEADS, HIDDEN = 8, 32, 64, 4, 256  # of a block; an MLP has the widths too
RATE = 0.01
TOLERANCE = 0.05  # of a bfloat16's sum, by another order

#: A function and its arguments.
Program = tuple[Callable[..., Any], Sequence[Any]]


def installed(reduction: str) -> AbstractContextManager[Any]:
    """The block in which a participant's programs are compiled."""
    return gpusim.jax.installed(reduction) if reduction else nullcontext()


class Participant:
    """Calls that are timed, by the wall and by the CPU."""

    elsewhere = False

    def __init__(self, call: Callable[[], Any], reduction: str = "") -> None:
        self._call, self._reduction = call, reduction
        self._cpu, self._calls = 0.0, 0

    def run(self, repeats: int) -> list[float]:
        with installed(self._reduction):
            began = time.process_time()
            seconds = timed(self._call, repeats)
            self._cpu += time.process_time() - began
        self._calls += repeats
        return seconds

    @property
    def cpu(self) -> float:
        """CPU seconds of a call, the mean."""
        return self._cpu / self._calls


def answer(given: dict[str, Any]) -> dict[str, Any]:
    prepare = compilation if given["measures"] == COMPILE else execution
    problems, participants = {}, {}
    for reduction in ("", *given["reductions"]):
        try:
            participants[reduction] = prepare(given, reduction)
        except Exception as error:
            problems[reduction] = in_a_line(error)
    found = interleave(participants, given["budget"], (Exception,))
    problems |= {name: text for name, text in found.items() if isinstance(text, str)}
    timings = {name: asdict(timing) for name, timing in found.items() if isinstance(timing, Timing)}
    return {
        "timings": timings,
        "cpu": {name: participants[name].cpu for name in timings},
        "problems": problems,
    }


def in_a_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:160]


# Programs that run


def execution(given: dict[str, Any], reduction: str) -> Participant:
    """The sum of an array with a row for each device, whose result is known to be right."""
    mesh = Mesh(jax.devices(), ("i",))
    dtype = jnp.dtype(given["dtype"])
    shape = (mesh.size, given["size"] // dtype.itemsize)
    rows = np.random.default_rng(0).standard_normal(shape, np.float32).astype(dtype)
    x = jax.device_put(rows, NamedSharding(mesh, P("i")))
    with installed(reduction):
        compiled = jax.jit(RUNNING[given["program"]](mesh)).lower(x).compile()
    result = np.asarray(compiled(x))
    if reduction:
        chosen = as_reduction(reduction, "reduction")
        expected = collectives.psum(rows, reduction=chosen).value
        right = np.array_equal(result.view("u1"), np.asarray(expected).view("u1"))
    else:
        exact = rows.astype(np.float64).sum(0)
        right = np.allclose(result.astype(np.float64), exact, TOLERANCE, TOLERANCE * mesh.size)
    if not right:
        raise AssertionError("wrong result")
    return Participant(lambda: compiled(x).block_until_ready())


def psum(mesh: Mesh) -> Callable[[Any], Any]:
    """The sum that a program calls."""
    return jax.shard_map(
        lambda x: lax.psum(x[0], "i"), mesh=mesh, in_specs=P("i"), out_specs=P(), check_vma=False
    )


def inserted(mesh: Mesh) -> Callable[[Any], Any]:
    """The sum that XLA's partitioner inserts."""
    return lambda x: x.sum(0)


RUNNING = {PSUM: psum, INSERTED: inserted}


# Programs that are compiled


def compilation(given: dict[str, Any], reduction: str) -> Participant:
    make = COMPILING[given["program"]]

    def compile_it() -> Any:
        jax.clear_caches()
        function, arguments = make()
        return jax.jit(function).lower(*arguments).compile()

    return Participant(compile_it, reduction)


def placed(mesh: Mesh, shape: tuple[int, ...], *axes: str | None) -> Any:
    """An argument without values."""
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*axes)))


def sum_of_rows() -> Program:
    mesh = Mesh(jax.devices(), ("i",))
    return lambda x: x.sum(0), [placed(mesh, (mesh.size, WIDTH), "i")]


def grid() -> Mesh:
    return Mesh(np.reshape(jax.devices(), (-1, 2)), ("data", "model"))


def training_step() -> Program:
    """Two layers whose weights are cut along the model's axis, and SGD."""
    mesh = grid()

    def loss(weights: Any, x: Any, y: Any) -> Any:
        return ((jnp.tanh(x @ weights[0]) @ weights[1] - y) ** 2).mean()

    def step(weights: Any, x: Any, y: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(weights, x, y)
        return value, [w - RATE * g for w, g in zip(weights, gradients, strict=True)]

    weights = [
        placed(mesh, (WIDTH, HIDDEN), None, "model"),
        placed(mesh, (HIDDEN, WIDTH), "model", None),
    ]
    return step, [weights, *[placed(mesh, (BATCH * LENGTH, WIDTH), "data")] * 2]


def block_gradient() -> Program:
    """Attention and two layers, with heads and hidden units cut along the model's axis."""
    mesh = grid()

    def normal(x: Any) -> Any:
        return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)

    def loss(weights: Any, x: Any) -> Any:
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = ((normal(x) @ weights[name]).reshape(shape) for name in "qkv")
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / shape[-1] ** 0.5
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        x = x + mixed.reshape(x.shape) @ weights["out"]
        x = x + jax.nn.gelu(normal(x) @ weights["up"]) @ weights["down"]
        return (x**2).mean()

    weights = {name: placed(mesh, (WIDTH, WIDTH), None, "model") for name in "qkv"}
    weights["out"] = placed(mesh, (WIDTH, WIDTH), "model", None)
    weights["up"] = placed(mesh, (WIDTH, HIDDEN), None, "model")
    weights["down"] = placed(mesh, (HIDDEN, WIDTH), "model", None)
    return jax.grad(loss), [weights, placed(mesh, (BATCH, LENGTH, WIDTH), "data")]


COMPILING = {
    INSERTED: sum_of_rows,
    "training step of an MLP": training_step,
    "gradient of a transformer block": block_gradient,
}


def main() -> None:
    # Sums that stay XLA's would be measured as gpusim's.
    warnings.simplefilter("error", gpusim.jax.ReductionWarning)
    for line in sys.stdin:
        try:
            found = answer(json.loads(line))
        except Exception as error:
            found = {"problem": in_a_line(error)}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
