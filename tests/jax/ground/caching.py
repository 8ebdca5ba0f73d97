"""Programs are compiled once: caches in memory and on disk, threads, and settings that matter."""

from __future__ import annotations

import concurrent.futures
import gc
import tempfile
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from tests.jax.ground import P, compilations, mesh, program, put, values


def grid(x: Any, *spec: Any) -> Any:
    """An array on a mesh of 4 by 2, sharded over x and y unless said otherwise."""
    return put(x, mesh((4, 2), ("x", "y")), *(spec or ("x", "y")))


@program
def the_second_call() -> Any:
    f = jax.jit(lambda x: x - x.mean(0))
    x = grid(values((8, 4)))
    counts = []
    for _ in range(3):
        with compilations() as count:
            x = f(x)
        counts += count
    return x, counts


@program
def shapes_types_and_shardings_are_compiled_apart() -> Any:
    traced = 0

    @jax.jit
    def f(x: Any) -> Any:
        nonlocal traced
        traced += 1
        return x.sum(0)

    given = [
        grid(values((8, 4))), grid(values((16, 4))), grid(values((8, 4), "float16")),
        grid(values((8, 4)), "y", "x"), grid(values((8, 4)), None), values((8, 4)),
    ]  # fmt: skip
    with compilations() as count:
        found = [f(x) for x in given]
    first = traced
    with compilations() as again:
        for x in given:
            f(x)
    return found, count, again, first, traced


@program
def functions_made_again() -> Any:
    def f(x: Any) -> Any:
        return x.sum(0)

    x = grid(values((8, 4)))
    with compilations() as count:
        found = [jax.jit(f)(x) for _ in range(4)]
    return found, count


@program
def cleared_caches() -> Any:
    f = jax.jit(lambda x: x.sum(0))
    x = grid(values((8, 4)))
    before = f(x)
    with compilations() as kept:
        f(x)
    f.clear_cache()
    with compilations() as anew:
        after = f(x)
    return before, after, kept, anew[0] <= 1


@program
def static_arguments_are_compiled_apart() -> Any:
    f = jax.jit(lambda x, axis: x.sum(axis), static_argnames="axis")
    x = grid(values((8, 4)))
    with compilations() as count:
        found = [f(x, axis=axis) for axis in (0, 1, None, 0, 1, (0, 1))]
    return found, count


@program
def many_threads_compile_and_run() -> Any:
    x = grid(values((8, 4)))

    def work(k: int) -> Any:
        f = jax.jit(lambda x: (x * k).sum(0))
        return np.asarray(f(x) + f(x))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        return list(pool.map(work, range(6)))


@program
def one_function_in_many_threads() -> Any:
    f = jax.jit(lambda x: x.sum(0))
    given = [grid(values((8, 4), seed=s)) for s in range(8)]
    with compilations() as count, concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = [jnp.asarray(each) for each in pool.map(f, given)]
    return found, count[0] >= 1


@program
def programs_in_flight() -> Any:
    f = jax.jit(lambda x: x - x.mean(0) + 0.25)
    xs = [grid(values((8, 4), seed=s)) for s in range(4)]
    for _ in range(5):
        xs = [f(x) for x in xs]
    return xs


@program
def compilation_cache_on_disk() -> Any:
    from jax.experimental.compilation_cache import compilation_cache

    x = grid(values((8, 4)))
    settings = {
        "jax_compilation_cache_dir": None,
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": 0,
    }
    kept = {name: getattr(jax.config, name) for name in settings}

    def body(x: Any) -> Any:
        return (jnp.tanh(x) * 3).sum(0), x.max()

    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, value in settings.items():
                jax.config.update(name, folder if value is None else value)
            compilation_cache.reset_cache()
            first = jax.jit(body)(x)
            files = len(list(Path(folder).iterdir())) > 0
            jax.clear_caches()
            second = jax.jit(body)(x)
        finally:
            for name, value in kept.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()
            jax.clear_caches()
    return first, second, files


@program
def settings_that_are_part_of_the_key() -> Any:
    f = jax.jit(lambda x, w: (x @ w).sum(0))
    x, w = grid(values((8, 4))), grid(values((4, 6), seed=1), "y")
    with compilations() as count:
        found = [f(x, w)]
        with jax.default_matmul_precision("highest"):
            found.append(f(x, w))
        with jax.enable_x64(True):
            found.append(f(x, w))
        found.append(f(x, w))
    return found, count


@program
def without_jit() -> Any:
    x = grid(values((8, 4)))
    f = jax.jit(lambda x: (x.sum(0), x - x.mean(1, keepdims=True)))
    with jax.disable_jit():
        inside = f(x)
    return inside, f(x)


@program
def meshes_that_are_equal() -> Any:
    f = jax.jit(
        lambda x: lax.with_sharding_constraint(
            x @ x.T, NamedSharding(mesh((4, 2), ("x", "y")), P("y"))
        ).sum(0)
    )
    with compilations() as count:
        found = [f(grid(values((8, 4)))) for _ in range(3)]
    return found, count


@program
def results_as_arguments() -> Any:
    f = jax.jit(lambda x: (x @ x.T) @ x / 64)
    x = grid(values((8, 4)))
    with compilations() as count:
        for _ in range(4):
            x = f(x)
    return x, count[0] <= 2  # the first result may have another sharding than the argument


@program
def programs_that_are_dropped() -> Any:
    f = jax.jit(lambda x: x.sum(0))
    total = f(grid(values((8, 4))))
    held = weakref.ref(f)
    del f
    gc.collect()
    return total, held() is None


@program
def explained_misses() -> Any:
    f = jax.jit(lambda x: x.sum(0))
    with jax.explain_cache_misses(True), jax.log_compiles(False):
        return f(grid(values((8, 4)))), f(grid(values((8, 8))))
