"""JAX on eight simulated CPU devices, the oracle of the collectives.

Import this module before any other imports jax, which fixes devices and 64-bit types on import.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

os.environ["XLA_FLAGS"] = " ".join(
    (
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        # Otherwise XLA may keep float32 between two 16-bit operations.
        "--xla_allow_excess_precision=false",
        # Each program runs once: compiling it is what costs.
        "--xla_backend_optimization_level=0",
    )
).strip()
os.environ["JAX_ENABLE_X64"] = "1"
os.environ["JAX_PLATFORMS"] = "cpu"
# XLA prints a stack trace for programs that it rejects, besides the exception.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

Axes = tuple[tuple[str, int], ...]


@functools.cache
def devices() -> list[Any]:
    """The eight devices. XLA starts its threads here, at a test's first call, not on import."""
    if jax.device_count() < 8 or not jax.config.jax_enable_x64:
        raise RuntimeError("jax was imported before jax_oracle: it lacks eight devices or float64")
    return jax.devices()


def _named(axis_name: Any) -> tuple[str, ...]:
    return tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)


def _front(axis: int, ndim: int) -> int:
    return axis + ndim if -ndim <= axis < 0 else axis


def _by_leaf(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def mapped(tree: Any, *args: Any, **kwargs: Any) -> Any:
        return jax.tree.map(lambda leaf: function(leaf, *args, **kwargs), tree)

    return mapped


# The functions below fill JAX's gaps. Collectives without a CPU lowering or a public name get their
# definition. Negative axes, on which JAX fails while lowering, are counted from the front.


@_by_leaf
def _pbroadcast(x: Any, axis_name: Any, source: int) -> Any:
    x = jnp.asarray(x)
    sent = jnp.where(lax.axis_index(axis_name) == source, x, jnp.zeros_like(x))
    return lax.psum(sent, axis_name).astype(x.dtype)


def _parg(extreme: Callable[..., Any], x: Any, axis_name: Any) -> Any:
    if isinstance(axis_name, (tuple, list)):
        raise TypeError(f"a single axis is expected, got {axis_name}")
    held = x == extreme(x, axis_name)
    number = jnp.where(held, lax.axis_index(axis_name), np.iinfo(np.int32).max)
    return lax.pmin(number.astype(np.int32), axis_name)


def _pgather(src: Any, idx: Any, axes: Any) -> Any:
    return jnp.take(lax.all_gather(src, axes), idx, axis=0)


@_by_leaf
def _psum_scatter(x: Any, axis_name: Any, *, scatter_dimension: int = 0, **options: Any) -> Any:
    dimension = _front(scatter_dimension, jnp.ndim(x))
    return lax.psum_scatter(x, axis_name, scatter_dimension=dimension, **options)


@_by_leaf
def _all_to_all(x: Any, axis_name: Any, split_axis: int, concat_axis: int, **options: Any) -> Any:
    # Tiled or not, the result has as many axes as x.
    ndim = jnp.ndim(x)
    split_axis, concat_axis = _front(split_axis, ndim), _front(concat_axis, ndim)
    return lax.all_to_all(x, axis_name, split_axis, concat_axis, **options)


def _pswapaxes(x: Any, axis_name: Any, axis: int, **options: Any) -> Any:
    return _all_to_all(x, axis_name, axis, axis, **options)


def _ppermute(x: Any, axis_name: Any, perm: Any) -> Any:
    # JAX's lowering sorts the devices of a group, so it counts ("y", "x") as if it were
    # ("x", "y"); axis_index, all_gather and all others count in the tuple's own order, and so
    # does gpusim. The permutation is translated from the one numbering to the other.
    names = _named(axis_name)
    ordered = tuple(sorted(names))
    if ordered == names:
        return lax.ppermute(x, axis_name, perm)
    sizes = tuple(lax.axis_size(name) for name in names)
    size = math.prod(sizes)
    order = tuple(names.index(name) for name in ordered)
    numbers = np.arange(size).reshape(sizes).transpose(order)
    sorted_place = np.argsort(numbers.reshape(-1))
    pairs = [tuple(int(sorted_place[end]) for end in pair) for pair in perm]
    return lax.ppermute(x, axis_name, pairs)


def _pshuffle(x: Any, axis_name: Any, perm: Any) -> Any:
    if set(perm) != set(range(len(perm))):
        raise ValueError(f"`perm` does not represent a permutation: {perm}")
    return _ppermute(x, axis_name, list(zip(perm, range(len(perm)), strict=True)))


LAX = SimpleNamespace(
    psum=lax.psum,
    pmean=lax.pmean,
    pmax=lax.pmax,
    pmin=lax.pmin,
    pargmax=functools.partial(_parg, lax.pmax),
    pargmin=functools.partial(_parg, lax.pmin),
    pbroadcast=_pbroadcast,
    ppermute=_ppermute,
    pshuffle=_pshuffle,
    pswapaxes=_pswapaxes,
    all_gather=lax.all_gather,
    all_to_all=_all_to_all,
    psum_scatter=_psum_scatter,
    pgather=_pgather,
    axis_index=lax.axis_index,
    axis_size=lax.axis_size,
)
DIALECT = SimpleNamespace(lax=LAX, xp=jnp, tree_map=jax.tree.map)


def shard_map(body: Callable[[Any], Any], axes: Axes, mapped: Any, x: Any) -> Any:
    """``body`` on every replica; leaves of ``x`` for which ``mapped`` is true lead with the axes.

    The mapped axes lead every result.
    """
    names, sizes = zip(*axes, strict=True)
    mesh = Mesh(np.array(devices()[: math.prod(sizes)]).reshape(sizes), names)
    lead = tuple(range(len(axes)))

    def shard(tree: Any) -> Any:
        own = jax.tree.map(
            lambda leaf, is_mapped: leaf.reshape(leaf.shape[len(axes) :]) if is_mapped else leaf,
            tree,
            mapped,
        )
        return jax.tree.map(lambda leaf: jnp.expand_dims(leaf, lead), body(own))

    specs = jax.tree.map(lambda is_mapped: P(*names) if is_mapped else P(), mapped)
    run = jax.shard_map(shard, mesh=mesh, in_specs=(specs,), out_specs=P(*names), check_vma=False)
    return jax.tree.map(np.asarray, jax.jit(run)(x))


def pmap(body: Callable[[Any], Any], axes: Axes, mapped: Any, x: Any) -> Any:
    """As `shard_map`, through ``jax.pmap``, over one axis."""
    ((name, _),) = axes
    devices()
    in_axes = jax.tree.map(lambda is_mapped: 0 if is_mapped else None, mapped)
    return jax.tree.map(_collect, jax.pmap(body, axis_name=name, in_axes=(in_axes,))(x))


def _collect(result: Any) -> np.ndarray:
    # np.asarray of an empty array that pmap returned fails inside JAX.
    return np.asarray(result) if result.size else np.empty(result.shape, result.dtype)
