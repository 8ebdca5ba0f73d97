"""Calls of Python from programs, printing, and effects, beside sums between devices."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.sharding import NamedSharding

from tests.jax.ground import P, error, mesh, needs, program, put, values


def grid(x: Any, *spec: Any) -> Any:
    """An array on a mesh of 4 by 2, sharded over x and y unless said otherwise."""
    return put(x, mesh((4, 2), ("x", "y")), *(spec or ("x", "y")))


def rounded(x: Any) -> list[float]:
    """Numbers as a callback sees them, without their last bits."""
    return [float(f"{v:.3g}") for v in np.asarray(x, np.float64).reshape(-1)]


@program
def pure_callback_on_a_sum() -> Any:
    @jax.jit
    def f(x: Any) -> Any:
        total = x.sum(0)
        shape = jax.ShapeDtypeStruct(total.shape, total.dtype)
        return jax.pure_callback(lambda t: np.asarray(t) * 2, shape, total), total

    return f(grid(values((8, 4))))


@program
def pure_callback_before_a_sum() -> Any:
    @jax.jit
    def f(x: Any) -> Any:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda x: np.cos(np.asarray(x)), shape, x).sum(0)

    return f(grid(values((8, 4))))


@program
def pure_callback_under_vmap() -> Any:
    def one(x: Any) -> Any:
        shape = jax.ShapeDtypeStruct((), x.dtype)
        return jax.pure_callback(
            lambda t: np.asarray(t).sum(-1), shape, x, vmap_method="expand_dims"
        )

    return jax.jit(lambda x: jax.vmap(one)(x - x.mean(0)))(grid(values((8, 4))))


@program
def callbacks_that_raise() -> Any:
    def refuse(x: Any) -> Any:
        raise KeyError("its own")

    @jax.jit
    def f(x: Any) -> Any:
        total = x.sum(0)
        return jax.pure_callback(refuse, jax.ShapeDtypeStruct((4,), jnp.float32), total)

    # On one device, as JAX's process may crash when a program of many ends by an error.
    found = [error(f, values((8, 4))).partition(":")[0]]
    with contextlib.suppress(Exception):
        jax.effects_barrier()  # raises it again
    return found, jax.jit(lambda x: x.sum(0))(grid(values((8, 4))))


@program
def io_callback_in_order() -> Any:
    seen: list[Any] = []

    @jax.jit
    def f(x: Any) -> Any:
        for k in range(3):
            io_callback(lambda t, k=k: seen.append((k, rounded(t))), None, x.sum(0), ordered=True)
            x = x * 2
        return x.sum()

    # An ordered callback belongs to a program of one device.
    one = jnp.asarray(values((8, 4)))
    total = f(one)
    jax.effects_barrier()
    return total, str(seen)


@program
def io_callback_in_order_on_many_devices() -> Any:
    seen: list[Any] = []

    @jax.jit
    def f(x: Any) -> Any:
        total = x.sum(0)
        io_callback(lambda t: seen.append(rounded(t)), None, total, ordered=True)
        return total

    text = error(f, grid(values((8, 4))))
    jax.effects_barrier()
    return text.partition(":")[0].partition(",")[0], str(seen)


@program
def io_callback_without_order() -> Any:
    seen: list[Any] = []

    @jax.jit
    def f(x: Any) -> Any:
        total = x.sum(0)
        back = io_callback(
            lambda t: (seen.append(rounded(t)), np.float32(3))[1],
            jax.ShapeDtypeStruct((), jnp.float32),
            total,
        )
        return total * back

    found = jax.block_until_ready(f(grid(values((8, 4)))))
    jax.effects_barrier()
    return found, str(seen)


@program
def io_callback_with_a_sharding() -> Any:
    over = mesh((4, 2), ("x", "y"))
    seen: list[Any] = []

    @jax.jit
    def f(x: Any) -> Any:
        where = jax.sharding.SingleDeviceSharding(jax.devices()[1])
        io_callback(lambda t: seen.append(rounded(t)), None, x.sum(0), sharding=where)
        return x.mean()

    found = f(put(values((8, 4)), over, "x", "y"))
    jax.effects_barrier()
    return found, str(seen)


@program
def io_callback_in_shard_map() -> Any:
    over = mesh(8, "x")
    seen: list[Any] = []

    def local(x: Any) -> Any:
        total = lax.psum(x, "x")
        io_callback(lambda t: seen.append(rounded(t)), None, total)
        return total

    f = jax.jit(jax.shard_map(local, mesh=over, in_specs=P("x"), out_specs=P(), check_vma=False))
    found = jax.block_until_ready(f(put(values((8, 2)), over, "x")))
    jax.effects_barrier()
    return found, len(seen), str(seen[0])


@program
def callbacks_in_loops() -> Any:
    seen: list[Any] = []

    @jax.jit
    def f(x: Any) -> Any:
        def step(i: Any, x: Any) -> Any:
            jax.debug.callback(lambda i, t: seen.append((int(i), *rounded(t))), i, x.sum())
            return x - x.mean(0) + 0.5

        return lax.fori_loop(0, 3, step, x)

    found = jax.block_until_ready(f(grid(values((8, 4)))))
    jax.effects_barrier()
    return found, sorted({each[0] for each in seen})


@program
def printing() -> Any:
    @jax.jit
    def f(x: Any) -> Any:
        jax.debug.print("total {t}, of {n}", t=x.astype(jnp.int32).sum(), n=x.shape[0])
        return x.sum(0)

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        found = jax.block_until_ready(f(grid(np.round(values((8, 4)) * 4))))
        jax.effects_barrier()
    return found, text.getvalue()


@program
def printing_float_sums() -> Any:
    @jax.jit
    def f(x: Any) -> Any:
        jax.debug.print("mean {:.2f}", x.mean())
        return x.sum(0)

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        found = jax.block_until_ready(f(grid(values((8, 4)))))
        jax.effects_barrier()
    return found, sorted(set(text.getvalue().splitlines()))


@program
def inspecting_shardings() -> Any:
    needs("jax.debug.inspect_array_sharding")
    seen: list[str] = []

    @jax.jit
    def f(x: Any) -> Any:
        y = x @ x.T
        jax.debug.inspect_array_sharding(y, callback=lambda s: seen.append(str(s)))
        return y.sum(0)

    return f(grid(values((8, 4)))), seen


@program
def visualised_shardings() -> Any:
    x = jax.jit(lambda x: x @ x.T)(grid(values((8, 4))))
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        try:
            jax.debug.visualize_array_sharding(x)
        except ValueError as missing:  # rich is not installed
            return type(missing).__name__
    return len(text.getvalue()) > 0


@program
def debug_callback_in_a_gradient() -> Any:
    seen: list[Any] = []

    def loss(w: Any, x: Any) -> Any:
        y = (jnp.tanh(x @ w) ** 2).mean()
        jax.debug.callback(lambda y: seen.append(rounded(y)), y)
        return y

    w = put(values((4, 4)), mesh((4, 2), ("x", "y")), None, "y")
    found = jax.block_until_ready(jax.jit(jax.grad(loss))(w, grid(values((8, 4)), "x")))
    jax.effects_barrier()
    return found, str(sorted({str(each) for each in seen}))


@program
def checked_programs() -> Any:
    from jax.experimental import checkify

    @jax.jit
    @checkify.checkify
    def f(x: Any) -> Any:
        total = x.sum(0)
        checkify.check(jnp.all(total < 100), "a total of 100 or more")
        return total

    fine, found = f(grid(values((8, 4))))
    wrong, _ = f(grid(values((8, 4)) + 100))
    return found, str(fine.get()), str(wrong.get()).splitlines()[0]


@program
def float_checks() -> Any:
    from jax.experimental import checkify

    f = jax.jit(checkify.checkify(lambda x: jnp.log(x.sum(0)), errors=checkify.float_checks))
    fine, found = f(grid(np.abs(values((8, 4)))))
    wrong, _ = f(grid(-np.abs(values((8, 4)))))
    return found, str(fine.get()), str(wrong.get()).splitlines()[0].partition("(")[0]


@program
def effects_of_two_programs() -> Any:
    seen: list[int] = []
    over = mesh(8, "x")

    @jax.jit
    def f(x: Any, k: Any) -> Any:
        io_callback(lambda k: seen.append(int(k)), None, k)
        return x - x.mean(0)

    x = put(values((8, 4)), over, "x")
    for k in range(3):
        x = jax.block_until_ready(f(x, k))
    jax.effects_barrier()
    return x, sorted(seen)


@program
def a_callback_that_runs_jax() -> Any:
    def inside(t: Any) -> Any:
        return np.asarray(t) + 1

    @jax.jit
    def f(x: Any) -> Any:
        shape = jax.ShapeDtypeStruct((4,), jnp.float32)
        y = jax.pure_callback(inside, shape, x.sum(0))
        z = lax.with_sharding_constraint(y, NamedSharding(mesh((4, 2), ("x", "y")), P("y")))
        return z.sum(), (x * y).sum(1)

    return f(grid(values((8, 4))))
