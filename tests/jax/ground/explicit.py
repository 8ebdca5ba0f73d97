"""Explicit meshes: shardings in types, reshard, and sums that are put off (unreduced)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, reshard

from tests.jax.ground import P, Skip, error, mesh, needs, program, put, values


def place(x: Any, *spec: Any) -> Any:
    """An array on the mesh of the context."""
    return jax.device_put(x, P(*spec))


def types(*arrays: Any) -> list[str]:
    """The types of arrays, with shardings."""
    return [str(jax.typeof(each)) for each in arrays]


def over(*shape: int) -> Any:
    """A context with an explicit mesh over the axes x, y and z."""
    return jax.set_mesh(mesh(shape, ("x", "y", "z")[: len(shape)], explicit=True))


@program
def elementwise() -> Any:
    with over(2, 2):
        x = place(values((8, 4)), "x", "y")
        f = lambda x: jnp.sin(x * 2) * x + 1  # noqa: E731
        return f(x), jax.jit(f)(x), jax.jit(jax.grad(lambda x: f(x).sum()))(x)


@program
def sums_along_each_axis() -> Any:
    found = []
    with over(2, 2):
        for spec in (("x", "y"), (("x", "y"),), (None, "x"), ("y", None)):
            x = place(values((8, 4)), *spec)
            f = jax.jit(lambda x: (x.sum(), x.sum(0), x.sum(1), x.mean(0), x.max(1), x.min()))
            found.append((f(x), x.sum(0), types(*f(x))))
    return found


@program
def reductions_of_other_kinds() -> Any:
    with over(2, 2):
        x = place(values((8, 4)), "x", "y")
        f = jax.jit(
            lambda x: (
                x.prod(0), x.var(0), jnp.linalg.norm(x, axis=0), jnp.any(x > 0, 0), x.argmax(0),
                jax.nn.logsumexp(x, 0), jax.nn.softmax(x, 0), jnp.std(x),
            )
        )  # fmt: skip
        return f(x)


@program
def products() -> Any:
    found = []
    with over(2, 2):
        for a, b in (
            (("x", None), (None, "y")), (("x", "y"), (None, None)), (("x", None), ("x", None)),
            ((None, "y"), (None, "y")),
        ):  # fmt: skip
            left, right = place(values((8, 4)), *a), place(values((4, 8), seed=1), *b)
            found.append((left @ right, jax.jit(jnp.dot)(left, right)))
    return found


@program
def products_with_a_result_sharding() -> Any:
    with over(2, 2):
        a, b = place(values((8, 4)), "x", "y"), place(values((4, 8), seed=1), "y", None)

        @jax.jit
        def f(a: Any, b: Any) -> Any:
            return (
                jnp.einsum("ij,jk->ik", a, b, out_sharding=P("x", None)),
                jnp.dot(a, b, out_sharding=P("x", "y")),
                jnp.matmul(a, b, out_sharding=P(None, "y")),
                jnp.tensordot(a, b, ([1], [0]), out_sharding=P("x")),
            )

        grads = jax.jit(jax.grad(lambda a, b: sum(y.sum() for y in f(a, b)), (0, 1)))
        return f(a, b), grads(a, b)


@program
def products_that_are_refused() -> Any:
    with over(2, 2):
        x = values((8, 4))
        dot = jax.jit(jnp.dot)
        return [
            error(dot, place(x, *a), place(x.T, *b))
            for a, b in (
                (("x", None), (None, "x")), (("x", "y"), ("x", "y")), (("x", "y"), ("y", None)),
                ((None, "y"), ("y", None)),
            )
        ]  # fmt: skip


@program
def batches_of_products() -> Any:
    with over(2, 2, 2):
        a = place(values((4, 2, 8)), "x", "y", "z")
        b = place(values((4, 8, 6), seed=1), "x", "z", None)
        f = jax.jit(lambda a, b: jnp.einsum("bij,bjk->bik", a, b, out_sharding=P("x", "y", None)))
        return f(a, b), jax.jit(jax.grad(lambda a, b: f(a, b).sum()))(a, b)


@program
def several_operands_of_einsum() -> Any:
    with over(4):
        arrays = [place(values((8, 6, 4), seed=s), "x", None, None) for s in range(3)]
        f = jax.jit(
            lambda x, y, z: jnp.einsum("btd,bti,btj->ijd", x, y, z, out_sharding=P("x", None, None))
        )
        ab, bc = place(values((8, 16)), None, "x"), place(values((16, 4)), "x", None)
        g = jax.jit(lambda a, b, c: jnp.einsum("ab,bc,ac->c", a, b, c, out_sharding=P()))
        return f(*arrays), g(ab, bc, place(values((8, 4), seed=2)))


@program
def resharding() -> Any:
    with over(2, 2):
        x = place(values((8, 4)), "x", "y")
        specs = P("y", "x"), P(None, ("x", "y")), P(), P(("y", "x"), None)
        f = jax.jit(lambda x: [reshard(x, spec).sum(0) for spec in specs])
        grads = jax.jit(jax.grad(lambda x: sum((reshard(x, s) ** 2).sum() for s in specs)))
        return f(x), [reshard(x, spec) for spec in specs], grads(x), reshard(values(8), P("x"))


@program
def sums_put_off() -> Any:
    with over(2, 2):
        a, b = place(values((8, 4)), "x", "y"), place(values((4, 8), seed=1), "y", None)

        @jax.jit
        def f(a: Any, b: Any) -> Any:
            one = jnp.einsum("ij,jk->ik", a, b, out_sharding=P("x", unreduced={"y"}))
            two = jnp.einsum("ij,jk->ik", a * 2, b, out_sharding=P("x", unreduced={"y"}))
            return reshard(one + two, P("x", None))

        grads = jax.jit(jax.grad(lambda a, b: f(a, b).sum(), (0, 1)))
        return f(a, b), grads(a, b), f.lower(a, b).as_text().count("unreduced")


@program
def sums_put_off_and_scattered() -> Any:
    with over(2, 2):
        a, b = place(values((8, 4)), None, "y"), place(values((4, 8), seed=1), "y", None)

        @jax.jit
        def f(a: Any, b: Any) -> Any:
            partial = jnp.dot(a, b, out_sharding=P(None, None, unreduced={"y"}))
            return reshard(partial, P("y", None)), reshard(partial, P(None, "y"))

        return f(a, b)


@program
def unreduced_results_and_arguments() -> Any:
    with over(2, 2):
        a, b = place(values((8, 4)), "x", "y"), place(values((4, 8), seed=1), "y", None)
        off = P("x", None, unreduced={"y"})
        f = jax.jit(lambda a, b: jnp.einsum("ij,jk->ik", a, b, out_sharding=off))
        partial = f(a, b)
        twice = jax.jit(lambda p: p + p)(partial)
        final = jax.jit(lambda p: reshard(p + p, P("x", None)))(twice)
        local = [each.data.shape for each in partial.addressable_shards]
        return (
            str(partial.sharding), str(twice.sharding), str(local), final,
            reshard(partial, P("x", None)), reshard(twice, P(None, "x")),
        )  # fmt: skip


@program
def unreduced_sums_of_several_axes() -> Any:
    with over(2, 2, 2):
        a = place(values((8, 8)), "x", ("y", "z"))
        b = place(values((8, 4), seed=1), ("y", "z"), None)
        off = P("x", None, unreduced={"y", "z"})

        @jax.jit
        def f(a: Any, b: Any) -> Any:
            return reshard(jnp.einsum("ij,jk->ik", a, b, out_sharding=off), P("x", None))

        return f(a, b)


@program
def unreduced_gradients() -> Any:
    with over(4):
        w = place(values((4, 4)))
        x = place(values((8, 4), seed=1), "x", None)

        def loss(w: Any, x: Any) -> Any:
            w = reshard(w, P(None, None, reduced={"x"}))
            return (jnp.tanh(x @ w) ** 2).sum()

        try:
            grad = jax.jit(jax.grad(loss))(w, x)
        except TypeError as missing:
            raise Skip("this JAX has no `reduced` in PartitionSpec") from missing
        return grad, str(grad.sharding)


@program
def unreduced_accumulation_of_gradients() -> Any:
    with over(4):
        a = place(values((3, 8, 8)), None, None, "x")
        b = place(values((3, 8, 4), seed=1), None, "x", None)
        off = P(None, None, unreduced={"x"})

        @jax.jit
        def f(a: Any, b: Any) -> Any:
            def step(total: Any, ab: Any) -> Any:
                return total + jnp.dot(*ab, out_sharding=off), None

            first = jnp.dot(a[0], b[0], out_sharding=off)
            total, _ = lax.scan(step, first, (a[1:], b[1:]))
            return reshard(total, P())

        return f(a, b)


@program
def errors_of_unreduced_sums() -> Any:
    with over(2, 2, 2):
        a, b = place(values((8, 4)), "x", "y"), place(values((4, 8)), "y", None)
        c, d = place(values((8, 4)), "x", "z"), place(values((4, 8)), "z", None)

        def dot(a: Any, b: Any, *off: str) -> Any:
            return jnp.einsum("ij,jk->ik", a, b, out_sharding=P("x", unreduced={*off}))

        return [
            error(jax.jit(lambda a, b: dot(a, b, "z")), a, b),
            error(jax.jit(lambda a, b, c, d: dot(a, b, "y") + dot(c, d, "z")), a, b, c, d),
            error(jax.jit(lambda a, b: jnp.sin(dot(a, b, "y"))), a, b),
            error(jax.jit(lambda a, b: dot(a, b, "y") * dot(a, b, "y")), a, b),
        ]


@program
def reshapes_and_transposes() -> Any:
    with over(2, 2):
        x = place(values((8, 6, 4)), "x", None, "y")

        @jax.jit
        def f(x: Any) -> Any:
            return (
                x.reshape(8, 2, 3, 4).sum((0, 2)), x.transpose(2, 0, 1).sum(1),
                lax.reshape(x, (4, 2, 6, 4)).sum(1), x[..., None].sum((0, 1)),
                jnp.reshape(x, (48, 4), out_sharding=P("x", "y")).sum(0),
            )  # fmt: skip

        return f(x), jax.jit(jax.grad(lambda x: sum((y**2).sum() for y in f(x))))(x)


@program
def scans_and_loops() -> Any:
    with over(2, 2):
        carry = place(values((2, 8)), None, "x")
        xs = place(values((4, 8, 2), seed=1), None, "x", "y")

        @jax.jit
        def f(carry: Any, xs: Any) -> Any:
            def step(carry: Any, x: Any) -> Any:
                y = jnp.einsum("ij,jk->ik", carry, x, out_sharding=P(None, "y"))
                z = jnp.einsum("ij,kj->ik", jnp.tanh(y), x, out_sharding=P(None, "x"))
                return z, y.sum()

            return lax.scan(step, carry, xs)

        grads = jax.jit(jax.grad(lambda c, x: f(c, x)[0].sum(), (0, 1)))
        return f(carry, xs), grads(carry, xs)


@program
def gathers_with_a_result_sharding() -> Any:
    with over(2, 2):
        table = place(values((16, 8)), None, "x")
        ids = place(np.arange(8, dtype=np.int32).reshape(4, 2) * 3 % 16, "x", None)

        @jax.jit
        def f(table: Any, ids: Any) -> Any:
            return table.at[ids].get(out_sharding=P("x", None, None))

        return f(table, ids), jax.jit(jax.grad(lambda t, i: (f(t, i) ** 2).sum()))(table, ids)


@program
def scatters() -> Any:
    with over(2, 2):
        x, ids = place(values((4, 10, 8)), "x", None, "y"), place(np.arange(4) * 2, "x")
        new = place(values((4, 8), seed=1), "x", "y")
        f = jax.jit(jax.vmap(lambda x, i, y: x.at[i].add(y)))
        grads = jax.jit(jax.grad(lambda x, i, y: (f(x, i, y) ** 2).sum(), (0, 2)))
        return f(x, ids, new), f(x, ids, new).sum(0), grads(x, ids, new)


@program
def random_numbers_with_a_result_sharding() -> Any:
    with over(2, 2):
        key = jax.random.key(1)
        spec = P("x", "y")

        @jax.jit
        def f(key: Any) -> Any:
            each = [
                jax.random.normal(key, (8, 12), out_sharding=spec),
                jax.random.uniform(key, (8, 12), out_sharding=spec),
                jax.random.bits(key, (8, 12), out_sharding=spec),
            ]
            return each, each[0].sum(0), each[1].mean()

        return f(key)


@program
def arrays_made_with_a_sharding() -> Any:
    with over(4):
        f = jax.jit(lambda: jnp.arange(8.0, out_sharding=P("x")).sum())
        return (
            jnp.zeros((8, 2), out_sharding=P("x")), jnp.ones(8, out_sharding=P("x")).sum(),
            jnp.arange(8.0, out_sharding=P("x")), f(),
            jnp.full((8,), 0.1, out_sharding=P("x")).sum(),
        )  # fmt: skip


@program
def vmap_over_a_sharded_axis() -> Any:
    with over(2, 2):
        x = place(values((8, 4)), "x", "y")
        f = jax.jit(jax.vmap(lambda row: row.sum()))
        g = jax.vmap(lambda column: (column / column.sum()).max(), 1)
        refused = error(jax.vmap(jnp.dot, (0, 1)), x, place(values((4, 8)), None, "y"))
        return f(x), g(x), refused, jax.vmap(lambda r: reshard(r, P()))(x)


@program
def mixed_axis_types() -> Any:
    both = mesh((2, 2), ("x", "y"), explicit=(True, False))
    with jax.set_mesh(both):
        x, w = put(values((8, 4)), both, "x", "y"), put(values((4, 8), seed=1), both, "y", None)
        f = jax.jit(lambda x, w: ((x @ w), (x @ w).sum(0), x.sum(1), x.mean()))
        return f(x, w), types(*f(x, w)), jax.jit(jax.grad(lambda x, w: (x @ w).sum()))(x, w)


@program
def without_a_mesh_in_the_context() -> Any:
    on = mesh((4, 2), ("x", "y"), explicit=True)
    x, w = put(values((8, 4)), on, "x", None), put(values((4, 8), seed=1), on, None, "y")
    f = jax.jit(lambda x, w: ((x @ w) * 2, x.sum(0), w.sum(1)))
    return f(x, w), x.sum(0), error(jax.jit(lambda x: reshard(x, P("y"))), x).partition(":")[0]


@program
def assertions_by_constraints() -> Any:
    with over(2, 2):
        f = jax.jit(lambda x: lax.with_sharding_constraint(x, P("x")).sum(0))
        return f(place(values((8, 4)), "x", None)), error(f, place(values((8, 4)), "y", None))


@program
def from_automatic_to_explicit_and_back() -> Any:
    needs("jax.sharding.use_abstract_mesh")
    on = mesh((2, 2), ("x", "y"), explicit=True)
    automatic = on.abstract_mesh.update_axis_types({"x": AxisType.Auto, "y": AxisType.Auto})

    @jax.jit
    def f(x: Any) -> Any:
        with jax.sharding.use_abstract_mesh(automatic):
            y = reshard(x, P(None, None))
            y = jnp.sin(y) @ y.T
        return reshard(y, P("x", None)).sum(0)

    with jax.set_mesh(on):
        return f(place(values((8, 4)), "x", "y"))


@program
def shard_map_by_the_context() -> Any:
    with over(4, 2):
        x = place(values((8, 4)), "x", "y")

        @jax.jit
        def f(x: Any) -> Any:
            whole = jax.shard_map(lambda x: lax.psum(x.sum(0), "x"), out_specs=P("y"))(x)
            some = jax.shard_map(
                lambda x: lax.psum(x, "x").sum(1), out_specs=P(), axis_names={"x"}
            )(x)
            return whole, some, whole.sum()

        return f(x), types(*f(x))


@program
def devices_in_another_order() -> Any:
    on = Mesh(
        np.array(jax.devices())[[3, 1, 0, 2]].reshape(2, 2), ("x", "y"),
        axis_types=(AxisType.Explicit,) * 2,
    )  # fmt: skip
    with jax.set_mesh(on):
        a, b = place(values((8, 4)), "x", "y"), place(values((4, 8), seed=1), "y", None)
        off = P("x", None, unreduced={"y"})
        f = jax.jit(lambda a, b: reshard(jnp.dot(a, b, out_sharding=off), P("x", None)))
        return f(a, b), a.sum(0), jnp.dot(a, b, out_sharding=P("x", None))


@program
def shapes_of_results() -> Any:
    with over(2, 2):
        x = place(values((8, 4)), "x", "y")
        f = jax.jit(lambda x: (x.sum(0), x @ jnp.ones((4, 2))))
        return str(jax.eval_shape(f, x)), str(f.trace(x).out_info), f(x)


@program
def initializers() -> Any:
    with over(2):
        key = jax.random.key(0)
        he = jax.nn.initializers.he_normal(in_axis=0, out_axis=1)
        x = he(key, (8, 2), jnp.float32, out_sharding=P("x"))
        return x, jnp.dot(x.T, x, out_sharding=P())


@program
def single_device_meshes() -> Any:
    with over(1):
        x = place(values((8, 4)), "x", None)
        f = jax.jit(lambda x: x.sum(0))
        named = NamedSharding(mesh(1, "x", explicit=True), P("x"))
        return f(x), f(jax.device_put(values((8, 4)), named))
