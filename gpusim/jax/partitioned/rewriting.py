"""The sums in a partitioned program, and their replacement by calls of gpusim's.

A program is a StableHLO module of one device's work, as XLA has it behind its partitioner.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from gpusim.jax import private
from gpusim.jax.lowering import TARGET, emit, text_of
from gpusim.jax.promotion import narrow, promoted, widen
from gpusim.jax.rendezvous import Kind, Terms
from gpusim.jax.sums import SUMS, Reductions, ReductionWarning, reduction_for
from gpusim.reduction import Reduction

from .meshes import Mesh, Numbering, named_meshes, stated_by, stated_groups
from .moves import moves_data


class NotRewritten(Exception):
    """Why a program keeps the sums of XLA."""


DTYPES = {
    "f64": "float64",
    "f32": "float32",
    "f16": "float16",
    "bf16": "bfloat16",
    "complex<f32>": "complex64",
    "complex<f64>": "complex128",
    "f8E4M3FN": "float8_e4m3fn",
    "f8E4M3FNUZ": "float8_e4m3fnuz",
    "f8E5M2": "float8_e5m2",
    "f8E5M2FNUZ": "float8_e5m2fnuz",
}
"""The element types that gpusim adds in an order, and their names in NumPy and ml_dtypes."""

SHOWN = 3
"""The number of a program's sums that a warning names."""

COLLECTIVES = {"stablehlo.add": "psum", "stablehlo.maximum": "pmax", "stablehlo.minimum": "pmin"}
"""By the operation of two elements, the collective."""

CALLING = "callee", "called_computations", "decomposition"
"""Attributes that name functions: those of calls, custom calls and composites."""

REDUCING = "stablehlo.all_reduce", "stablehlo.reduce_scatter"


class Sum(NamedTuple):
    """A reduction that the partitioner has inserted.

    **Attributes**: `axes` are the names of the mesh's axes that it goes over, or None if its groups
    are those of no mesh. `source` is the operation of the program that it comes from, `site` the
    line. `reduction` is the chosen one.
    """

    operation: Any
    collective: str
    groups: list[list[int]]
    axes: tuple[str, ...] | None
    source: str
    site: str
    reduction: Reduction

    @property
    def is_sum(self) -> bool:
        """Whether it adds; a maximum has its bits in any order."""
        return self.collective in SUMS

    @property
    def kind(self) -> str:
        """The operation's name as XLA writes it."""
        name: str = self.operation.name.removeprefix("stablehlo.").replace("_", "-")
        return name

    @property
    def text(self) -> str:
        """The call in words."""
        over = "" if self.axes is None else f" over {named(self.axes)!r}"
        source = f" for {self.source}" if self.source else ""
        return f"the {self.kind} of XLA's partitioner{source}{over} at {self.site}"


def named(axes: Sequence[str]) -> Any:
    """Axes as a program names them: one by its name, several by a tuple."""
    return axes[0] if len(axes) == 1 else tuple(axes)


def operations(module: Any) -> Iterator[Any]:
    """All operations that a module's main runs, in their order; a function's at its first call."""
    return run_by_main(functions_of(module))


def drop_uncalled(module: Any) -> None:
    """Erase functions that main does not call: XLA's loops are there once more as functions."""
    functions = functions_of(module)
    for _ in run_by_main(functions):
        pass
    for function in functions.values():
        function.erase()


def functions_of(module: Any) -> dict[str, Any]:
    """The functions of a module, by name."""
    return {
        private.ir.StringAttr(each.operation.attributes["sym_name"]).value: each.operation
        for each in module.body.operations
        if each.operation.name == "func.func"
    }


def run_by_main(functions: dict[str, Any]) -> Iterator[Any]:
    """The operations of main and of those that it calls, which are taken out of `functions`."""

    def below(parent: Any) -> Iterator[Any]:
        for region in parent.regions:
            for block in region.blocks:
                for each in block.operations:
                    operation = each.operation
                    yield operation
                    for name in references(operation):
                        if name in functions:
                            yield from below(functions.pop(name))
                    yield from below(operation)

    yield from below(functions.pop("main"))


def references(operation: Any) -> Iterator[str]:
    """The names of the functions that an operation calls."""
    for name in CALLING:
        if name in operation.attributes:
            given = operation.attributes[name]
            for each in given if isinstance(given, private.ir.ArrayAttr) else [given]:
                yield private.ir.FlatSymbolRefAttr(each).value


def list_groups(module: Any, program: str) -> None:
    """Write the groups of all collectives as lists of devices.

    Groups in terms of meshes would need the meshes, which are left behind with the module.

    **Arguments**: `program` is the module as text of XLA's.

    **Raises**: NotRewritten for groups that the text does not have.
    """
    known = stated_groups(program)
    meshes = named_meshes(module)
    for operation in operations(module):
        if "replica_groups" in operation.attributes:
            if isinstance(operation.attributes["replica_groups"], private.ir.DenseIntElementsAttr):
                continue
            groups = known.get(stated_by(operation, meshes))
            if groups is None:
                raise NotRewritten(f"the groups of a {operation.name} are not known")
            shape = f"{len(groups)}x{len(groups[0])}"
            operation.attributes["replica_groups"] = private.ir.Attribute.parse(
                f"dense<{groups}> : tensor<{shape}xi64>"
            )


def groups_of(operation: Any) -> list[list[int]]:
    """The groups of a collective, which are lists."""
    rows = np.array(private.ir.DenseIntElementsAttr(operation.attributes["replica_groups"]))
    return [[int(member) for member in row if member >= 0] for row in rows]


def chosen_sums(module: Any, meshes: Sequence[Mesh], reductions: Reductions) -> list[Sum]:
    """The reductions of a partitioned program that are not left to XLA, in its order.

    Those that move data alone are left: XLA adds zeros to the elements of one device.

    **Arguments**: `module`, whose groups are lists; `meshes` of the program before it was
    partitioned.

    **Raises**: NotRewritten where axes are chosen by name, and a sum has none; AxesDiffer where its
    axes have different Reductions.
    """
    numberings = [Numbering(mesh) for mesh in meshes]
    found = []
    for operation in operations(module):
        if operation.name not in REDUCING:
            continue
        types = {*map(element_type, operation.operands)}
        if any(type_.startswith(("i", "ui")) for type_ in types):  # exact in any order
            continue
        collective = collective_of(operation)
        source, site = origin(operation.location)
        if collective is None or (collective in SUMS and moves_data(operation, source)):
            continue
        groups = groups_of(operation)
        names = (numbering.axes_of(groups) for numbering in numberings)
        axes = next((each for each in names if each), None)
        reduction = chosen_for(reductions, axes)
        if reduction is None:
            continue
        made = Sum(operation, collective, groups, axes, source, site, reduction)
        if types <= {*DTYPES}:
            found.append(made)
        else:
            warn(f"gpusim does not reduce {', '.join(sorted(types))}", [made.text])
    return found


def element_type(value: Any) -> str:
    """The type of a value's elements, as StableHLO writes it."""
    return str(private.ir.RankedTensorType(value.type).element_type)


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


def collective_of(operation: Any) -> str | None:
    """The collective that a reduction is; None for others, such as that of argmax."""
    body = [
        each.operation
        for each in operation.regions[0].blocks[0].operations
        if each.operation.name != "mhlo.copy"  # XLA's, in a reducer to which JAX gives a sharding
    ]
    if len(body) != 2:
        return None
    if operation.name == "stablehlo.reduce_scatter":
        return "psum_scatter" if body[0].name == "stablehlo.add" else None
    return COLLECTIVES.get(body[0].name)


def origin(location: Any) -> tuple[str, str]:
    """The operation in the program, as jit(f)/reduce_sum, and file:line."""
    name = ""
    if isinstance(location, private.ir.NameLoc):
        given = private.ir.NameLoc(location)
        name, location = given.name_str, given.child_loc
    while True:
        if isinstance(location, private.ir.CallSiteLoc):
            location = private.ir.CallSiteLoc(location).callee
        elif isinstance(location, private.ir.NameLoc):
            location = private.ir.NameLoc(location).child_loc
        else:
            break
    if isinstance(location, private.ir.FileLineColLoc):
        line = private.ir.FileLineColLoc(location)
        return name, f"{line.filename}:{line.start_line}"
    return name, "unknown line"


def chosen_for(reductions: Reductions, axes: tuple[str, ...] | None) -> Reduction | None:
    """The Reduction for a sum over these axes, in any order; None leaves it to XLA."""
    if reductions is None or isinstance(reductions, Reduction):
        return reductions
    if axes is None:
        raise NotRewritten("reductions are given by axis, and a sum goes over no axes of a mesh")
    for key, reduction in reductions.items():
        if isinstance(key, tuple) and {*key} == {*axes}:
            return reduction
    return reduction_for(reductions, axes)


def replace_sums(module: Any, sums: Sequence[Sum]) -> None:
    """Put gpusim's calls in place of sums."""
    place, number = first_numbers(module)
    for each in sums:
        old = each.operation
        with private.ir.InsertionPoint(old), old.location:
            # XLA may reduce several arrays in one operation; each is a call of its own.
            for operand, result in zip([*old.operands], [*old.results], strict=True):
                result.replace_all_uses_with(call(each, operand, result, place, number))
                place, number = place + 1, number + each.is_sum
        old.erase()


def call(reduction: Sum, operand: Any, result: Any, place: int, number: int) -> Any:
    """Emit the call that takes the place of a reduction of one array, and return its result."""
    given, wanted = kind_of(operand), kind_of(result)
    wider = promoted(reduction.reduction, given.dtype)
    value = operand if wider is None else widen(operand, wider)
    kind = private.ir.RankedTensorType.get(
        wanted.shape, private.ir.RankedTensorType(value.type).element_type
    )
    parameters = {}
    if reduction.collective == "psum_scatter":
        dimension = private.ir.IntegerAttr(reduction.operation.attributes["scatter_dimension"])
        parameters = {"scatter_dimension": int(dimension.value), "tiled": True}
    terms = Terms(
        reduction.collective,
        reduction.groups,
        parameters,
        text_of(reduction.reduction) if reduction.is_sum else None,
        number if reduction.is_sum else 0,
        [given._replace(dtype=wider or given.dtype)],
        [wanted._replace(dtype=wider or wanted.dtype)],
        reduction.text,
        reduction.site,
        place,
    )
    [found] = emit(terms, [value], [kind])
    return found if wider is None else narrow(found, result.type)


def first_numbers(module: Any) -> tuple[int, int]:
    """The place and the call number behind those of all calls that a module has already."""
    place = number = 0
    for operation in operations(module):
        terms = call_in(operation)
        if terms is not None:
            place = max(place, terms["place"] + 1)
            if terms["reduction"] is not None:
                number = max(number, terms["number"] + 1)
    return place, number


def call_in(operation: Any) -> dict[str, Any] | None:
    """The terms of a call of gpusim's, or None for other operations."""
    if operation.name != "stablehlo.custom_call":
        return None
    for name in ("backend_config", "mhlo.backend_config"):
        if name in operation.attributes and isinstance(
            operation.attributes[name], private.ir.DictAttr
        ):
            config = private.ir.DictAttr(operation.attributes[name])
            target = private.ir.StringAttr(operation.attributes["call_target_name"]).value
            if target == TARGET:
                found: dict[str, Any] = json.loads(private.ir.StringAttr(config["call"]).value)
                return found
    return None


def kind_of(value: Any) -> Kind:
    """The dtype and shape of a value of a module."""
    given = private.ir.RankedTensorType(value.type)
    return Kind(DTYPES[element_type(value)], tuple(given.shape))
