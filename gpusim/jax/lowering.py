"""How collectives of JAX's become calls of gpusim's handler in programs for XLA:CPU."""

from __future__ import annotations

import atexit
import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np

from gpusim.maps.records import settling
from gpusim.reduction import Reduction

from . import private
from .ffi import Handler
from .processes import refuse_processes
from .rendezvous import REDUCTIONS, Board, Kind, Site, Terms

TARGET = "gpusim_collective"


@cache
def board() -> Board:
    """The board of this process; the first call registers the handler with XLA."""
    made = Board()
    Handler(TARGET, Site, made.arrive)
    settling.append(made.settle)  # the end of a record waits for programs in flight
    atexit.register(made.settle)  # after JAX's own, and so called before it
    return made


class CallNumbers:
    """Counts the calls of a module that is being lowered, and the sums; the module keeps it."""

    calls = sums = 0

    @classmethod
    def next(cls, keepalives: list[Any], *, is_sum: bool) -> tuple[int, int]:
        """The number of the next call, and how many sums come before it."""
        counters = [found for found in keepalives if type(found) is cls]
        if not counters:
            counters.append(cls())
            keepalives.append(counters[0])
        found = counters[0].calls, counters[0].sums
        counters[0].calls += 1
        counters[0].sums += is_sum
        return found


def is_partly_manual(ctx: Any) -> bool:
    """Whether some axes of the mesh are the partitioner's."""
    context = ctx.module_context.axis_context
    manual: frozenset[Any] = getattr(context, "manual_axes", frozenset())
    return (
        isinstance(context, private.SPMDAxisContext)
        and bool(manual)
        and manual != frozenset(context.mesh.axis_names)
    )


def lower_fully_manual(ctx: Any, primitive: Any, operands: Sequence[Any], params: Any) -> Any:
    """Lower a call inside another shard_map, over the axes that are the partitioner's.

    Operands are whole along them, and where the axes are explicit, as their types say.
    """
    results = tuple(jax.P(*aval.sharding.spec) for aval in ctx.avals_out)
    whole = results if primitive.multiple_results else results[0]

    def call(*arrays: Any) -> Any:
        return primitive.bind(*arrays, **params)

    def inner(*arrays: Any) -> Any:
        # Types say along which axes of an explicit mesh an array is split.
        specs = tuple(jax.P(*jax.typeof(array).sharding.spec) for array in arrays)
        return jax.shard_map(call, in_specs=specs, out_specs=whole, check_vma=False)(*arrays)

    multiple = primitive.multiple_results
    return private.lower_function(inner, multiple_results=multiple)(ctx, *operands)


def lower_call(
    ctx: Any,
    operands: Sequence[Any],
    collective: str,
    axes: Sequence[Any],
    groups: Sequence[Sequence[int]],
    *,
    parameters: Mapping[str, Any] | None = None,
    reduction: Reduction | None = None,
    absent: Mapping[int, Kind] | None = None,
) -> Any:
    """Emit the call of a collective.

    **Arguments**: `groups` are the devices' numbers in the program, as JAX's `_replica_groups`
    gives them. `absent` are operands without a buffer, by their position.

    **Raises**: NotImplementedError for programs that run elsewhere than on CPUs.
    """
    platforms = ctx.platforms or ctx.module_context.platforms
    if tuple(platforms) != ("cpu",):
        raise NotImplementedError(
            f"gpusim.jax: lax.{collective} has a Reduction, and this program is for "
            f"{' and '.join(platforms)}: gpusim's collectives run in XLA:CPU alone. Set "
            "JAX_PLATFORMS=cpu before JAX is imported, or call gpusim.jax.uninstall()"
        )
    refuse_processes(ctx.module_context.axis_context, groups, f"lax.{collective}")
    kinds = [kind_of(aval) for aval in ctx.avals_in]
    for position, kind in (absent or {}).items():
        kinds.insert(position, kind)
    site = private.site_of(ctx.traceback)
    names = axes[0] if len(axes) == 1 else tuple(axes)
    place, sums = CallNumbers.next(ctx.module_context.keepalives, is_sum=reduction is not None)
    terms = Terms(
        collective,
        [[int(member) for member in group] for group in groups],
        parameters or {},
        None if reduction is None else text_of(reduction),
        sums if reduction is not None else 0,
        kinds,
        [kind_of(aval) for aval in ctx.avals_out],
        f"lax.{collective} over {names!r} at {site}",
        site,
        place,
    )
    types = [private.type_of_aval(ctx.module_context, aval) for aval in ctx.avals_out]
    return emit(terms, operands, types)


def text_of(reduction: Reduction) -> str:
    """The text by which a program carries a Reduction, and by which this process finds it."""
    text = repr(reduction)
    if REDUCTIONS.setdefault(text, reduction) != reduction:
        raise ValueError(f"gpusim.jax: two reductions have one text, {reduction!r}")
    return text


def emit(terms: Terms, operands: Sequence[Any], types: Sequence[Any]) -> Any:
    """Emit the custom call of a collective, and return its results.

    **Arguments**: `operands` are those that have a buffer; `types` are the results'.
    """
    board()
    given = [Kind("uint32", ()), *(kind for kind in terms.operands if not kind.absent)]
    call = private.custom_call(
        TARGET,
        result_types=types,
        operands=[private.partition_id(), *operands],
        backend_config={"call": private.ir.StringAttr.get(json.dumps(terms._asdict()))},
        api_version=4,
        # A random sum stays in its loop, where each round has its own numbers.
        has_side_effect=terms.reduction is not None and REDUCTIONS[terms.reduction].draws,
        operand_layouts=[row_major(kind) for kind in given],
        result_layouts=[row_major(kind) for kind in terms.results],
    )
    return call.results


def kind_of(aval: Any) -> Kind:
    """The dtype and shape of a value in a program.

    **Raises**: TypeError for dtypes that NumPy cannot view, such as keys and types below a byte.
    """
    dtype = aval.dtype
    if not isinstance(dtype, np.dtype) or "int4" in dtype.name or "int2" in dtype.name:
        raise TypeError(f"gpusim.jax: collectives take no arrays of {dtype}")
    return Kind(dtype.name, tuple(int(length) for length in aval.shape))


def row_major(kind: Kind) -> list[int]:
    """The layout as XLA writes it, the fastest axis first."""
    return [*reversed(range(len(kind.shape)))]
