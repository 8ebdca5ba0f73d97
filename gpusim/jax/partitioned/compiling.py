"""The two compilations of a program with sums that XLA's partitioner inserts.

In the first XLA writes down the program behind its partitioner. The second compiles that program
with gpusim's calls in it.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax

from gpusim.jax import private
from gpusim.jax.processes import refuse_devices
from gpusim.jax.sums import AxesDiffer, Reductions, ReductionWarning

from .meshes import meshes_of
from .rewriting import chosen_sums, drop_uncalled, list_groups, replace_sums, warn
from .wrapping import wrap

PASS = "spmd-partitioning"
"""XLA's name of the pass that makes one device's program of the whole."""

REDUCING = b"all-reduce", b"reduce-scatter"

SUMMING = {
    "all_reduce", "batch_norm_grad", "batch_norm_training", "composite", "convolution",
    "custom_call", "dot", "dot_general", "dynamic_conv", "einsum", "manual_computation",
    "ragged_dot", "reduce", "reduce_scatter", "reduce_window", "scatter", "select_and_scatter",
}  # fmt: skip
"""Operations of any dialect that may become sums between devices."""

UNOPTIMIZED = ("xla_backend_optimization_level", 0)

SHORTCUTS = [UNOPTIMIZED, ("xla_cpu_use_fusion_emitters", False)], [UNOPTIMIZED]
"""Options of the first compilation, to be tried in turn: jaxlib 0.12 lacks the other emitters.

All of them are for behind the partitioner.
"""

STATING = "arg_attrs", "res_attrs", "sharding"
"""Attributes that state the shardings of arrays."""

Compile = Callable[..., Any]
"""JAX's compile_or_get_cached: (backend, module, devices, options, host callbacks, ...)."""


def compile_partitioned(
    jax_compile: Compile,
    reductions: Reductions,
    backend: Any,
    module: Any,
    devices: Any,
    options: Any,
    callbacks: Any,
    executable_devices: Any,
    *rest: Any,
    **named: Any,
) -> Any:
    """Compile a program for several devices, with the chosen bits in the sums of its partitioner.

    **Returns**: the executable. Where sums cannot be reached it is XLA's own, after a
    ReductionWarning with the reason.

    **Raises**: NotImplementedError for sums between devices of several processes.
    """

    def compiled(chosen: Any, how: Any = options) -> Any:
        return jax_compile(
            backend, chosen, devices, how, callbacks, executable_devices, *rest, **named
        )

    if not may_sum(module):
        return compiled(module)
    kept = private.ProgramCache(backend, module, devices, options)
    partitioned = kept.get()
    if partitioned is None:
        partitioned = partition(backend, module, executable_devices, options, callbacks)
        if partitioned is None:
            return compiled(module)
        kept.put(partitioned)
    if not any(word in partitioned for word in REDUCING):
        return compiled(module)
    texts: list[str] = []
    try:
        rewritten = rewrite(module, partitioned, devices, reductions, texts)
        return compiled(module) if rewritten is None else compiled(rewritten, with_shardy(options))
    except (NotImplementedError, AxesDiffer, ReductionWarning):
        raise
    # Of any kind: XLA's programs are of more kinds than are known here, and this one runs in any
    # case, as XLA compiles it. If it does not, XLA says why.
    except Exception as reason:
        executable = compiled(module)
        warn(str(reason), texts)
        return executable


def rewrite(
    module: Any, partitioned: bytes, devices: Any, reductions: Reductions, texts: list[str]
) -> Any:
    """The module to compile in place of one; None if it has no sums that are not left to XLA.

    **Arguments**: `partitioned` is the HloModuleProto behind the partitioner; `texts` takes the
    sums that are found, in words.
    """
    with module.context, private.ir.Location.unknown(module.context):
        program = private.ir.Module.parse(private.stablehlo_of(partitioned), module.context)
        drop_uncalled(program)
        found = private.program_of(partitioned)
        list_groups(program, found.to_string())
        meshes = meshes_of(module, devices.size)
        sums = chosen_sums(program, meshes, reductions)
        if not sums:
            return None
        texts += [each.text for each in sums]
        for each in sums:
            refuse_devices(devices.flat, each.text, each.groups)
        replace_sums(program, sums)
        return wrap(module, program, private.shardings_of(found), meshes)


def with_shardy(options: Any) -> Any:
    """Options by which XLA reads the shardings of `wrap`, also where JAX has chosen GSPMD."""
    if options.executable_build_options.use_shardy_partitioner:
        return options
    chosen = copy.deepcopy(options)
    chosen.executable_build_options.use_shardy_partitioner = True
    return chosen


def may_sum(module: Any) -> bool:
    """Whether a partitioner may insert sums into a program. It may not where data is only moved."""

    def may(operation: Any) -> bool:
        dialect, _, name = operation.name.rpartition(".")
        if name in SUMMING:
            return True
        if dialect == "sdy" or name == "func":
            stated = (operation.attributes[key] for key in STATING if key in operation.attributes)
            if any("unreduced" in str(each) for each in stated):
                return True
        return any(
            may(each.operation)
            for region in operation.regions
            for block in region.blocks
            for each in block.operations
        )

    return may(module.operation)


def partition(
    backend: Any, module: Any, executable_devices: Any, options: Any, callbacks: Any
) -> bytes | None:
    """The program behind the partitioner, an HloModuleProto; None if XLA does not write it.

    XLA compiles the program for it, by code that is thrown away: so it takes the shortest ways.
    """
    for shortcuts in SHORTCUTS:
        with tempfile.TemporaryDirectory(prefix="gpusim-jax-") as folder:
            dumping = copy.deepcopy(options)
            dumping.env_option_overrides = [
                *options.env_option_overrides,
                *shortcuts,
                ("xla_dump_to", folder),
                ("xla_dump_hlo_pass_re", PASS),
                ("xla_dump_hlo_as_proto", True),
            ]
            # An error of the program's own is raised when it is compiled to run.
            with suppress(jax.errors.JaxRuntimeError):
                private.compile_alone(backend, module, executable_devices, dumping, callbacks)
            found = dumped(Path(folder))
            if found is not None:
                return found
    return None


def dumped(folder: Path) -> bytes | None:
    """The program behind the partitioner, an HloModuleProto, that XLA has written to a folder."""
    found = sorted(folder.glob(f"*after_{PASS}*.hlo.pb"))
    return module_proto(found[-1].read_bytes()) if found else None


def module_proto(message: bytes) -> bytes:
    """The HloModuleProto in an HloProto, whose first field it is.

    >>> module_proto(b"\\n\\x02ab")
    b'ab'
    """
    length = shift = 0
    position = 1  # behind the field's number and kind
    while True:
        byte = message[position]
        length |= (byte & 0x7F) << shift
        shift, position = shift + 7, position + 1
        if byte < 0x80:
            return message[position : position + length]
