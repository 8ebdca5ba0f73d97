"""Meshes of odd sizes, in other orders of devices, split, abstract, and several at once."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from tests.jax.ground import P, compilations, error, mesh, needs, program, put, values


def sums(x: Any) -> Any:
    """The sums of an array along each of its axes, and along all."""
    return x.sum(0), x.sum(1), x.sum(), x @ x.T


@program
def three_devices() -> Any:
    return jax.jit(sums)(put(values((9, 6)), mesh(3, "x"), "x"))


@program
def five_devices() -> Any:
    return jax.jit(sums)(put(values((10, 5)), mesh(5, "x"), None, "x"))


@program
def six_devices_in_two_axes() -> Any:
    over = mesh((3, 2), ("x", "y"))
    x = values((6, 12))
    specs = (("x", "y"), ("y", "x"), (("x", "y"),), (None, ("y", "x")), ("y",))
    return [jax.jit(sums)(put(x, over, *spec)) for spec in specs]


@program
def seven_devices_of_the_end() -> Any:
    return jax.jit(sums)(put(values((7, 14)), mesh(7, "x", order=range(1, 8)), "x"))


@program
def devices_in_other_orders() -> Any:
    x, found = values((8, 8)), []
    for order in ((7, 6, 5, 4, 3, 2, 1, 0), (0, 2, 4, 6, 1, 3, 5, 7), (3, 1, 7, 5, 0, 2, 6, 4)):
        over = mesh((4, 2), ("x", "y"), order=order)
        found.append([jax.jit(sums)(put(x, over, *spec)) for spec in (("x",), (("y", "x"),))])
    return found


@program
def transposed_meshes() -> Any:
    x, found = values((8, 8)), []
    whole = np.array(jax.devices()).reshape(2, 2, 2)
    for order in itertools.permutations(range(3)):
        over = Mesh(whole.transpose(order), ("a", "b", "c"))
        found.append(jax.jit(sums)(put(x, over, ("a", "c"), "b")))
    return found


@program
def an_axis_in_parts() -> Any:
    over = mesh((2, 4), ("x", "y"))

    @jax.jit
    def f(x: Any) -> Any:
        # Half of y shards the first axis of the reshaped array: a sub-axis.
        y = x.reshape(4, 4, 8).sum(0)
        z = x.reshape(2, 8, 8).sum((0, 2))
        return y, z, x.reshape(8, 2, 8).sum(1), x.reshape(32, 4).sum(0)

    return [f(put(values((16, 8)), over, *spec)) for spec in (("y",), (("x", "y"),), (("y", "x"),))]


@program
def an_axis_of_eight_in_parts() -> Any:
    over = mesh(8, "x")

    @jax.jit
    def f(x: Any) -> Any:
        a = x.reshape(2, 4, 4, 3)
        return a.sum(0), a.sum(1), a.sum(2), a.sum((0, 2)), a.transpose(1, 0, 2, 3).sum((0, 1))

    return f(put(values((32, 3)), over, "x"))


@program
def merged_axes() -> Any:
    over = mesh((2, 2, 2), ("a", "b", "c"))

    @jax.jit
    def f(x: Any) -> Any:
        y = x.reshape(16, 12)
        return y.sum(0), jnp.einsum("ij,kj->ik", y, y), x.sum((0, 2)), x.swapaxes(0, 2).sum(0)

    return [f(put(values((4, 4, 12)), over, *spec)) for spec in (("a", "b", "c"), ("c", None, "a"))]


@program
def sums_over_one_axis_of_three() -> Any:
    over = mesh((2, 2, 2), ("a", "b", "c"))
    x = put(values((4, 4, 4)), over, "a", "b", "c")
    axes = ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2))
    return jax.jit(lambda x: [x.sum(axis) for axis in axes])(x)


@program
def resharded_between_the_orders_of_axes() -> Any:
    over = mesh((2, 4), ("x", "y"))

    @jax.jit
    def f(x: Any) -> Any:
        y = lax.with_sharding_constraint(x * 2, NamedSharding(over, P(("y", "x"))))
        z = lax.with_sharding_constraint(y + 1, NamedSharding(over, P("y", "x")))
        return (y @ y.T).sum(0), z.sum(0), z.sum(1)

    return f(put(values((16, 8)), over, ("x", "y")))


@program
def two_programs_on_two_meshes() -> Any:
    halves = mesh(4, "x"), mesh(4, "x", order=(4, 5, 6, 7))
    f = jax.jit(lambda x: jnp.tanh(x).sum(0))
    with compilations() as count:
        found = [f(put(values((8, 4)), half, "x")) for half in halves]
        found += [f(put(values((8, 4)), half, "x")) for half in halves]
    return found, count


@program
def a_pipeline_over_two_meshes() -> Any:
    first, second = mesh(4, "x"), mesh(4, "x", order=(7, 6, 5, 4))
    stage = jax.jit(lambda x, w: jnp.tanh(x @ w))

    def loss(weights: Any, x: Any) -> Any:
        y = stage(x, weights[0])
        y = jax.device_put(y, NamedSharding(second, P("x")))
        return stage(y, weights[1]).sum()

    weights = [put(values((4, 4)), first), put(values((4, 4), seed=1), second)]
    return jax.value_and_grad(loss)(weights, put(values((8, 4), seed=2), first, "x"))


@program
def two_meshes_of_the_same_devices_in_one_program() -> Any:
    square, line = mesh((2, 4), ("x", "y")), mesh(8, "z")

    @jax.jit
    def f(x: Any) -> Any:
        y = lax.with_sharding_constraint(x, NamedSharding(square, P("y", "x")))
        z = lax.with_sharding_constraint(y @ y.T, NamedSharding(line, P(None, "z")))
        return y.sum(0), z.sum(0), z.sum(1)

    return f(values((8, 8))), f(put(values((8, 8)), line, "z"))


@program
def names_of_axes_do_not_matter() -> Any:
    x, found = values((8, 8)), []
    for names in (("x", "y"), ("sequence", "model_q"), ("a-b", "c.d"), ("_0", "x y")):
        over = mesh((4, 2), names)
        found.append(np.asarray(jax.jit(lambda x: x.sum(0))(put(x, over, *names))))
    return found


@program
def abstract_meshes_in_constraints() -> Any:
    over = mesh((2, 2), ("x", "y"))
    abstract = over.abstract_mesh

    @jax.jit
    def f(x: Any) -> Any:
        y = lax.with_sharding_constraint(x @ x.T, NamedSharding(abstract, P("y", "x")))
        return y.sum(0), y

    return f(put(values((4, 8)), over, "x", "y"))


@program
def one_lowering_for_several_meshes() -> Any:
    meshes = mesh(4, "x"), mesh(4, "x", order=(4, 5, 6, 7)), mesh(4, "x", order=(3, 2, 1, 0))

    @jax.jit
    def f(x: Any) -> Any:
        x = lax.with_sharding_constraint(x, NamedSharding(meshes[0].abstract_mesh, P("x")))
        return jnp.sin(x).sum(0)

    with compilations() as count:
        found = [f(put(values((8, 4)), over)) for over in meshes]
    return found, count


@program
def lowered_for_an_abstract_mesh() -> Any:
    over = mesh((2, 2), ("x", "y"))
    sharding = NamedSharding(AbstractMesh((2, 2), ("x", "y")), P("x", "y"))
    x = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding)
    lowered = jax.jit(lambda x: x.sum(0)).trace(x).lower(lowering_platforms=("cpu",))
    refused = error(lowered.compile)
    try:
        compiled = lowered.compile(device_assignment=tuple(over.devices.flat))
    except TypeError as failed:
        return refused, type(failed).__name__
    return refused, compiled(put(values((8, 4)), over, "x", "y"))


@program
def meshes_made_by_jax() -> Any:
    over = jax.make_mesh((4, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return jax.jit(sums)(put(values((8, 8)), over, "x", "y"))


@program
def mesh_as_a_context() -> Any:
    over = mesh((4, 2), ("x", "y"))
    f = jax.jit(sums)
    with over:
        inside = f(values((8, 8))), f(put(values((8, 8)), over, "y"))
    with mesh((2, 2), ("x", "y")):
        smaller = f(jnp.asarray(values((8, 8))))
    return inside, smaller, f(values((8, 8)))


@program
def set_mesh_for_good_and_back() -> Any:
    over = mesh((4, 2), ("x", "y"))
    with jax.set_mesh(over):
        x = jnp.ones((8, 8)) * 0.1
        found = jax.jit(sums)(jax.device_put(x, P("x", "y"))), str(jax.sharding.get_mesh())
        with jax.set_mesh(mesh((2, 4), ("a", "b"))):
            other = jax.jit(sums)(jax.device_put(values((8, 8)), P("b", "a")))
    return found, other


@program
def an_axis_that_is_replicated() -> Any:
    over = mesh((2, 4), ("x", "y"))
    f = jax.jit(sums)
    return f(put(values((8, 8)), over, "x")), f(put(values((8, 8)), over, None, "y"))


@program
def halves_of_an_axis_hold_different_sums() -> Any:
    over = mesh(8, "x")

    @jax.jit
    def f(x: Any) -> Any:
        # Two halves, each summed over four devices.
        halves = x.reshape(2, 16, 3)
        return halves.sum(1), (halves * jnp.arange(2.0)[:, None, None]).sum(1)

    return f(put(values((32, 3)), over, "x"))


@program
def meshes_with_a_renamed_axis_under_use_abstract_mesh() -> Any:
    needs("jax.sharding.use_abstract_mesh", "jax.sharding.reshard")
    over = mesh((2, 2), ("x", "y"), explicit=True)

    @jax.jit
    def f(x: Any) -> Any:
        y = jnp.sin(x)
        renamed = over.abstract_mesh.update(axis_sizes=(4, 1), axis_names=("a", "b"))
        with jax.sharding.use_abstract_mesh(renamed):
            z = jax.sharding.reshard(y, P(("a", "b"), None))
            return z * 2, z.sum(0)

    with jax.set_mesh(over):
        return f(put(values((8, 4)), over, "x", "y"))
