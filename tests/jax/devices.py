"""The devices that JAX shows in this process, and functions mapped over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

DEVICES = jax.device_count()
MESH = jax.sharding.Mesh(np.array(jax.devices()), ("i",))
SPLIT = jax.NamedSharding(MESH, P("i"))


def mapped(function: Callable[..., Any], *, check: bool = False, mesh: Any = MESH) -> Any:
    """The function on each device, on values whose leading axis is the devices'."""

    def local(*arguments: Any) -> Any:
        own = jax.tree.map(lambda x: x[0], arguments)
        return jax.tree.map(lambda x: jnp.expand_dims(x, 0), function(*own))

    axes = P(mesh.axis_names)
    whole = jax.shard_map(local, mesh=mesh, in_specs=axes, out_specs=axes, check_vma=check)
    return jax.jit(whole)


def same(found: Any, expected: Any) -> None:
    """Equal dtypes, shapes and bits."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert found.tobytes() == np.ascontiguousarray(expected).tobytes(), (found, expected)


def first(results: Any) -> Any:
    """The first device's value. (Indexing JAX's array would be a program with a sum.)"""
    return np.asarray(results)[0]


def everywhere(result: Any) -> Any:
    """A Result as stacked values."""
    if result.mapped:
        return np.stack(result.value)
    return np.broadcast_to(result.value, (DEVICES, *result.value.shape))
