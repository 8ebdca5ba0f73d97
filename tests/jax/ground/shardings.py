"""in_shardings, out_shardings, constraints, and arrays that are already somewhere."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, SingleDeviceSharding

from tests.jax.ground import P, mesh, program, put, shards, values


@program
def sum_over_sharded_axis() -> Any:
    x = put(values((16, 6)), mesh(8, "i"), "i")
    return jax.jit(lambda x: x.sum(0))(x)


@program
def product_with_contracted_axis() -> Any:
    over = mesh((4, 2), ("x", "y"))
    a, b = put(values((8, 16)), over, "x", "y"), put(values((16, 8), seed=1), over, "y", None)
    return jax.jit(jnp.dot)(a, b)


@program
def results_as_out_shardings_say() -> Any:
    over = mesh((4, 2), ("x", "y"))
    x = put(values((8, 16)), over, "x", "y")
    found = {}
    for spec in (P(), P("x"), P("y"), P("x", "y"), P(("x", "y")), P(None, ("y", "x"))):
        f = jax.jit(lambda x: x @ x.T, out_shardings=NamedSharding(over, spec))
        found[str(spec)] = f(x)
    return found


@program
def arguments_as_in_shardings_say() -> Any:
    over = mesh((4, 2), ("x", "y"))
    x, y = values((8, 16)), values((16, 8), seed=1)
    found = {}
    for left, right in ((P("x", "y"), P("y")), (P(None, "x"), P("x", "y")), (P("y"), P())):
        shardings = NamedSharding(over, left), NamedSharding(over, right)
        found[f"{left} {right}"] = jax.jit(jnp.matmul, in_shardings=shardings)(x, y)
    return found


@program
def tree_of_shardings() -> Any:
    over = mesh((2, 2), ("x", "y"))
    rows, columns = NamedSharding(over, P("x")), NamedSharding(over, P(None, "y"))
    tree = {"a": values((4, 4)), "b": [values((8, 2), seed=1), (values((2, 6), seed=2),)]}

    @partial(
        jax.jit,
        in_shardings=({"a": rows, "b": [rows, (columns,)]},),
        out_shardings={"sums": rows, "all": None},
    )
    def f(tree: Any) -> Any:
        total = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(tree))
        return {"sums": tree["a"] + total, "all": total}

    return f(tree)


@program
def prefix_of_shardings() -> Any:
    over = mesh((2, 2), ("x", "y"))
    rows = NamedSharding(over, P("x"))
    f = jax.jit(
        lambda pair, z: (pair[0] @ pair[1].T + z.sum(0), pair),
        in_shardings=(rows, rows),
        out_shardings=(rows, NamedSharding(over, P())),
    )
    return f((values((8, 4)), values((8, 4), seed=1)), values((2, 8), seed=2))


@program
def shardings_in_part() -> Any:
    over = mesh((2, 2), ("x", "y"))
    full, rows = NamedSharding(over, P("x", "y")), NamedSharding(over, P("x"))
    x = values((8, 2))
    f = jax.jit(
        lambda x, y, z: (x * 2, y @ y.T, z.sum(), z.T),
        in_shardings=(full, None, rows),
        out_shardings=(rows, None, None, full),
    )
    return f(jax.device_put(x, full), x, jax.device_put(x, rows))


@program
def unspecified_out_sharding_follows() -> Any:
    over = mesh((4, 2), ("x", "y"))
    f = jax.jit(lambda x: (x * 2, x.sum(1), x.sum(0), x.T, x.reshape(-1)))
    return f(put(values((8, 4)), over, "x", "y")), f(put(values((8, 4)), over, ("y", "x")))


@program
def constraints_in_the_middle() -> Any:
    over = mesh((4, 2), ("x", "y"))

    @jax.jit
    def f(x: Any) -> Any:
        y = lax.with_sharding_constraint(jnp.sin(x), NamedSharding(over, P("x", "y")))
        z = lax.with_sharding_constraint(y @ y.T, NamedSharding(over, P("y", "x")))
        return lax.with_sharding_constraint(z.sum(1), NamedSharding(over, P(("x", "y"))))

    return f(values((8, 8))), f(put(values((8, 8)), over, "y"))


@program
def constraint_on_a_tree() -> Any:
    over = mesh((2, 2), ("x", "y"))

    @jax.jit
    def f(tree: Any) -> Any:
        tree = lax.with_sharding_constraint(tree, NamedSharding(over, P("x", "y")))
        return jax.tree.map(lambda leaf: leaf.mean(), tree), tree

    return f([values((4, 4)), {"a": values((2, 8), seed=3)}])


@program
def unconstrained_dimensions() -> Any:
    over = mesh((2, 2), ("x", "y"))
    free = P.UNCONSTRAINED

    @jax.jit
    def f(x: Any) -> Any:
        x = lax.with_sharding_constraint(x, NamedSharding(over, P(free, "y", None)))
        y = lax.with_sharding_constraint(x * 2, NamedSharding(over, P("x", free, None)))
        return y, y.sum((0, 1))

    return f(put(values((2, 4, 6)), over, "x"))


@program
def constraint_by_spec_under_a_mesh() -> Any:
    over = mesh((4, 2), ("x", "y"))
    with over:
        f = jax.jit(lambda x: lax.with_sharding_constraint(x @ x.T, P("y", "x")).sum(0))
        return f(put(values((8, 6)), over, "x", "y"))


@program
def constraint_by_spec_under_set_mesh() -> Any:
    over = mesh((4, 2), ("x", "y"))
    with jax.set_mesh(over):
        f = jax.jit(lambda x: lax.with_sharding_constraint(x @ x.T, P("y", "x")).sum(0))
        eager = lax.with_sharding_constraint(jnp.ones((8, 4)), P("x", "y"))
        return f(values((8, 6))), f(put(values((8, 6)), over, "x", "y")), eager


@program
def specs_as_shardings_of_jit_under_set_mesh() -> Any:
    with jax.set_mesh(mesh((4, 2), ("x", "y"))):
        f = jax.jit(
            lambda x, y: (x @ y, x.sum()), in_shardings=(P("x", "y"), P("y")), out_shardings=P()
        )
        return f(values((8, 6)), values((6, 4), seed=1))


@program
def uneven_constraint() -> Any:
    over = mesh((2, 2), ("x", "y"))

    @jax.jit
    def f(x: Any) -> Any:
        short = lax.with_sharding_constraint(x[:3], NamedSharding(over, P("x")))
        shorter = lax.with_sharding_constraint(x[:5, :3], NamedSharding(over, P(None, ("x", "y"))))
        return jnp.pad(short, ((0, 1), (0, 0))), short.sum(), shorter.sum(1), short.mean(0)

    return f(put(values((8, 4)), over, "x"))


@program
def uneven_sums_of_many_lengths() -> Any:
    over = mesh(8, "x")
    found = []
    for length in (1, 3, 7, 9, 13):

        @jax.jit
        def f(x: Any) -> Any:
            x = lax.with_sharding_constraint(x, NamedSharding(over, P("x")))
            return x.sum(0), (x * x).mean(), x.max(), x.min(0)

        found.append(f(values((length, 3), seed=length)))
    return found


@program
def uncommitted_and_committed_arguments() -> Any:
    over = mesh((4, 2), ("x", "y"))
    committed, free = put(values((8, 2)), over, "x", "y"), jnp.asarray(values((8, 2)))
    f = jax.jit(lambda x, y: (x @ y.T, (x * y).sum()))
    return f(free, committed), f(committed, free), f(free, free)


@program
def numpy_and_python_arguments() -> Any:
    over = mesh((4, 2), ("x", "y"))
    x = put(values((8, 2)), over, "x", "y")
    f = jax.jit(lambda x, y, z: ((x * y).sum() + z, z))
    return f(x, values((8, 2), seed=1), 3), f(x, 2.5, np.float32(1)), f(x, True, 1j)


@program
def no_arguments() -> Any:
    over = mesh((4, 2), ("x", "y"))
    rows = NamedSharding(over, P("x"))

    @partial(jax.jit, out_shardings=(rows, None, NamedSharding(over, P())))
    def f() -> Any:
        x = lax.with_sharding_constraint(jnp.cos(jnp.arange(64.0)).reshape(8, 8), rows)
        return x, x.sum(), x.sum(0)

    return f()


@program
def no_results() -> Any:
    x = put(values((8, 2)), mesh(8, "x"), "x")
    f = jax.jit(lambda x: None)
    return f(x), jax.jit(lambda x: (x.sum(), (), {}))(x)


@program
def argument_returned_as_it_is() -> Any:
    x = put(values((8, 2)), mesh(8, "x"), "x")
    f = jax.jit(lambda x, y: (x, y, x, x.sum(), 3, y))
    return f(x, x)


@program
def unused_arguments() -> Any:
    over = mesh(8, "x")
    x, y = put(values((8, 2)), over, "x"), put(values(16, seed=1), over, "x")
    f = lambda a, b, c: c.sum()  # noqa: E731
    kept = jax.jit(f, keep_unused=True)
    dropped = jax.jit(f)
    texts = [len(each.lower(y, y, x).compile().input_shardings[0]) for each in (kept, dropped)]
    return kept(y, y, x), dropped(y, y, x), texts


@program
def closed_over_arrays() -> Any:
    over = mesh((4, 2), ("x", "y"))
    sharded, whole = put(values((8, 4)), over, "x", "y"), values((4, 4), seed=1)
    f = jax.jit(lambda x: ((x @ sharded).sum(0), (sharded @ whole).sum(), sharded))
    return f(values((2, 8), seed=2))


@program
def single_device_results_of_many_devices() -> Any:
    one = SingleDeviceSharding(jax.devices()[3])
    f = jax.jit(lambda x: x @ x.T, out_shardings=one)
    return f(values((4, 6))), jax.jit(lambda x: x * 2, in_shardings=one)(values(5))


@program
def arrays_of_callbacks_and_pieces() -> Any:
    over = mesh((4, 2), ("x", "y"))
    whole = values((8, 6))
    sharding = NamedSharding(over, P("x", "y"))
    made = jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
    pieces = [
        jax.device_put(whole[index], device)
        for device, index in sharding.devices_indices_map(whole.shape).items()
    ]
    joined = jax.make_array_from_single_device_arrays(whole.shape, sharding, pieces)
    f = jax.jit(lambda x, y: ((x * y).sum(0), (x - y).max()))
    return made, joined, f(made, joined)


@program
def resharding_by_device_put() -> Any:
    over = mesh((4, 2), ("x", "y"))
    other = mesh((2, 4), ("a", "b"), order=(7, 5, 3, 1, 6, 4, 2, 0))
    x = put(values((8, 8)), over, "x", "y")
    moved = [
        jax.device_put(x, NamedSharding(on, spec))
        for on, spec in ((over, P("y", "x")), (other, P("a")), (other, P(None, ("a", "b"))))
    ]
    f = jax.jit(lambda x: x.sum(0))
    return moved, [f(each) for each in moved], [shards(each) for each in moved]


@program
def device_put_in_a_program() -> Any:
    over = mesh((4, 2), ("x", "y"))

    @jax.jit
    def f(x: Any) -> Any:
        y = jax.device_put(x.sum(0), NamedSharding(over, P("y")))
        return y * 2, jax.device_put(x, NamedSharding(over, P())).sum()

    return f(put(values((8, 8)), over, "x", "y"))


@program
def eager_operations_on_sharded_arrays() -> Any:
    x = put(values((8, 8)), mesh((4, 2), ("x", "y")), "x", "y")
    return (
        x.sum(), x.sum(0), x.sum(1), x.mean(), x @ x, x[0], x[:, 1], x[2:5], x[::3, ::-1], x.T,
        jnp.concatenate([x, x]), jnp.linalg.norm(x), x.max(0), x.argmin(), jnp.sort(x, 0),
        jnp.cumsum(x, 0), x.reshape(4, 16), jnp.std(x), jnp.dot(x[0], x[1]), float(x.sum()),
    )  # fmt: skip


@program
def updates_of_sharded_arrays() -> Any:
    x = put(values((8, 8)), mesh((4, 2), ("x", "y")), "x", "y")
    index = np.array([0, 2, 2, 5, 7])

    @jax.jit
    def f(x: Any, index: Any) -> Any:
        return (
            x.at[index].add(1.5), x.at[index].set(2), x.at[:, 3].multiply(0.5), x.at[0].get(),
            x.at[index].max(0.25), x[index].sum(0), x.at[index, index].add(x[index].sum(1)),
        )  # fmt: skip

    return f(x, index)


@program
def indexing_with_sharded_indices() -> Any:
    over = mesh((4, 2), ("x", "y"))
    table = put(values((16, 4)), over, "x", "y")
    ids = put(np.arange(8, dtype=np.int32) * 5 % 16, over, "x")

    @jax.jit
    def f(table: Any, ids: Any) -> Any:
        taken = table[ids]
        summed = jax.ops.segment_sum(taken, ids, num_segments=16)
        return taken, summed, jnp.take_along_axis(table, ids[:, None] % 4, axis=0).sum()

    return f(table, ids)


@program
def names_of_arguments() -> Any:
    over = mesh(8, "x")
    x = put(values((8, 4)), over, "x")
    f = jax.jit(lambda x, *rest, scale=1.0, **more: (x * scale).sum() + sum(rest) + more["b"].sum())
    return f(x, 1.0, 2.0, b=x), f(x, scale=x, b=x * 2)


@program
def many_arguments_and_results() -> Any:
    over = mesh(8, "x")
    arrays = [put(values((8, 2), seed=seed), over, *("x",)[: seed % 2]) for seed in range(40)]
    f = jax.jit(lambda *xs: [x.sum(0) for x in xs] + [sum(xs)])
    return f(*arrays)


@program
def replicated_sums_are_not_between_devices() -> Any:
    over = mesh((4, 2), ("x", "y"))
    x = put(values((8, 4)), over)
    f = jax.jit(lambda x: (x.sum(), x @ x.T, x.mean(0)))
    return f(x), "all-reduce" in f.lower(x).compile().as_text()


@program
def axes_of_size_one() -> Any:
    over = mesh((1, 8, 1), ("a", "b", "c"))
    x = put(values((8, 8, 2)), over, "a", "b", "c")
    f = jax.jit(lambda x: (x.sum(1), x.sum(0), jnp.einsum("abc,dbc->ad", x, x)))
    one = put(values((4, 4)), mesh((1, 1), ("a", "b")), "a", "b")
    return f(x), jax.jit(lambda x: x.sum())(one)


@program
def one_device_of_many() -> Any:
    over = mesh(1, "x", order=(5,))
    x = put(values((8, 4)), over, "x")
    return jax.jit(lambda x: (x.sum(), x @ x.T))(x)


@program
def default_devices() -> Any:
    f = jax.jit(lambda x: (x.sum(), x * 2))
    with jax.default_device(jax.devices()[6]):
        found = f(values(12))
    return found, f(values(12)), [sorted(d.id for d in each.devices()) for each in found]


@program
def live_arrays_and_deletion() -> Any:
    x = put(values((8, 4)), mesh(8, "x"), "x")
    f = jax.jit(lambda x: x.sum(0))
    total = f(x)
    x.delete()
    return total, x.is_deleted(), total.is_deleted()


@program
def views_of_shards() -> Any:
    x = put(values((8, 4)), mesh((4, 2), ("x", "y")), "x", "y")
    total = jax.jit(lambda x: x.sum(0))(x)
    return (
        [np.asarray(each.data) for each in total.addressable_shards],
        [each.replica_id for each in total.addressable_shards],
        total.is_fully_replicated,
        x.is_fully_replicated,
        str(total.sharding.shard_shape(total.shape)),
        np.asarray(jnp.asarray(total).addressable_data(3)),
    )


@program
def shards_of_one_device_in_another_program() -> Any:
    x = put(values((8, 4)), mesh(8, "x"), "x")
    parts = jax.jit(lambda x: jnp.tanh(x))(x)
    own = [jax.jit(lambda p: p.sum(0))(each.data) for each in parts.addressable_shards]
    return own, [sorted(d.id for d in each.devices()) for each in own]
