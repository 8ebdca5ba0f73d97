"""Forms of shard_map: eager, with closures, callbacks, references, keys, and its errors."""

from __future__ import annotations

import contextlib
import io
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.sharding import NamedSharding

from tests.jax.ground import P, error, mesh, needs, program, put, shards, values

GRID = ((4, 2), ("x", "y"))


def grid(*shape: int, seed: int = 0) -> Any:
    """An array on a mesh of 4 by 2."""
    return put(values(shape, seed=seed), mesh(*GRID), "x", "y")


@program
def eager_maps() -> Any:
    over = mesh(*GRID)
    maps = partial(jax.shard_map, mesh=over, in_specs=P("x", "y"))
    x = grid(8, 6)

    def by_python(x: Any) -> Any:
        return x if lax.psum(x.sum(), ("x", "y")) < 0 else -x

    return [
        maps(lambda x: lax.psum(x, "x"), out_specs=P(None, "y"))(x),
        maps(
            lambda x: lax.psum_scatter(x, "y", scatter_dimension=0, tiled=True),
            out_specs=P(("x", "y")),
        )(x),
        maps(
            lambda x: jax.jit(lambda x: lax.psum(x, "y") * x.sum())(x),
            out_specs=P("x"),
            check_vma=False,
        )(x),
        maps(by_python, out_specs=P("x", "y"))(x),
        maps(
            lambda x: (lax.pmax(x, "x"), lax.axis_index("y") + x[:1, :1]),
            out_specs=(P(None, "y"), P("x", "y")),
        )(x),
    ]


@program
def eager_maps_of_numpy_and_numbers() -> Any:
    over = mesh(8, "x")
    f = jax.shard_map(
        lambda x, s: lax.psum(x * s, "x"), mesh=over, in_specs=(P("x"), P()), out_specs=P()
    )
    x = values((8, 3))
    return (
        f(x, 2.0),
        f(jnp.asarray(x), np.float32(3)),
        jax.jit(f)(x, 2.0),
        jax.jit(f)(x.astype("int32"), 2),
    )


@program
def decorators_without_arguments() -> Any:
    needs("jax.set_mesh")
    with jax.set_mesh(mesh(8, "x", explicit=True)):

        @jax.shard_map(in_specs=P("x"), out_specs=P())
        def f(x: Any) -> Any:
            return lax.psum(x, "x")

        @partial(jax.shard_map, out_specs=P("x"))
        def g(x: Any) -> Any:
            return x * lax.pmax(x, "x")

        x = jax.device_put(values((8, 3)), P("x"))
        return jax.jit(lambda x: (f(x), g(x), g(x).sum(0)))(x)


@program
def trees_in_and_out() -> Any:
    over = mesh(*GRID)
    specs = {"a": P("x"), "b": (P(None, "y"), None)}

    @partial(jax.shard_map, mesh=over, in_specs=(specs, None), out_specs=(P(), {"c": P("x")}))
    def f(tree: Any, plain: Any) -> Any:
        a, (b, scale) = tree["a"], tree["b"]
        return lax.psum(b.sum(), "y") * scale + plain, {"c": a * lax.psum(a, "x")}

    tree = {"a": values((8, 3)), "b": (values((3, 4), seed=1), np.float32(2))}
    return f(tree, 1.5), jax.jit(lambda t: (f(t, 1.5), t["a"].sum(0)))(tree)


@program
def arguments_that_are_no_arrays() -> Any:
    over = mesh(*GRID)
    names: list[Any] = []

    @partial(jax.shard_map, mesh=over, in_specs=(None, P("x"), None), out_specs=P("x"))
    def f(scale: Any, x: Any, options: Any) -> Any:
        names.append(sorted(options))
        return x * 2 + lax.psum(x, "x")

    x = values((8, 3))
    return (
        f(object(), x, {"b": object(), "a": None}),
        jax.jit(lambda x: (f(None, x, {}), x.sum(0)))(x),
        names,
    )


@program
def values_closed_over() -> Any:
    over = mesh(8, "x")
    constant = values((1, 3), seed=1)
    spread = put(values(3, seed=2), over)

    @jax.jit
    def f(x: Any) -> Any:
        total = x.sum(0)  # the partitioner's, closed over by the map
        g = jax.shard_map(
            lambda x: lax.psum(x * constant + total + spread, "x"),
            mesh=over,
            in_specs=P("x"),
            out_specs=P(),
        )
        return g(x), total

    return f(put(values((8, 3)), over, "x"))


@program
def no_arguments_and_no_results() -> Any:
    over = mesh(*GRID)
    f = jax.shard_map(
        lambda: lax.psum(lax.axis_index("x") * 1.5, "x")[None] + lax.axis_index("y"),
        mesh=over, in_specs=(), out_specs=P("y"),
    )  # fmt: skip
    nothing = jax.shard_map(lambda x: None, mesh=over, in_specs=P("x"), out_specs=None)
    return f(), jax.jit(lambda: (f(), f().sum()))(), jax.jit(nothing)(values((8, 2)))


@program
def static_arguments_and_shapes() -> Any:
    over = mesh(*GRID)

    @partial(jax.jit, static_argnums=1)
    def f(x: Any, shape: Any) -> Any:
        g = lambda x: x + lax.psum(jnp.ones(shape), ("x", "y"))  # noqa: E731
        return jax.shard_map(g, mesh=over, in_specs=P("x", "y"), out_specs=P("x", "y"))(x), x.sum()

    return f(grid(8, 6), (2, 3)), f(grid(4, 2), (1, 1))


@program
def donated_arguments_of_maps() -> Any:
    over = mesh(*GRID)
    f = jax.shard_map(
        lambda x, y: (x + lax.psum(y, "x"), x * y),
        mesh=over,
        in_specs=P("x", "y"),
        out_specs=P("x", "y"),
    )
    g = jax.jit(lambda x, y: (*f(x, y), x.sum(0)), donate_argnums=(0, 1))
    x, y = grid(8, 6), grid(8, 6, seed=1)
    return g(x, y), x.is_deleted(), y.is_deleted()


@program
def aliases_in_the_program() -> Any:
    over = mesh(*GRID)
    f = jax.shard_map(
        lambda x: x - lax.pmean(x, "x"), mesh=over, in_specs=P("x", "y"), out_specs=P("x", "y")
    )
    text = jax.jit(lambda x: f(x) + x.sum(), donate_argnums=0).lower(grid(8, 6)).as_text()
    return text.count("sdy.manual_computation"), "tf.aliasing_output" in text


@program
def abstract_meshes() -> Any:
    over = mesh(*GRID)
    f = jax.shard_map(
        lambda x: lax.psum(x, "x"), mesh=over.abstract_mesh, in_specs=P("x"), out_specs=P()
    )
    x = put(values((8, 3)), over, "x")
    again = put(values((8, 3)), mesh(*GRID, order=[3, 1, 2, 0, 7, 5, 6, 4]), "x")
    g = jax.jit(lambda x: (f(x), x.sum(0)))
    return f(x), g(x), g(again), shards(g(again)[0]), error(f, values((8, 3)))


@program
def references_inside() -> Any:
    needs("jax.new_ref")
    over = mesh(8, "x")

    @partial(jax.shard_map, mesh=over, in_specs=P("x"), out_specs=P("x"))
    def f(x: Any) -> Any:
        total = jax.new_ref(jnp.zeros_like(x))
        for k in range(3):
            total[...] = jnp.tanh(total[...] + lax.psum(x * (k + 1), "x"))
        return jax.freeze(total)

    x = put(values((8, 3)), over, "x")
    return jax.jit(lambda x: (f(x), f(x).sum(0)))(x)


@program
def references_as_arguments() -> Any:
    needs("jax.new_ref", "jax.set_mesh")
    with jax.set_mesh(mesh(8, "x", explicit=True)):
        state = jax.new_ref(jax.device_put(values((8, 3)), P("x")))

        @jax.jit
        def f(state: Any) -> Any:
            def g(state: Any) -> None:
                state[...] += lax.psum(state[...], "x")

            jax.shard_map(g, out_specs=None)(state)
            return state[...].sum(0)

        return f(state), f(state), state[...]


@program
def keys_over_devices() -> Any:
    over = mesh(8, "x")
    found = []
    for kind in ("threefry2x32", "rbg"):
        keys = put(jax.random.split(jax.random.key(0, impl=kind), 8), over, "x")
        f = jax.shard_map(
            lambda k: jax.random.normal(k[0], (1, 3)), mesh=over, in_specs=P("x"), out_specs=P("x")
        )
        g = jax.shard_map(
            lambda k: lax.psum(jax.random.uniform(k[0]), "x"),
            mesh=over,
            in_specs=P("x"),
            out_specs=P(),
        )
        found.append(jax.jit(lambda k, f=f, g=g: (f(k), g(k), f(k).sum(0)))(keys))
    return found


@program
def callbacks_of_each_device() -> Any:
    over = mesh(8, "x")
    seen: list[Any] = []

    @partial(jax.shard_map, mesh=over, in_specs=P("x"), out_specs=P("x"))
    def f(x: Any) -> Any:
        total = lax.psum(x, "x")
        jax.debug.callback(
            lambda k, t: seen.append((int(k), t.shape)), lax.axis_index("x"), total * x
        )
        return x * total

    result = jax.jit(lambda x: (f(x), f(x).sum(0)))(put(values((8, 3)), over, "x"))
    jax.effects_barrier()
    return result, sorted({k for k, _ in seen}), {str(s) for _, s in seen}


@program
def pure_callbacks_of_each_device() -> Any:
    over = mesh(8, "x")

    @partial(jax.shard_map, mesh=over, in_specs=P("x"), out_specs=P("x"), check_vma=False)
    def f(x: Any) -> Any:
        total = lax.psum(x, "x")
        kind = jax.ShapeDtypeStruct(x.shape, x.dtype)
        y, z = jax.pure_callback(
            lambda a, b: (np.asarray(a) + b, np.cos(b)), (kind, kind), x, total
        )
        return lax.psum_scatter(jnp.tile(y, (8, 1)), "x", tiled=True) + z

    return jax.jit(lambda x: (f(x), f(x).sum(0), x.max()))(put(values((8, 3)), over, "x"))


@program
def ordered_effects_of_each_device() -> Any:
    over = mesh(4, "x")
    seen: list[int] = []

    @partial(jax.shard_map, mesh=over, in_specs=P("x"), out_specs=P("x"))
    def f(x: Any) -> Any:
        io_callback(lambda _: seen.append(1), (), lax.psum(x, "x"), ordered=True)
        io_callback(lambda _: seen.append(2), (), x, ordered=True)
        return x * lax.psum(x, "x")

    result = jax.jit(lambda x: (f(x), x.sum(0)))(put(values((8, 3)), over, "x"))
    jax.effects_barrier()
    return result, sorted(seen)


@program
def printing_from_devices() -> Any:
    over = mesh(8, "x")
    out = io.StringIO()

    @partial(jax.shard_map, mesh=over, in_specs=P("x"), out_specs=P("x"))
    def f(x: Any) -> Any:
        jax.debug.print("device {k} has {n}", k=lax.axis_index("x"), n=x.size)
        return x - lax.pmean(x, "x")

    with contextlib.redirect_stdout(out):
        result = jax.jit(f)(put(values((8, 3)), over, "x"))
        jax.effects_barrier()
    return result, sorted(out.getvalue().split("\n"))


@program
def shardings_of_arguments_move() -> Any:
    over = mesh(*GRID)
    f = jax.jit(
        jax.shard_map(
            lambda x: lax.psum(x, "x") * x, mesh=over, in_specs=P("x", "y"), out_specs=P("x", "y")
        )
    )
    g = jax.jit(lambda x: (f(x), f(x).sum(1), x.sum(0)))
    x = values((8, 6))
    specs = [P(), P("y"), P(("x", "y")), P(None, "y")]
    return [g(jax.device_put(x, NamedSharding(over, spec))) for spec in specs]


@program
def ahead_of_time_with_maps() -> Any:
    over = mesh(*GRID)
    f = jax.shard_map(
        lambda x: lax.psum(x, "x") * x, mesh=over, in_specs=P("x", "y"), out_specs=P("x", "y")
    )
    kind = jax.ShapeDtypeStruct((8, 6), "float32", sharding=NamedSharding(over, P("x", "y")))
    lowered = jax.jit(lambda x: (f(x), x.sum(0))).lower(kind)
    compiled = lowered.compile()
    return (
        compiled(grid(8, 6)),
        str(compiled.input_shardings),
        str(compiled.output_shardings),
        str(lowered.out_info),
        error(compiled, values((8, 5))),
    )


@program
def the_same_map_of_many_shapes() -> Any:
    over = mesh(8, "x")
    f = jax.shard_map(lambda x: x - lax.pmean(x, "x"), mesh=over, in_specs=P("x"), out_specs=P("x"))
    g = jax.jit(lambda x: (f(x), f(x).max(), x.sum()))
    return [g(values((8 * n, *rest))) for n in (1, 2, 3) for rest in ((), (2,), (3, 1))]


@program
def jit_is_disabled() -> Any:
    over = mesh(4, "x")
    f = jax.jit(
        jax.shard_map(lambda x: lax.psum(x * x, "x"), mesh=over, in_specs=P("x"), out_specs=P())
    )
    with jax.disable_jit():
        return f(put(values((8, 3)), over, "x"))


@program
def refused_specs() -> Any:
    maps = partial(jax.shard_map, mesh=mesh(*GRID))
    x = values((8, 6))
    same = lambda x: x  # noqa: E731
    return [
        error(maps(same, in_specs=P("x", "y"), out_specs=P("x", "y")), values((6, 6))),
        error(maps(same, in_specs=P("x", None, "y"), out_specs=P("x")), x),
        error(maps(same, in_specs=P("z"), out_specs=P()), x).partition("(")[0],  # a set follows
        error(maps(same, in_specs=(P("x"), P("y")), out_specs=P()), x),
        error(maps(lambda x: 3.0, in_specs=P("x"), out_specs=P("x")), x),
        error(maps(lambda x: {"a": [x]}, in_specs=P("x"), out_specs={"b": P()}), x),
        error(jax.shard_map(same, in_specs=P("x"), out_specs=P()), x),
    ]


@program
def refused_collectives() -> Any:
    maps = partial(jax.shard_map, mesh=mesh(*GRID), in_specs=P("x"))
    x, total = values((8, 6)), lambda x: lax.psum(x, "x")
    split = lambda x: lax.psum_scatter(x[:1], "x", tiled=True)  # noqa: E731
    uneven = lambda x: lax.psum(x, "x", axis_index_groups=[[0, 1], [2]])  # noqa: E731
    twice = lambda x: lax.ppermute(x, "x", [(0, 1), (0, 2)])  # noqa: E731
    return [
        error(maps(lambda x: lax.psum(x, "z"), out_specs=P()), x),
        error(jax.jit(maps(lambda x: lax.psum(x, "i"), out_specs=P())), x),
        error(maps(twice, out_specs=P("x")), x).partition(":")[0],
        error(jax.jit(maps(split, out_specs=P("x"))), x),
        error(jax.jit(maps(lambda x: lax.all_to_all(x, "x", 0, 0), out_specs=P("x"))), x),
        error(jax.jit(maps(uneven, out_specs=P("x"))), x),
        error(jax.jit(total), x),
        error(total, x),
    ]


@program
def errors_raised_inside() -> Any:
    over = mesh(8, "x")

    def refuse(x: Any) -> Any:
        raise RuntimeError("from the map")

    f = jax.shard_map(refuse, mesh=over, in_specs=P("x"), out_specs=P("x"))
    x = put(values((8, 3)), over, "x")
    later = jax.jit(lambda x: x.sum())(x)  # the process is well afterwards
    return error(f, x), error(jax.jit(f), x), later
