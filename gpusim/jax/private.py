"""The part of JAX's private interface that gpusim uses: no other file imports from `jax._src`.

Made for jax 0.10.2 and 0.12: `tests/jax/test_private.py` says what each name is taken to do, and
`make test-newest` runs it with the newest JAX. A name that is gone is an error as this module is
imported, and `gpusim.jax` then names JAX's version.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax._src import compilation_cache, compiler, config, core, dispatch, source_info_util
from jax._src.interpreters import ad, batching, mlir
from jax._src.lax import lax as _lax
from jax._src.lax import parallel
from jax._src.lib import hlo as _hlo
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import hlo, sdy
from jax._src.sharding_impls import SPMDAxisContext

__all__ = ["HloSharding", "SPMDAxisContext", "compiler", "hlo", "ir", "sdy"]

# Tables that `install` changes, and `uninstall` restores.

#: By platform and primitive, what takes the place of `lowerings`.
platform_lowerings: dict[str, dict[Any, Any]] = mlir._platform_specific_lowerings
lowerings: dict[Any, Any] = mlir._lowerings
#: Primitives that are lowered anew for each call in a program.
uncacheable: set[Any] = mlir._uncacheable_primitives
transposes: dict[Any, Any] = ad.primitive_transposes
jvps: dict[Any, Any] = ad.primitive_jvps
batchers: dict[Any, Any] = batching.fancy_primitive_batchers

register_lowering = mlir.register_lowering
lower_function = mlir.lower_fun
custom_call = mlir.custom_call
type_of_aval = mlir.aval_to_ir_type
partition_id = hlo.partition_id
set_linear = ad.deflinear2

# Primitives

Primitive, Tracer, NamedAxisEffect = core.Primitive, core.Tracer, core.NamedAxisEffect
psum_p, psum_invariant_p = parallel.psum_p, parallel.psum_invariant_p
unreduced_psum_p = parallel.unreduced_psum_p
pmax_p, pmin_p = parallel.pmax_p, parallel.pmin_p
reduce_scatter_p = parallel.reduce_scatter_p
unreduced_reduce_scatter_p = parallel.unreduced_reduce_scatter_p
ragged_p = parallel.ragged_all_to_all_p
reduce_sum, reduce_max, reduce_min = _lax.reduce_sum, _lax.reduce_max, _lax.reduce_min
apply_primitive = dispatch.apply_primitive

# Derivatives and batches

Zero, UndefinedPrimal = ad.Zero, ad.UndefinedPrimal
is_undefined_primal, instantiate_zeros, p2tz = ad.is_undefined_primal, ad.instantiate_zeros, ad.p2tz
bdim_at_front = batching.bdim_at_front

# Axes and types

replica_groups = parallel._replica_groups
canonical_groups = parallel._canonicalize_axis_index_groups
check_axis_names = parallel._check_axis_names
skip_one_sized_axes = parallel._maybe_skip_one_sized_axes
axis_size = parallel._axis_size
state_over = parallel._get_from
collective_pvary = parallel.insert_collective_pvary
reduction_type = parallel._allreduce_effectful_abstract_eval
invariant_reduction_type = parallel._psum_invariant_abstract_eval
pvary = core.pvary


def checks_types() -> bool:
    """Whether the shard_map that is being traced checks which values vary over its axes."""
    return bool(config._check_vma.value)


def casts_types() -> bool:
    """Whether values are cast by themselves to vary over an axis."""
    return bool(config.auto_pcast.value)


# Lines of the program

exclude_file = source_info_util.register_exclusion


def site_of(traceback: Any) -> str:
    """file:line of the program's frame in one of JAX's tracebacks."""
    frame = source_info_util.user_frame(traceback)
    return "unknown line" if frame is None else f"{frame.file_name}:{frame.start_line}"


# Compilation

HloSharding = xla_client.HloSharding


def stablehlo_of(program: bytes) -> bytes:
    """An HloModuleProto as a StableHLO module in bytecode."""
    found: bytes = xla_client._xla.mlir.hlo_to_stablehlo(program)
    return found


def program_of(program: bytes) -> Any:
    """An HloModuleProto as XLA's HloModule, whose text lacks the elements of large constants."""
    return _hlo.HloModule.from_serialized_hlo_module_proto(program)


def shardings_of(program: Any) -> tuple[list[Any], list[Any]]:
    """The HloShardings of a partitioned HloModule's arguments and results."""

    # One that names a mesh ends the process when it is asked for its tiles.
    def tiled(sharding: Any) -> Any:
        return sharding.v3_to_v2_sharding()

    ins = [HloSharding.from_proto(each) for each in program.spmd_parameters_shardings or ()]
    whole = HloSharding.from_proto(program.spmd_output_sharding)
    outs = whole.tuple_elements() or [whole]
    return [tiled(each) for each in ins], [tiled(each) for each in outs]


def compile_alone(
    backend: Any, module: Any, devices: Any, options: Any, callbacks: Sequence[Any]
) -> Any:
    """Compile a module past JAX's caches."""
    return compiler.backend_compile_and_load(backend, module, devices, options, callbacks)


class ProgramCache:
    """JAX's persistent cache of compiled programs, for what belongs to one of them.

    Without a cache directory it keeps nothing.
    """

    def __init__(self, backend: Any, module: Any, devices: Any, options: Any) -> None:
        key = compiler._get_cache_key(options, backend, module, devices)
        self._key = f"{key}-gpusim"
        self._cache = None if key is None else compilation_cache._get_cache(backend)

    def get(self) -> bytes | None:
        """The program's entry, or None."""
        return None if self._cache is None else self._cache.get(self._key)

    def put(self, entry: bytes) -> None:
        """Keep the program's entry."""
        if self._cache is not None:
            self._cache.put(self._key, entry)
