"""Programs that JAX refuses: the type and the first line of its errors stay."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding

from tests.jax.ground import P, error, mesh, program, put, values


def grid(x: Any, *spec: Any) -> Any:
    """An array on a mesh of 4 by 2, sharded over x and y unless said otherwise."""
    return put(x, mesh((4, 2), ("x", "y")), *(spec or ("x", "y")))


@program
def lengths_that_do_not_divide() -> Any:
    rows = NamedSharding(mesh(8, "x"), P("x"))
    x = values((6, 4))
    return [
        error(jax.device_put, x, rows),
        error(jax.jit(lambda x: x.sum(), in_shardings=rows), x),
        error(jax.jit(lambda x: {"a": x * 2}, out_shardings=rows), x),
    ]


@program
def ranks_that_are_too_low() -> Any:
    over = mesh((4, 2), ("x", "y"))
    both = NamedSharding(over, P("x", "y"))
    return [
        error(jax.jit(lambda x: x.sum(), in_shardings=both), values(8)),
        error(jax.jit(lambda x: x.sum(), out_shardings=both), values((8, 4))),
        error(
            jax.jit(lambda x: lax.with_sharding_constraint(x.sum(0), both)), grid(values((8, 4)))
        ),
        error(jax.device_put, values(8), both),
    ]


@program
def axes_that_are_missing_or_twice() -> Any:
    over = mesh((4, 2), ("x", "y"))
    return [
        error(NamedSharding, over, P("z")),
        error(NamedSharding, over, P("x", "x")),
        error(NamedSharding, over, P("x", ("y", "x"))),
        error(NamedSharding, over, None).partition(":")[0],
        error(Mesh, np.array(jax.devices()).reshape(4, 2), ("x",)),
        error(Mesh, np.array(jax.devices()).reshape(4, 2), ("x", "x")).partition(":")[0],
    ]


@program
def specs_without_a_mesh() -> Any:
    x = values((8, 4))
    return [
        error(jax.jit(lambda x: lax.with_sharding_constraint(x.sum(0), P("x"))), x),
        error(lambda: jax.jit(lambda x: x, in_shardings=P("x"))(x)),
        error(jax.device_put, x, P("x")),
        error(lambda: jax.jit(lambda x: x, in_shardings="x")(x)),
        error(lambda: lax.with_sharding_constraint(jnp.ones(8), None)),
        error(lambda: str(jax.ShapeDtypeStruct((2, 2), np.float32, sharding=P("x")).sharding)),
    ]


@program
def devices_that_differ() -> Any:
    first, second = mesh(4, "x"), mesh(4, "x", order=(4, 5, 6, 7))
    a, b = put(values((8, 4)), first, "x"), put(values((8, 4)), second, "x")
    one = jax.device_put(values((8, 4)), jax.devices()[2])
    f = jax.jit(lambda x, y: (x * y).sum(0))
    g = jax.jit(lambda x: lax.with_sharding_constraint(x.sum(0), NamedSharding(first, P("x"))))
    return [
        error(f, a, b),
        error(f, a, one),
        error(g, b),
        error(jnp.concatenate, [a, one]),
        error(jax.jit(lambda x: x, in_shardings=NamedSharding(first, P("x"))), b),
        error(jax.jit(lambda t: jax.tree.leaves(t)[0].sum()), {"p": {"q": a}, "r": [one]}),
    ]


@program
def shardings_that_differ_from_the_argument() -> Any:
    over = mesh((4, 2), ("x", "y"))
    x = put(values((8, 4)), over, "x", "y")
    f = jax.jit(lambda x: x.sum(0), in_shardings=NamedSharding(over, P("x")))
    compiled = f.lower(jax.ShapeDtypeStruct((8, 4), np.float32)).compile()
    return error(f, x), error(compiled, x), f(put(values((8, 4)), over, "x"))


@program
def trees_that_differ() -> Any:
    over = mesh((4, 2), ("x", "y"))
    rows = NamedSharding(over, P("x"))
    x = values((8, 4))
    f = lambda x, y: (x.sum(), y)  # noqa: E731
    compiled = jax.jit(f).lower(x, x).compile()
    return [
        error(jax.jit(f, in_shardings=(rows,)), x, x),
        error(jax.jit(f, out_shardings=(rows, rows, rows)), x, x),
        error(jax.jit(f, in_shardings=({"a": rows}, rows)), x, x),
        error(compiled, [x], x),
        error(compiled, x),
    ]


@program
def types_that_differ_from_the_compiled() -> Any:
    x = grid(values((8, 4)))
    compiled = jax.jit(lambda x: x.sum(0)).lower(x).compile()
    return [
        error(compiled, grid(values((8, 4), "int32"))),
        error(compiled, grid(values((8, 8)))),
        error(compiled, x.astype(jnp.bfloat16)),
        error(compiled, 3.0),
    ]


@program
def arrays_that_are_deleted() -> Any:
    f = jax.jit(lambda x: x.sum(0))
    x = grid(values((8, 4)))
    x.delete()
    y = grid(values((8, 4)))
    total = f(y)
    y.delete()
    return error(f, x), error(f, y), total


@program
def tracers_that_escape() -> Any:
    kept: list[Any] = []

    @jax.jit
    def f(x: Any) -> Any:
        kept.append(x.sum(0))
        return x

    f(grid(values((8, 4))))
    return error(lambda: kept[0] + 1).partition(":")[0]


@program
def conditions_on_tracers() -> Any:
    x = grid(values((8, 4)))
    return [
        error(jax.jit(lambda x: 1 if x.sum() > 0 else 2), x).partition(":")[0],
        error(jax.jit(lambda x: float(x.sum())), x).partition(":")[0],
        error(jax.jit(lambda x: np.asarray(x.sum(0))), x).partition(":")[0],
        error(jax.jit(lambda x: x[: int(x.sum())]), x).partition(":")[0],
    ]


@program
def shapes_that_do_not_fit() -> Any:
    x = grid(values((8, 4)))
    return [
        error(jax.jit(lambda x: x @ x), x),
        error(jax.jit(lambda x: x + x.sum(1)), x),
        error(jax.jit(lambda x: lax.fori_loop(0, 3, lambda i, c: c.sum(0), x)), x).partition(":")[
            0
        ],
        error(jax.jit(lambda x: lax.scan(lambda c, _: (c.sum(0), None), x, length=2)), x)[:9],
        error(jax.jit(lambda x: lax.cond(True, lambda: x, lambda: x.sum())), x).partition(":")[0],
    ]


@program
def programs_that_raise_while_traced() -> Any:
    class Own(Exception):
        pass

    def f(x: Any) -> Any:
        raise Own(f"with a total of type {jax.typeof(x.sum(0)).dtype}")

    x = grid(values((8, 4)))
    return error(jax.jit(f), x), error(jax.jit(jax.grad(f)), x), jax.jit(lambda x: x.sum(0))(x)


@program
def axis_types_and_maps() -> Any:
    over = mesh((4, 2), ("x", "y"))
    manual = Mesh(np.array(jax.devices()), ("x",), axis_types=(AxisType.Manual,))
    x = put(values((8, 4)), over, "x", "y")
    body = lambda x: lax.psum(x, "z")  # noqa: E731
    return [
        error(jax.set_mesh, manual),
        error(jax.jit(jax.shard_map(body, mesh=over, in_specs=P("x"), out_specs=P("x"))), x),
        error(jax.shard_map(lambda x: x, mesh=over, in_specs=P("z"), out_specs=P("x")), x),
        error(jax.shard_map(lambda x: x, mesh=over, in_specs=P("x"), out_specs=P()), x),
        error(jax.jit(lambda x: lax.psum(x, "x")), x),
    ]


@program
def unconstrained_shardings_of_jit() -> Any:
    over = mesh((2, 2), ("x", "y"))
    free = NamedSharding(over, P(P.UNCONSTRAINED, "y"))
    return [
        error(lambda: jax.jit(lambda x: x.sum(0), in_shardings=free)(values((4, 4)))),
        error(lambda: jax.jit(lambda x: x @ x, out_shardings=free)(values((4, 4)))),
    ]


@program
def abstract_meshes_refused() -> Any:
    over = mesh(2, "x")
    abstract = NamedSharding(over.abstract_mesh, P("x"))
    return [
        error(lax.with_sharding_constraint, values(8), abstract),
        error(lax.with_sharding_constraint, jnp.ones(8), abstract),
        error(jax.device_put, values(8), abstract).partition(":")[0],
    ]


@program
def options_that_are_wrong() -> Any:
    one = SingleDeviceSharding(jax.devices()[0])
    x = grid(values((8, 4)))
    inner = jax.jit(lambda x: x.sum(0), compiler_options={"no_such_flag": True})
    return [
        error(inner, x).partition("\n")[0],
        error(jax.jit(lambda x: inner(x) * 2), x),
        error(jax.jit(lambda x: x, in_shardings=one), x=values(4)),
        error(jax.jit(lambda x, y: x, static_argnums=1), x, values(3)).partition(":")[0],
        error(lambda: jax.jit(lambda x: x, donate_argnums=3)(x)),
        error(jax.jit(lambda x: x), "text").partition("(")[0],
    ]


@program
def debugged_nans() -> Any:
    x = grid(-np.abs(values((8, 4))))
    f = jax.jit(lambda x: jnp.log(x.sum(0)))
    quiet = f(x)
    with jax.debug_nans(True):
        text = error(f, x)
        fine = jax.jit(lambda x: x.sum(0))(x)
    return quiet, text, fine


@program
def debugged_infinities() -> Any:
    x = grid(np.full((8, 4), 3e38, np.float32))
    f = jax.jit(lambda x: x.sum(0))
    with jax.debug_infs(True):
        text = error(f, x)
    return f(x), text


@program
def transfers_that_are_forbidden() -> Any:
    over = mesh(8, "x")
    x = put(values((8, 4)), over, "x")
    f = jax.jit(lambda x, y: (x + y).sum(0))
    with jax.transfer_guard("disallow"):
        inside = f(x, x)
        text = error(f, x, values((8, 4)))
    return inside, text.partition(":")[0]


@program
def leaks_are_checked() -> Any:
    kept: list[Any] = []

    def leaking(x: Any) -> Any:
        kept.append(x.sum(0))
        return x * 2

    x = grid(values((8, 4)))
    with jax.checking_leaks():
        fine = jax.jit(lambda x: x.sum(0))(x)
        text = error(jax.jit(leaking), x).partition(":")[0]
    return fine, text


@program
def no_tracing_allowed() -> Any:
    x = grid(values((8, 4)))
    f = jax.jit(lambda x: x.sum(0))
    first = f(x)
    with jax.no_tracing():
        again = f(x)
        text = error(jax.jit(lambda x: x.sum(1)), x)
    return first, again, text.partition("jit")[0]
