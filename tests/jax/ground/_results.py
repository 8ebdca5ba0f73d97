"""Results of programs as JSON, and the sums that XLA makes itself in what was compiled."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax._src import compiler

#: A reduction of floating-point numbers between devices, in a compiled program.
REDUCING = re.compile(
    r"= \(?(?P<dtype>b?f\d+\w*|c\d+)\[.* (?P<op>all-reduce|reduce-scatter)(-start)?\(.*"
    r"to_apply=(?P<function>%?[\w.-]+)"
)
#: A function of a compiled program with its last operation, such as the `add` of a reduction.
FUNCTION = re.compile(
    r"^(?P<name>%?[\w.-]+) \(.*?\{$.*?^ *ROOT .*? (?P<root>[\w-]+)\(", re.M | re.S
)
OP_NAME = re.compile(r'op_name="(?P<name>[^"]*)"')
CALL = re.compile(r'custom_call_target="gpusim_collective"')


@contextmanager
def sums_left_to_xla() -> Iterator[dict[str, Any]]:
    """Read what is compiled in the block: which sums are calls of gpusim's, and which are not.

    The dict has `calls`, gpusim's, and `left`, the float reductions of XLA's, by their names.
    """
    found: dict[str, Any] = {"calls": 0, "left": []}
    compile = compiler.compile_or_get_cached

    def read(*arguments: Any, **options: Any) -> Any:
        executable = compile(*arguments, **options)
        for module in executable.hlo_modules():
            text = module.to_string()
            found["calls"] += len(CALL.findall(text))
            found["left"] += reductions_of(text)
        return executable

    compiler.compile_or_get_cached = read
    try:
        yield found
    finally:
        compiler.compile_or_get_cached = compile


def reductions_of(text: str) -> list[str]:
    """The reductions of floating-point numbers between devices in a compiled program's text."""
    roots = {found["name"]: found["root"] for found in FUNCTION.finditer(text)}
    shown = []
    for line in text.splitlines():
        reducing = REDUCING.search(line)
        if reducing:
            name = OP_NAME.search(line)
            of = f" for {name['name']}" if name else ""
            root = roots.get(reducing["function"], "?")
            shown.append(f"{reducing['op']} by {root} of {reducing['dtype']}{of}")
    return shown


def described(tree: Any) -> dict[str, Any]:
    """A program's result: its structure, and its leaves by their paths."""
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    return {
        "structure": str(structure),
        "leaves": {jax.tree_util.keystr(path): leaf_of(leaf) for path, leaf in leaves},
    }


def leaf_of(leaf: Any) -> dict[str, Any]:
    """An array with its bytes, its type and where it is; other things as texts."""
    if isinstance(leaf, jax.Array):
        return array_of(leaf)
    if isinstance(leaf, (np.ndarray, np.generic)):
        return {"kind": "numpy", **bytes_of(np.asarray(leaf))}
    return {"kind": type(leaf).__name__, "text": str(leaf)}


def array_of(x: jax.Array) -> dict[str, Any]:
    """An array of JAX's, and whether its replicas, the shards of one index, have the same bytes."""
    found: dict[str, Any] = {"kind": "array", "type": str(x.dtype), "weak": bool(x.aval.weak_type)}
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        return {**found, "at": at(x), "key": array_of(jax.random.key_data(x))}
    own = {(str(each.index), np.asarray(each.data).tobytes()) for each in x.addressable_shards}
    equal = len(own) == len({index for index, _ in own})
    return {**found, "at": at(x), "equal_replicas": equal, **bytes_of(np.asarray(x))}


def at(x: jax.Array) -> dict[str, Any]:
    """The sharding of an array, and the devices of its shards."""
    return {
        "sharding": str(x.sharding),
        "type": str(jax.typeof(x)),
        "committed": bool(x.committed),
        "shards": [[each.device.id, str(each.index)] for each in x.addressable_shards],
        "layout": str(x.format.layout) if hasattr(x, "format") else "",  # keys have none
    }


def bytes_of(x: np.ndarray) -> dict[str, Any]:
    """The bytes of an array, with what is needed to read them."""
    data = base64.b64encode(np.ascontiguousarray(x).tobytes()).decode()
    return {"dtype": x.dtype.name, "shape": list(x.shape), "data": data}


def lines(found: dict[str, Any]) -> list[str]:
    """An outcome for people."""
    word = "skipped: " + found["skip"] if "skip" in found else found.get("error", "passes")
    sums = found["sums"]
    shown = [f"{found['name']}: {word} ({found['seconds']} s, {found['compilations']} compiled, "
             f"{sums['calls']} calls of gpusim's, {len(sums['left'])} of XLA's)"]  # fmt: skip
    shown += [f"    warns: {each}" for each in found["warnings"]]
    shown += [f"    XLA's: {each}" for each in sums["left"]]
    return shown + [f"    {line}" for line in found.get("traceback", "").splitlines()]
