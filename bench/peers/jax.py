"""JAX on the CPU: shard_map over fake devices, and jit(vmap(axis_name)) on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gpusim
import gpusim.jax
from bench.cases import SOURCE, SUMS, Case
from bench.programs import program
from bench.timing import timed

from .base import Peer, Samples, Unserved, pick
from .inputs import stacked
from .ours import reduction


class JaxPeer(Peer):
    """Compiled in `prepare`; a call ends when its result is there."""

    def __init__(self) -> None:
        self._call: Callable[[], Any] | None = None

    def _load(self, case: Case) -> Callable[[], Any]:
        raise NotImplementedError

    def prepare(self, case: Case) -> None:
        call = self._load(case)
        try:
            call()
        except NotImplementedError as error:
            raise Unserved(f"JAX: {in_a_line(error)}") from error
        except jax.errors.JaxRuntimeError as error:
            raise Unserved(f"XLA: {in_a_line(error)}") from error
        self._call = call

    def run(self, repeats: int) -> list[float]:
        assert self._call is not None
        return timed(self._call, repeats)

    def release(self) -> None:
        self._call = None
        jax.clear_caches()


class ShardMap(JaxPeer):
    """A fake device for each replica, as set by XLA_FLAGS."""

    name = "JAX shard_map"

    def _load(self, case: Case) -> Callable[[], Any]:
        mesh = Mesh(jax.devices(), ("i",))
        if mesh.size != case.replicas:
            raise Unserved(f"{mesh.size} devices for {case.replicas} replicas")
        each = PartitionSpec("i")
        sharding = NamedSharding(mesh, each)
        arguments = [jax.device_put(array, sharding) for array in stacked(case)]
        one = masked_broadcast if case.collective == "pbroadcast" else program(case, jax.lax)

        def shard(*blocks: Any) -> Any:
            result = one(*(block[0] for block in blocks))
            return result[None] if case.mapped else result

        out = each if case.mapped else PartitionSpec()
        compiled = jax.jit(
            jax.shard_map(shard, mesh=mesh, in_specs=each, out_specs=out, check_vma=False)
        )
        return lambda: compiled(*arguments).block_until_ready()

    def sample(self, replicas: list[int], positions: list[int]) -> Samples:
        assert self._call is not None
        shards = {shard.device.id: shard.data for shard in self._call().addressable_shards}
        return {r: pick(shards[r].reshape(-1), positions) for r in replicas}


def masked_broadcast(x: Any) -> Any:
    """The sum of one value and zeros, for pbroadcast, which JAX does not have on the CPU."""
    return jax.lax.psum(jnp.where(jax.lax.axis_index("i") == SOURCE, x, jnp.zeros_like(x)), "i")


class Vmap(JaxPeer):
    """One device, which may use all cores."""

    name = "JAX vmap"

    def _load(self, case: Case) -> Callable[[], Any]:
        arguments = [jax.device_put(array) for array in stacked(case)]
        self._mapped = case.mapped
        f = program(case, jax.lax)
        out_axes = 0 if case.mapped else None
        compiled = jax.jit(jax.vmap(f, axis_name="i", out_axes=out_axes))
        return lambda: compiled(*arguments).block_until_ready()

    def sample(self, replicas: list[int], positions: list[int]) -> Samples:
        assert self._call is not None
        result = self._call()
        return {r: pick(result[r] if self._mapped else result, positions) for r in replicas}


def in_a_line(error: BaseException) -> str:
    """An error in a table's width."""
    return (" ".join(str(error).split()) or type(error).__name__)[:160]


class Installed(ShardMap):
    """gpusim's collectives in JAX's programs, in place of XLA's."""

    name = "gpusim in JAX"

    def _load(self, case: Case) -> Callable[[], Any]:
        if case.collective not in SUMS and not case.ragged:
            raise Unserved("it is XLA's own")
        gpusim.jax.install(reduction(case).get("reduction", gpusim.Reduction()))
        return super()._load(case)
