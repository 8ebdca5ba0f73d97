"""The two compilations of a program with sums that XLA's partitioner inserts.

The first is XLA's own; it writes down the program behind the partitioner. The second compiles that
program with gpusim's calls in it.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from gpusim.jax import private
from gpusim.jax.sums import Reductions, ReductionWarning

from .meshes import meshes_of
from .rewriting import NotRewritten, chosen_sums, drop_uncalled, list_groups, replace_sums
from .wrapping import wrap

PASS = "spmd-partitioning"
"""XLA's name of the pass that makes one device's program of the whole."""

REDUCING = b"all-reduce", b"reduce-scatter"

SHOWN = 3
"""Of the sums of a program, so many are named in a warning."""

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
    """

    def compiled(chosen: Any, how: Any) -> Any:
        return jax_compile(
            backend, chosen, devices, how, callbacks, executable_devices, *rest, **named
        )

    kept = private.ProgramCache(backend, module, devices, options)
    with tempfile.TemporaryDirectory(prefix="gpusim-jax-") as folder:
        dumping = copy.deepcopy(options)
        dumping.env_option_overrides = [
            *options.env_option_overrides,
            ("xla_dump_to", folder),
            ("xla_dump_hlo_pass_re", PASS),
            ("xla_dump_hlo_as_proto", True),
        ]
        executable = compiled(module, dumping)
        partitioned = dumped(Path(folder))
        if partitioned is None and may_reduce(executable):  # it comes from JAX's cache
            partitioned = kept.get()
            if partitioned is None:
                private.compiler.backend_compile_and_load(
                    backend, module, executable_devices, dumping, callbacks
                )
                partitioned = dumped(Path(folder))
    if partitioned is None or not any(word in partitioned for word in REDUCING):
        return executable
    kept.put(partitioned)
    texts: list[str] = []
    try:
        with module.context, private.ir.Location.unknown(module.context):
            program = private.ir.Module.parse(private.stablehlo_of(partitioned), module.context)
            drop_uncalled(program)
            list_groups(program, private.text_of(partitioned))
            meshes = meshes_of(module, devices.size)
            sums = chosen_sums(program, meshes, reductions)
            if not sums:
                return executable
            texts = [each.text for each in sums]
            replace_sums(program, sums)
            rewritten = wrap(module, program, executable, meshes)
        return compiled(rewritten, options)
    # The program runs in any case: XLA has compiled it.
    except (NotRewritten, private.ir.MLIRError, jax.errors.JaxRuntimeError) as reason:
        warn(str(reason), texts)
        return executable


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


def may_reduce(executable: Any) -> bool:
    """Whether an executable has reductions of XLA's between devices."""
    return any(
        word.decode() in module.to_string()
        for module in executable.hlo_modules()
        for word in REDUCING
    )


def warn(reason: str, sums: Sequence[str]) -> None:
    """Warn of sums that keep XLA's order."""
    more = f", and {len(sums) - SHOWN} more" if len(sums) > SHOWN else ""
    listed = f" ({'; '.join(sums[:SHOWN])}{more})" if sums else ""
    warnings.warn(
        f"gpusim.jax: sums that XLA's partitioner inserts keep XLA's order{listed}: "
        f"{reason.splitlines()[0]}",
        ReductionWarning,
        stacklevel=2,
    )
