"""A partitioned program as a whole again: one `sdy.manual_computation` over all axes of a mesh.

The new module has the signature of the original, with its attributes (donation, aliasing, layouts),
and the shardings that XLA has found for arguments and results.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from gpusim.jax import private

from .meshes import Mesh, Numbering, Placement, SubAxis
from .rewriting import NotRewritten

BODY = "gpusim_partitioned"
"""The name of the function that is one device's work."""

SHARDINGS = {
    "jax.unused", "mhlo.parameter_replication", "mhlo.sharding", "sdy.sharding"
}  # fmt: skip
"""Attributes of arguments and results that the new module has anew, or not at all."""


class Value(NamedTuple):
    """An argument or result: its types, whole and on one device, its attributes and sharding."""

    whole: Any
    local: Any
    attributes: list[str]
    sharding: str
    has_addends: bool

    @property
    def declared(self) -> str:
        """Its type and attributes in the signature of main."""
        kept = [*self.attributes, f"sdy.sharding = #sdy.sharding{self.sharding}"]
        return f"{self.whole} {{{', '.join(kept)}}}"


def wrap(
    original: Any, partitioned: Any, shardings: Sequence[Sequence[Any]], meshes: Sequence[Mesh]
) -> Any:
    """A module like `original` whose main calls the main of `partitioned` on each device.

    **Arguments**: the two modules, of which `partitioned` is used up; `shardings` of arguments and
    of results, as XLA has found them; `meshes` are tried in turn.

    **Raises**: NotRewritten if the shardings of arguments and results are not those of one mesh.
    """
    ir = private.ir
    body = ir.SymbolTable(partitioned.operation)["main"]
    main = ir.SymbolTable(original.operation)["main"]
    local, whole = function_type(body), function_type(main)
    if (len(local.inputs), len(local.results)) != (len(whole.inputs), len(whole.results)):
        raise NotRewritten("XLA has changed the number of arguments or results")
    mesh, placements = place(shardings, (whole.inputs, whole.results), meshes)
    ins, outs = (
        [
            Value(each, part, kept(attributes), written(placement, mesh), bool(placement.unreduced))
            for each, part, attributes, placement in zip(
                types, parts, attributes_of(main, name, len(types)), places, strict=True
            )
        ]
        for types, parts, name, places in (
            (whole.inputs, local.inputs, "arg_attrs", placements[0]),
            (whole.results, local.results, "res_attrs", placements[1]),
        )
    )
    made = ir.Module.parse(skeleton(ins, outs, mesh), original.context)
    declaration = ir.SymbolTable(made.operation)[BODY]
    declaration.operation.erase()
    body.attributes["sym_name"] = ir.StringAttr.get(BODY)
    body.attributes["sym_visibility"] = ir.StringAttr.get("private")
    for name in ("arg_attrs", "res_attrs"):
        if name in body.attributes:
            del body.attributes[name]
    for operation in list(partitioned.body.operations):
        if operation.operation.name != "sdy.mesh":
            made.body.append(operation)
    for name in original.operation.attributes:
        key = name if isinstance(name, str) else name.name
        made.operation.attributes[key] = original.operation.attributes[key]
    made.operation.verify()
    return made


def function_type(function: Any) -> Any:
    """The types of a function's arguments and results."""
    return private.ir.FunctionType(private.ir.TypeAttr(function.attributes["function_type"]).value)


def place(
    shardings: Sequence[Sequence[Any]], types: Sequence[Sequence[Any]], meshes: Sequence[Mesh]
) -> tuple[Mesh, list[list[Placement]]]:
    """The first mesh in which all shardings can be said, and where it has the arrays.

    **Raises**: NotRewritten if none of them can.
    """
    if any(len(some) != len(all_) for some, all_ in zip(shardings, types, strict=True)):
        raise NotRewritten("XLA does not tell the shardings of all arguments and results")
    for mesh in meshes:
        numbering = Numbering(mesh)
        found = [
            [
                numbering.place(sharding, rank(each))
                for sharding, each in zip(side, kinds, strict=True)
            ]
            for side, kinds in zip(shardings, types, strict=True)
        ]
        placements = [[each for each in side if each is not None] for side in found]
        if all(len(some) == len(all_) for some, all_ in zip(placements, found, strict=True)):
            return mesh, placements
    raise NotRewritten("its arguments and results are sharded over more than one mesh")


def rank(kind: Any) -> int:
    """The number of a type's dimensions; 0 for a token, which orders effects."""
    if isinstance(kind, private.ir.RankedTensorType):
        return len(private.ir.RankedTensorType(kind).shape)
    return 0


def attributes_of(function: Any, name: str, count: int) -> list[Any]:
    """The attributes of a function's arguments, or results."""
    if name in function.attributes:
        return [private.ir.DictAttr(each) for each in function.attributes[name]]
    return [private.ir.DictAttr.get({})] * count


def kept(attributes: Any) -> list[str]:
    """Attributes as text, apart from those that say the sharding."""
    found = []
    for each in attributes:
        if each.name not in SHARDINGS:
            name = each.name if re.fullmatch(r"[\w.$]+", each.name) else json.dumps(each.name)
            found.append(f"{name} = {each.attr}")
    return found


def written(placement: Placement, mesh: Mesh) -> str:
    """A sharding in the syntax of Shardy's dialect."""

    def axes(parts: Sequence[SubAxis]) -> str:
        return f"{{{', '.join(map(axis, parts))}}}"

    def axis(part: SubAxis) -> str:
        name = json.dumps(part.axis)
        return name if mesh.whole(part) else f"{name}:({part.before}){part.size}"

    dimensions = ", ".join(map(axes, placement.dimensions))
    unreduced = f", unreduced={axes(placement.unreduced)}" if placement.unreduced else ""
    return f"<@mesh, [{dimensions}]{unreduced}>"


def skeleton(ins: Sequence[Value], outs: Sequence[Value], mesh: Mesh) -> str:
    """The text of the new module, without the function that main calls."""
    sizes = ", ".join(f'"{name}"={size}' for name, size in zip(mesh.axes, mesh.shape, strict=True))
    ids = "" if mesh.is_in_order else f", device_ids={mesh.devices.reshape(-1).tolist()}"
    names = ", ".join(map(json.dumps, mesh.axes))
    arguments = ", ".join(f"%arg{k}: {value.declared}" for k, value in enumerate(ins))
    results = ", ".join(value.declared for value in outs)
    whole = [", ".join(str(value.whole) for value in side) for side in (ins, outs)]
    local = [", ".join(str(value.local) for value in side) for side in (ins, outs)]
    shardings = [", ".join(value.sharding for value in side) for side in (ins, outs)]
    carried = ", ".join(f"%local{k}" for k in range(len(ins)))
    blocks = ", ".join(f"%local{k}: {value.local}" for k, value in enumerate(ins))
    # Shardy lets the addends of an array go into a computation only where they are said again.
    stated = "\n  ".join(
        f"%in{k} = sdy.sharding_constraint %arg{k} {value.sharding} : {value.whole}"
        for k, value in enumerate(ins)
        if value.has_addends
    )
    passed = ", ".join(
        f"%in{k}" if value.has_addends else f"%arg{k}" for k, value in enumerate(ins)
    )

    def all_of(word: str) -> str:
        count = len(outs)
        names = ", ".join(f"%{word}#{k}" for k in range(count)) if count > 1 else f"%{word}"
        return f"{names} : " if count else ""

    given = {word: f"%{word}:{len(outs)} = " if outs else "" for word in ("whole", "part")}
    return f"""
sdy.mesh @mesh = <[{sizes}]{ids}>
func.func public @main({arguments}) -> ({results}) {{
  {stated}
  {given["whole"]}sdy.manual_computation({passed})
      in_shardings=[{shardings[0]}] out_shardings=[{shardings[1]}] manual_axes={{{names}}}
      ({blocks}) {{
    {given["part"]}func.call @{BODY}({carried}) : ({local[0]}) -> ({local[1]})
    sdy.return {all_of("part")}{local[1]}
  }} : ({whole[0]}) -> ({whole[1]})
  return {all_of("whole")}{whole[1]}
}}
func.func private @{BODY}({local[0]}) -> ({local[1]})
"""
