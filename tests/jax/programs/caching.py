"""Programs that share a folder of compiled programs, the persistent cache of JAX's."""

from __future__ import annotations

import hashlib
import os
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.jax.programs.checks import without_warnings


def programs(x: Any) -> list[Any]:
    mesh = x.sharding.mesh

    def inserted(x: Any) -> Any:
        return x.sum(0)

    def both(x: Any) -> Any:
        body = jax.shard_map(
            lambda x: lax.psum(x.sum(0), "d"), mesh=mesh, in_specs=P("d"), out_specs=P()
        )
        return body(x) + (x * 2).sum(0)

    def looping(x: Any) -> Any:
        return lax.scan(lambda c, _: (c + (x * c).sum(0), c.sum()), x[0], None, 3)

    def gradient(x: Any) -> Any:
        return jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(jnp.ones(x.shape[1]))

    return [jax.jit(each)(x) for each in (inserted, both, looping, gradient)]


def digest() -> None:
    """Print a digest of the programs' results under GPUSIM_TEXT, or without it by XLA."""
    values = np.random.default_rng(1).normal(size=(2 * jax.device_count(), 64)).astype(np.float32)
    mesh = Mesh(np.array(jax.devices()), ("d",))
    x = jax.device_put(values, NamedSharding(mesh, P("d", None)))
    found = hashlib.sha256()
    text = os.environ.get("GPUSIM_TEXT")
    with without_warnings(text) if text else nullcontext():
        for _ in range(2):
            for leaf in jax.tree.leaves(programs(x)):
                found.update(np.asarray(leaf).tobytes())
    print(found.hexdigest())
