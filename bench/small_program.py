"""Small calls in a process of their own: `python bench/small_program.py`, with gpusim on the path.

Reads lines of JSON, {"case": name, "repeats": n}, and answers each with the seconds of n calls, or
with the number of Python calls that one call makes for n = 0. Runs with this checkout of gpusim and
with older ones.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import numpy as np

REPLICAS, ELEMENTS = 8, 16
LEAVES, LEAF = 60, 64
PMAP_REPLICAS, WIDTH = 64, 128
STEP_REPLICAS, BATCH, FEATURES = 4, 4, 4


def psum() -> tuple[Callable[[], Any], list[str]]:
    """A psum of 8 x 16 float32 under vmap, made anew; all its Python calls count."""
    import gpusim
    from gpusim import lax

    x = np.linspace(-1, 1, REPLICAS * ELEMENTS, dtype=np.float32).reshape(REPLICAS, ELEMENTS)
    return lambda: gpusim.vmap(lambda x: lax.psum(x, "i"), axis_name="i")(x), [""]


def add_reduce() -> tuple[Callable[[], Any], list[str]]:
    """The same sum by NumPy."""
    x = np.linspace(-1, 1, REPLICAS * ELEMENTS, dtype=np.float32).reshape(REPLICAS, ELEMENTS)
    return partial(np.add.reduce, x), [""]


def psum_of_leaves() -> tuple[Callable[[], Any], list[str]]:
    """A psum of a tree of small leaves under vmap; all its Python calls count."""
    import gpusim
    from gpusim import lax

    total = gpusim.vmap(lambda tree: lax.psum(tree, "i"), out_axes=None, axis_name="i")
    return partial(total, _leaves()), [""]


def add_reduce_of_leaves() -> tuple[Callable[[], Any], list[str]]:
    """The same sums by NumPy."""
    leaves = _leaves()
    return lambda: [np.add.reduce(x) for x in leaves], [""]


def _leaves() -> list[Any]:
    x = np.linspace(-1, 1, REPLICAS * LEAF, dtype=np.float32).reshape(REPLICAS, LEAF)
    return [x + place for place in range(LEAVES)]


def layers(x: Any) -> Any:
    """A program of five NumPy calls without BLAS, whose own threads would be measured."""
    y = np.sin(x)
    return np.tanh(np.exp(y * y)).sum(0)


def threads() -> tuple[Callable[[], Any], list[str]]:
    """A pmap of that program over 64 replicas; the caller's Python calls count."""
    import gpusim

    return partial(gpusim.pmap(layers), _matrices()), [""]


def loop() -> tuple[Callable[[], Any], list[str]]:
    """The same by a Python loop."""
    x = _matrices()
    return lambda: np.stack([layers(row) for row in x]), [""]


def threads_meet() -> tuple[Callable[[], Any], list[str]]:
    """The same, followed by a psum, in which each thread waits for all others."""
    import gpusim
    from gpusim import lax

    def replica(x: Any) -> Any:
        y = layers(x)
        return y - lax.psum(y, "i")

    return partial(gpusim.pmap(replica, "i"), _matrices()), [""]


def loop_and_sum() -> tuple[Callable[[], Any], list[str]]:
    """The same by a Python loop."""
    x = _matrices()

    def run() -> Any:
        y = np.stack([layers(row) for row in x])
        return y - y.sum(0)

    return run, [""]


def _matrices() -> Any:
    rng = np.random.default_rng(0)
    return rng.normal(size=(PMAP_REPLICAS, WIDTH, WIDTH)).astype(np.float32) / WIDTH


def step() -> tuple[Callable[[], Any], list[str]]:
    """A PopTorch step of a Linear with SGD on four replicas; gpusim's Python calls count."""
    import torch

    import gpusim
    from gpusim import fallback, poptorch

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(FEATURES, FEATURES)

        def forward(self, x: Any, y: Any) -> Any:
            out = self.linear(x)
            return out, torch.nn.functional.mse_loss(out, y)

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Model()
    options = poptorch.Options().replicationFactor(STEP_REPLICAS)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, options, optimizer)
    x, y = torch.randn(2, STEP_REPLICAS * BATCH, FEATURES)
    ours = [package.__path__[0] for package in (gpusim, fallback)]
    return lambda: training(x, y), ours


CASES = {
    "psum": psum,
    "np.add.reduce": add_reduce,
    "psum of leaves": psum_of_leaves,
    "np.add.reduce of leaves": add_reduce_of_leaves,
    "pmap": threads,
    "loop": loop,
    "pmap, psum": threads_meet,
    "loop, sum": loop_and_sum,
    "step": step,
}


def python_calls(call: Callable[[], Any], folders: list[str]) -> int:
    """How many Python functions of files in these folders a call enters, after two others."""
    count = 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        file = frame.f_code.co_filename
        count += event == "call" and any(file.startswith(folder) for folder in folders)

    call()
    call()
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


def timed(call: Callable[[], Any], repeats: int) -> list[float]:
    """The seconds of each call."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    """Answer until standard input ends."""
    calls: dict[str, tuple[Callable[[], Any], list[str]]] = {}
    for line in sys.stdin:
        command = json.loads(line)
        name, repeats = command["case"], command["repeats"]
        try:
            if name not in calls:
                calls[name] = CASES[name]()
            call, folders = calls[name]
            answer: Any = timed(call, repeats) if repeats else python_calls(call, folders)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"[:160]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
