"""Forms of pmap: axes in and out, static arguments, devices, donation, nesting, and errors."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.jax.ground import error, mesh, program, put, shards, values

pmap = partial(jax.pmap, axis_name="i")


@program
def axes_in() -> Any:
    f = lambda x, y: x * lax.psum(y, "i")  # noqa: E731
    x, y = values((8, 3)), values((3, 8), seed=1)
    return [
        pmap(f, in_axes=(0, 1))(x, y),
        pmap(f, in_axes=(0, None))(x, y[:, 0]),
        pmap(f, in_axes=(None, 1))(x[0], y),
        pmap(lambda t: lax.psum(t["a"], "i") + t["b"][0], in_axes=({"a": 0, "b": (None,)},))(
            {"a": x, "b": (y[:, 0],)}
        ),
    ]


@program
def axes_out() -> Any:
    f = lambda x: (lax.psum(x, "i"), x - lax.pmean(x, "i"))  # noqa: E731
    x = values((8, 3))
    return [
        pmap(f, out_axes=(None, 0))(x),
        pmap(f, out_axes=(0, 1))(x),
        pmap(f, out_axes=1)(x),
        pmap(lambda x: {"a": f(x)}, out_axes={"a": (None, -1)})(x),
    ]


@program
def static_arguments() -> Any:
    f = pmap(
        lambda x, power, name: lax.psum(x**power, "i") if name == "sum" else lax.pmax(x, "i"),
        static_broadcasted_argnums=(1, 2),
    )
    x = values((8, 3))
    return f(x, 2, "sum"), f(x, 3, "sum"), f(x, 2, "max")


@program
def named_arguments_and_defaults() -> Any:
    f = pmap(lambda x, *, y, scale=2.0: lax.psum(x * y, "i") * scale)
    x, y = values((8, 3)), values((8, 3), seed=1)
    return f(x, y=y), f(x, y=y, scale=jnp.arange(8.0))


@program
def chosen_devices() -> Any:
    chosen = [jax.devices()[k] for k in (5, 2, 7, 0)]
    f = pmap(lambda x: (lax.psum(x, "i"), x * lax.axis_index("i")), devices=chosen)
    found = f(values((4, 3)))
    return found, shards(found[1]), error(f, values((8, 3)))


@program
def fewer_devices() -> Any:
    return [pmap(lambda x: x - lax.pmean(x, "i"))(values((n, 3))) for n in (1, 2, 3, 5, 8)]


@program
def an_axis_size() -> Any:
    f = pmap(lambda x, y: lax.psum(x * y, "i"), axis_size=4, in_axes=(None, 0))
    return f(values(3), values((4, 3))), error(f, values(3), values((8, 3)))


@program
def without_a_name() -> Any:
    return jax.pmap(lambda x: jnp.sin(x) @ x)(values((8, 3)))


@program
def donated_arguments() -> Any:
    f = pmap(lambda x, y: (x + lax.psum(y, "i"), y * 2), donate_argnums=(0,))
    put_by_map = pmap(lambda x: x * 1.0)
    x, y = put_by_map(values((8, 3))), put_by_map(values((8, 3), seed=1))
    return f(x, y), x.is_deleted(), y.is_deleted()


@program
def arrays_on_one_device_and_of_numpy() -> Any:
    f = pmap(lambda x: x * lax.pmax(x, "i"))
    x = values((8, 3))
    return f(x), f(jnp.asarray(x)), f(f(x))


@program
def arrays_of_other_meshes() -> Any:
    f = pmap(lambda x: lax.psum(x, "i") + x)
    x = values((8, 6))
    return [
        f(put(x, mesh(8, "x"), "x")),
        error(f, put(x, mesh((4, 2), ("x", "y")), "x", "y")),
        error(f, put(x, mesh(8, "x"))),
    ]


@program
def scalars_and_empty_arrays() -> Any:
    f = pmap(lambda x, y: (lax.psum(x, "i"), lax.psum(y, "i")))
    return f(values(8), np.zeros((8, 0), "float32")), f(np.arange(8), np.ones((8, 2, 0), "int32"))


@program
def pmap_in_jit() -> Any:
    f = pmap(lambda x: x - lax.pmean(x, "i"))
    return jax.jit(lambda x: f(x) * 2 + x.sum(0))(values((8, 3)))


@program
def jit_in_pmap() -> Any:
    inner = jax.jit(lambda x: x * lax.psum(x, "i"))
    return pmap(lambda x: inner(x) + inner(inner(x)))(values((8, 3)))


@program
def pmap_in_pmap() -> Any:
    f = jax.pmap(lambda x: lax.psum(x, "j") + lax.psum(x, "i"), axis_name="j")
    return error(pmap(f), values((2, 4, 3))).partition(":")[0]


@program
def pmap_in_scan_and_scan_in_pmap() -> Any:
    f = pmap(lambda x: x - lax.pmean(x, "i") / 2)
    g = pmap(lambda x: lax.scan(lambda c, _: (c - lax.pmean(c, "i") / 2, c.sum()), x, length=3))
    x = values((8, 3))
    return lax.fori_loop(0, 3, lambda _, x: f(x), x), g(x)


@program
def shapes_and_ahead_of_time() -> Any:
    f = pmap(lambda x: (lax.psum(x, "i"), x.sum()))
    x = values((8, 3))
    lowered = f.lower(x)
    compiled = lowered.compile()
    shape = jax.eval_shape(f, x)
    return compiled(x), str(shape), error(compiled, values((8, 4))).partition(":")[0]


@program
def called_again_and_again() -> Any:
    f = pmap(lambda x: x - lax.pmean(x, "i"))
    x = values((8, 3))
    for _ in range(5):
        x = f(x * 1.25)
    return x, f(values((8, 4))), f(values((8, 3), "float16"))


@program
def two_maps_in_flight() -> Any:
    f = pmap(lambda x: lax.psum(x, "i") * x)
    chosen = [
        pmap(lambda x: lax.psum(x, "i") - x, devices=jax.devices()[k : k + 4]) for k in (0, 4)
    ]
    found = [
        [g(values((4, 3), seed=k)) for g in chosen] + [f(values((8, 3), seed=k))] for k in range(4)
    ]
    return jax.block_until_ready(found)


@program
def errors() -> Any:
    f = pmap(lambda x: lax.psum(x, "i"))
    return [
        error(f, values((9, 3))),
        error(f, np.float32(2)),
        error(pmap(lambda x, y: x + y), values((8, 3)), values((4, 3))),
        error(pmap(lambda x: x, in_axes=1), values(8)),
        error(pmap(lambda x: x, out_axes=None), values((8, 3))),
        error(pmap(lambda x: x, in_axes=None), values(3)),
        error(pmap(lambda: lax.axis_index("i"))),
        error(
            pmap(lambda x: lax.cond(x.sum() > 0, lambda: x, lambda: x[:1])), values((8, 3))
        ).partition(":")[0],
    ]
