"""Arrays of several devices: how they are made, moved, read, kept and given away."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import NamedSharding, SingleDeviceSharding

from tests.jax.ground import P, error, mesh, needs, program, put, shards, values


def grid(x: Any, *spec: Any) -> Any:
    """An array on a mesh of 4 by 2, sharded over x and y unless said otherwise."""
    return put(x, mesh((4, 2), ("x", "y")), *(spec or ("x", "y")))


@program
def made_from_the_data_of_a_process() -> Any:
    sharding = NamedSharding(mesh((4, 2), ("x", "y")), P("x", "y"))
    x = jax.make_array_from_process_local_data(sharding, values((8, 4)))
    return x, jax.jit(lambda x: x.sum(0))(x)


@program
def made_from_pieces_in_any_order() -> Any:
    over = mesh(4, "x", order=(3, 0, 2, 1))
    whole = values((8, 4))
    sharding = NamedSharding(over, P("x"))
    pieces = [
        jax.device_put(whole[index], device)
        for device, index in sharding.addressable_devices_indices_map((8, 4)).items()
    ]
    x = jax.make_array_from_single_device_arrays((8, 4), sharding, pieces[::-1])
    return x, jax.jit(lambda x: (x.sum(0), x @ x.T))(x), shards(x)


@program
def copies() -> Any:
    x = jax.jit(lambda x: x @ x.T)(grid(values((8, 4))))
    again = [copy.copy(x), copy.deepcopy(x), x.copy(), jnp.array(x), jnp.copy(x), jnp.asarray(x)]
    return again, [jax.jit(lambda x: x.sum(0))(each) for each in again]


@program
def pickles() -> Any:
    total = jax.jit(lambda x: x.sum(0))(grid(values((8, 4))))
    return pickle.loads(pickle.dumps(total)), total


@program
def read_by_numpy() -> Any:
    x = jax.jit(lambda x: x - x.mean(0))(grid(values((8, 4))))
    return (
        np.asarray(x), np.asarray(x)[2:4].sum(0), jax.device_get({"x": x, "y": [x.sum(0)]}),
        [np.asarray(row) for row in x], x.tolist()[0][:1], len(x), np.sum(x, 0),
    )  # fmt: skip


@program
def numbers_of_python() -> Any:
    total = jax.jit(lambda x: (jnp.round(x * 4)).sum())(grid(values((8, 4))))
    return int(total), bool(total), total.item(), f"{total:.1f}", float(total), int(total) + 1


@program
def asynchronous_copies() -> Any:
    total = jax.jit(lambda x: x.sum(0))(grid(values((8, 4))))
    total.copy_to_host_async()
    jax.block_until_ready({"a": total})
    return total, total.is_ready()


@program
def moved_between_devices() -> Any:
    total = jax.jit(lambda x: x.sum(0))(grid(values((8, 4))))
    one = jax.device_put(total, jax.devices()[5])
    back = jax.device_put(one, NamedSharding(mesh((2, 4), ("a", "b")), P("b")))
    return one, back, jax.jit(jnp.sum)(back), jax.jit(jnp.sum)(one)


@program
def put_as_a_tree() -> Any:
    over = mesh((4, 2), ("x", "y"))
    tree = {"w": values((8, 4)), "b": values(4, seed=1), "n": 3}
    where = {"w": NamedSharding(over, P("x")), "b": NamedSharding(over, P("y")), "n": None}
    placed = jax.device_put(tree, {**where, "n": NamedSharding(over, P())})
    return placed, jax.jit(lambda t: (t["w"] @ t["b"]).sum() * t["n"])(placed)


@program
def single_devices() -> Any:
    x = values((8, 4))
    placed = [jax.device_put(x, SingleDeviceSharding(device)) for device in jax.devices()[::3]]
    f = jax.jit(lambda x: (x.sum(0), x @ x.T))
    return [f(each) for each in placed]


@program
def shardings_of_types() -> Any:
    sharding = NamedSharding(mesh((4, 2), ("x", "y")), P("x", "y"))
    kind = jax.ShapeDtypeStruct((8, 4), np.float32, sharding=sharding)
    ones = jnp.ones_like(kind)
    made = jnp.zeros((8, 4), device=sharding), jnp.full((8, 4), 0.1, device=sharding)
    f = jax.jit(lambda x: x.sum(0))
    return (
        ones,
        made,
        f(ones),
        f(made[1]),
        jnp.arange(8.0, device=NamedSharding(sharding.mesh, P("x"))),
    )


@program
def equivalent_shardings() -> Any:
    over, same = mesh((4, 2), ("x", "y")), mesh(8, "z")
    one, two = NamedSharding(over, P(("x", "y"))), NamedSharding(same, P("z"))
    x = jax.device_put(values((8, 4)), one)
    f = jax.jit(lambda x: x.sum(0), in_shardings=two)
    return one.is_equivalent_to(two, 2), one == two, f(x)


@program
def replicas_are_equal() -> Any:
    x = grid(values((8, 4)), "x")
    total = jax.jit(lambda x: (x.sum(0), x.mean(), x @ x.T))(x)
    return [
        len(
            {
                np.asarray(each.data).tobytes()
                for each in leaf.addressable_shards
                if each.index == at
            }
        )
        for leaf in total
        for at in {str(each.index): each.index for each in leaf.addressable_shards}.values()
    ]


@program
def arrays_of_many_hosts() -> Any:
    over = mesh((4, 2), ("x", "y"))
    x = jax.jit(lambda x: x - x.sum(0))(put(values((8, 4)), over, "x"))
    local = multihost_utils.global_array_to_host_local_array(x, over, P("x"))
    whole = multihost_utils.host_local_array_to_global_array(values((8, 4)), over, P("x"))
    return (
        local, jax.jit(lambda x: x.sum(0))(whole), multihost_utils.process_allgather(x, tiled=True),
        multihost_utils.broadcast_one_to_all(x),
    )  # fmt: skip


@program
def meshes_of_mesh_utils() -> Any:
    devices = mesh_utils.create_device_mesh((2, 4))
    over = jax.sharding.Mesh(devices, ("a", "b"))
    return jax.jit(lambda x: x.sum(1))(put(values((8, 8)), over, "a", "b"))


@program
def exchanged_by_dlpack() -> Any:
    total = jax.jit(lambda x: x.sum(0))(grid(values((8, 4))))
    one = jax.device_put(total, jax.devices()[0])
    return jnp.from_dlpack(one) * 2, np.from_dlpack(one)


@program
def operators_and_methods() -> Any:
    x, y = grid(values((8, 4))), grid(values((8, 4), seed=1), "y", "x")
    return (
        x + y, x @ y.T, (x > y).any(0), x.at[1].set(0).sum(0), x.dot(y.T), x.prod(), x.cumsum(0),
        x.astype(jnp.bfloat16).sum(0), divmod(x, 2.0)[0], abs(x).max(), x.round().sum(), -x.min(1),
        x.std(0), x.take(jnp.array([0, 5]), 0), x.flatten().sum(), x.diagonal(), x.trace(),
    )  # fmt: skip


@program
def errors_of_arrays() -> Any:
    x = grid(values((8, 4)))
    total = jax.jit(lambda x: x.sum(0))(x)
    return [
        error(float, total), error(bool, total), error(hash, total), error(lambda: total[9:2, 1]),
        error(lambda: total.at[0]._set(1)), error(iter, jax.jit(jnp.sum)(x)),
        error(lambda: total.__setitem__(0, 1)),
    ]  # fmt: skip


@program
def weak_references_and_garbage() -> Any:
    import gc

    f = jax.jit(lambda x: x.sum(0))
    x = grid(values((8, 4)))
    for _ in range(20):
        total = f(x)
    gc.collect()
    before = len(jax.live_arrays())
    kept = [f(x) for _ in range(3)]
    return total, len(jax.live_arrays()) - before, kept


@program
def ragged_shards_are_read() -> Any:
    needs("jax.make_array_from_callback")
    over = mesh((4, 2), ("x", "y"))
    sharding = NamedSharding(over, P(None, ("y", "x")))
    whole = values((4, 16))
    x = jax.make_array_from_callback((4, 16), sharding, lambda index: whole[index])
    return x, jax.jit(lambda x: (x.sum(1), x.sum(0)))(x), shards(x)
