"""XLA's text of a program, as far as the tests need it: instructions, types, groups of devices.

`section` cuts a part out of a computation, as a module of its own for one device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

DTYPES = {
    "pred": np.dtype(bool),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "c64": np.dtype(np.complex64),
    "c128": np.dtype(np.complex128),
    **{f"f{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    **{f"s{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"u{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
}
#: Instructions between devices.
COLLECTIVES = {
    "all-reduce",
    "reduce-scatter",
    "all-gather",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
}
#: Attributes that belong to the whole program, or mean nothing to one device.
DROPPED = {"metadata", "sharding", "frontend_attributes", "channel_id", "backend_config"}
CALLED = ("to_apply", "condition", "body", "true_computation", "false_computation", "calls")


@dataclass(frozen=True)
class Instruction:
    """One line of a computation. `operands` are names, or the text between the parentheses."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    literal: str
    attributes: dict[str, str]

    def called(self) -> list[str]:
        """The computations that it names."""
        found = [self.attributes[key] for key in CALLED if key in self.attributes]
        found += self.attributes.get("branch_computations", "").strip("{}").split(",")
        return [name.strip().lstrip("%") for name in found if name.strip()]

    @property
    def op_name(self) -> str:
        """The name that JAX gave it: jit(f)/reduce_sum."""
        found = re.search(r'op_name="([^"]*)"', self.attributes.get("metadata", ""))
        return found[1] if found else ""

    def line(self) -> str:
        kept = [f"{k}={v}" for k, v in self.attributes.items() if k not in DROPPED]
        return f"%{self.name} = {self.type} " + ", ".join([f"{self.opcode}({self.literal})", *kept])


@dataclass
class Computation:
    name: str
    header: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""

    @property
    def parameters(self) -> list[Instruction]:
        found = [i for i in self.instructions.values() if i.opcode == "parameter"]
        return sorted(found, key=lambda i: int(i.literal))

    def text(self) -> str:
        lines = [
            f"  {'ROOT ' if name == self.root else ''}{each.line()}"
            for name, each in self.instructions.items()
        ]
        return "\n".join([self.header, *lines, "}"])


@dataclass
class Module:
    computations: dict[str, Computation]
    entry: str

    def reached(self, name: str) -> Iterator[str]:
        """The computations below this one, callees first."""
        seen: dict[str, None] = {}

        def visit(name: str) -> None:
            for each in self.computations[name].instructions.values():
                for called in each.called():
                    if called not in seen:
                        visit(called)
                        seen.setdefault(called)

        visit(name)
        return iter(seen)

    def is_local(self, each: Instruction) -> bool:
        """Whether a device needs no other one for an instruction."""
        if each.opcode in COLLECTIVES:
            return False
        return all(
            self.is_local(inner)
            for name in each.called()
            for inner in self.computations[name].instructions.values()
        )


def pieces(text: str) -> list[str]:
    """Split at commas that stand in no brackets and no quotes."""
    found, depth, quoted, start = [], 0, False, 0
    for k, letter in enumerate(text):
        if letter == '"' and text[k - 1] != "\\":
            quoted = not quoted
        elif not quoted and letter in "([{":
            depth += 1
        elif not quoted and letter in ")]}":
            depth -= 1
        elif letter == "," and not (quoted or depth):
            found.append(text[start:k].strip())
            start = k + 1
    found.append(text[start:].strip())
    return [piece for piece in found if piece]


def matching(text: str, start: int) -> int:
    """The place of the bracket that closes the one at `start`."""
    depth, quoted = 0, False
    for k in range(start, len(text)):
        if text[k] == '"' and text[k - 1] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += (text[k] in "([{") - (text[k] in ")]}")
            if depth == 0:
                return k
    raise ValueError(text)


def parse(text: str) -> Module:
    """The module that XLA writes with xla_dump_to."""
    text = re.sub(r"/\*.*?\*/", "", text)
    computations: dict[str, Computation] = {}
    current, entry = None, ""
    for line in text.splitlines():
        begins = re.match(r"(ENTRY )?%([\w.\-<>]+) \(.*-> .* \{$", line)
        if begins:
            current = computations[begins[2]] = Computation(begins[2], line.removeprefix("ENTRY "))
            entry = begins[2] if begins[1] else entry
        elif line == "}":
            current = None
        elif current is not None:
            for name, leaf in re.findall(
                r"%([\w.\-]+)#(\d+)", line
            ):  # a leaf of a tuple, for short
                kind = leaves(current.instructions[name].type)[int(leaf)]
                part = f"%{name}.part{leaf} = {kind} get-tuple-element(%{name}), index={leaf}"
                current.instructions[f"{name}.part{leaf}"] = instruction(part)
            each = instruction(re.sub(r"(%[\w.\-]+)#(\d+)", r"\1.part\2", line))
            current.instructions[each.name] = each
            if line.strip().startswith("ROOT "):
                current.root = each.name
    return Module(computations, entry)


def instruction(line: str) -> Instruction:
    name, rest = line.strip().removeprefix("ROOT ").removeprefix("%").split(" = ", 1)
    end = matching(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    kind, rest = rest[:end], rest[end:].strip()
    opens = rest.index("(")
    closes = matching(rest, opens)
    literal = rest[opens + 1 : closes]
    names = tuple(part.split()[-1].removeprefix("%") for part in pieces(literal))
    opcode = rest[:opens]
    attributes: dict[str, str] = {}
    for part in pieces(rest[closes + 1 :]):
        key, equals, value = part.partition("=")
        if equals and re.fullmatch(r"[a-z_]+", key) and key != "device_ids":
            attributes[key] = value
        else:  # replica_groups=mesh['a'=2], device_ids=([2]) {'a'}
            attributes[next(reversed(attributes))] += f", {part}"
    constant = opcode in ("constant", "parameter", "iota", "partition-id")
    return Instruction(name, kind, opcode, () if constant else names, literal, attributes)


def leaves(kind: str) -> list[str]:
    """The arrays' types in a type, which is an array's or a flat tuple's."""
    if not kind.startswith("("):
        return [kind]
    found = pieces(kind[1:-1])
    assert not any(each.startswith("(") for each in found), kind
    return found


def array_type(kind: str) -> tuple[np.dtype, tuple[int, ...]]:
    """The dtype and shape of f32[2,3]{1,0}."""
    found = re.match(r"(\w+)\[([\d,]*)\]", kind)
    assert found is not None, kind
    return DTYPES[found[1]], tuple(int(n) for n in found[2].split(",") if n)


def section(
    module: Module, computation: Computation, wanted: Sequence[str], known: Sequence[str]
) -> tuple[str, list[tuple[str, int]]]:
    """The instructions that `wanted` needs, as a module for one device.

    **Arguments**: `known` are instructions whose values are given to it.

    **Returns**: the module's text, and its parameters: each a known instruction and the leaf of its
    value. Its results are the leaves of the wanted ones.
    """
    needed: set[str] = set()
    pending = [*wanted]
    while pending:
        name = pending.pop()
        if name not in needed:
            needed.add(name)
            if name not in known:
                pending += computation.instructions[name].operands
    lines, parameters, helpers = [], [], []
    for name, each in computation.instructions.items():
        if name not in needed:
            continue
        if name not in known:
            lines.append(each.line())
            for called in each.called():
                helpers += [*module.reached(called), called]
            continue
        kinds = leaves(each.type)
        for leaf, kind in enumerate(kinds):
            inner = f"{name}.leaf{leaf}" if each.type.startswith("(") else name
            lines.append(f"%{inner} = {kind} parameter({len(parameters)})")
            parameters.append((name, leaf))
        if each.type.startswith("("):
            names = ", ".join(f"%{name}.leaf{leaf}" for leaf in range(len(kinds)))
            lines.append(f"%{name} = {each.type} tuple({names})")
    results = []
    for name in wanted:
        kind = computation.instructions[name].type
        if kind.startswith("("):
            for leaf, inner in enumerate(leaves(kind)):
                text = f"%{name}.result{leaf} = {inner} get-tuple-element(%{name}), index={leaf}"
                if text not in lines:
                    lines.append(text)
                results.append((f"{name}.result{leaf}", inner))
        else:
            results.append((name, kind))
    kinds = ", ".join(kind for _, kind in results)
    names = ", ".join(f"%{name}" for name, _ in results)
    lines.append(f"ROOT %results = ({kinds}) tuple({names})")
    texts = [module.computations[name].text() for name in dict.fromkeys(helpers)]
    body = "\n".join(f"  {line}" for line in lines)
    return "\n\n".join(
        ["HloModule section", *texts, f"ENTRY %section {{\n{body}\n}}\n"]
    ), parameters


def groups(text: str, devices: int) -> list[list[int]]:
    """The groups of replica_groups=, in each form that XLA writes."""
    if text.startswith("mesh["):
        return mesh_groups(text)
    if text.startswith("{"):
        found = re.findall(r"\{([\d,]+)\}", text)
        return [list(map(int, each.split(","))) for each in found] or [[*range(devices)]]
    result, numbers = text.split("<=")
    return iota(f"[{numbers.strip('[')}").reshape(sizes(result)).tolist()


def sizes(text: str) -> list[int]:
    found = re.search(r"\[([\d,]+)\]", text)
    assert found is not None, text
    return [int(n) for n in found[1].split(",")]


def iota(text: str) -> NDArray[np.int64]:
    """The numbers of [4,2]T(1,0)."""
    shape, _, order = text.partition("T")
    counted = np.arange(np.prod(sizes(shape))).reshape(sizes(shape))
    return counted.transpose([int(n) for n in order.strip("() ").split(",")]) if order else counted


def mesh_groups(text: str) -> list[list[int]]:
    """The groups of mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b','a':(1)2}."""
    found = re.fullmatch(
        r"mesh\[(.*?)\](?:, device_ids=\((.*?)\))? \{(.*)\}", text.replace("), {", ") {")
    )
    assert found is not None, text
    axes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", found[1])}
    ids = np.arange(np.prod([*axes.values()]))
    if found[2]:
        numbers = found[2]
        ids = iota(numbers) if "[" in numbers else np.array(numbers.split(","), np.int64)
    chosen = [
        (name, int(before or 1), int(size or axes[name]))
        for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", found[3])
    ]
    # Each axis is cut where a chosen part of it begins and ends.
    digits: list[tuple[str, int, int]] = []
    for name, size in axes.items():
        cuts = {1, size}
        for other, before, length in chosen:
            cuts |= {before, before * length} if other == name else set()
        ends = sorted(cuts)
        digits += [(name, a, b // a) for a, b in pairwise(ends)]
    inside = [
        k
        for name, before, length in chosen
        for k, (axis, a, n) in enumerate(digits)
        if axis == name and before <= a and a * n <= before * length
    ]
    outside = [k for k in range(len(digits)) if k not in inside]
    members = int(np.prod([digits[k][2] for k in inside]))
    cube = ids.reshape([n for *_, n in digits]).transpose(outside + inside)
    return cube.reshape(-1, members).tolist()
