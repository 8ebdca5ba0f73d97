"""Random programs that change arrays in place, as text, and every way to run one."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np

import gpusim
from gpusim import lax

REPLICAS = 3
DTYPES = ("f4", "f8", "i4", "f2", "c8", "?", "u1", ml_dtypes.bfloat16)

#: Names that every program begins with: arguments, and arrays of the program's own.
START = """\
k = index()
a = x.copy()
b = y.copy()
c = np.zeros_like(x)
d = np.ones(4, x.dtype, like=x)
e = np.arange(12, like=x).reshape(3, 4)
o = np.zeros((), x.dtype, like=x)
s = x.sum()
t = x[0, 0]
p = lax_sum(x)
q = lax_sum(s)
"""

MATRICES = ("a", "b", "c", "e", "x", "y", "p")

VIEWS = (
    "{m}[{r}:]",
    "{m}[:, ::2]",
    "{m}[::-1]",
    "{v}.T",
    "{v}.reshape(-1)",
    "np.reshape({v}, (4, 3))",
    "np.ravel({v})",
    "np.ravel({v}.T)",
    "{v}.flatten()",
    "{v}[k % 2]",
    "{m}[:, k]",
    "{m}[k, {r}:]",
    "{m}[np.array([0, 2])]",
    "{m}[[{r}, 1], 1:]",
    "{m}[{v} > 0.5]",
    "{v}[{r}]",
    "{v}[-1, ..., 0]",
    "{v}[{r}, 1, ...]",
    "{v}[()]",
    "{v}[...]",
    "{v}[None]",
    "{v}.real",
    "{v}.imag",
    "np.diagonal({v})",
    "np.broadcast_to({v}, (2, 3, 4))",
    "{v}.copy()",
    "np.copy({v})",
    "np.asarray({v}, like=x)",
    "np.array({v}, like=x)",
    "{v}.astype({v}.dtype, copy=False)",
    "{v}.astype('f4')",
    "{v}.view()",
    "np.flip({v})",
    "np.swapaxes({v}, 0, -1)",
    "np.expand_dims({v}, 0)",
    "np.squeeze({v}[:1])",
    "np.squeeze({v})",
    "np.atleast_2d({v})",
    "np.split({m}, 3)[1]",
    "np.moveaxis({v}, 0, -1)",
    "np.rot90({v})",
    "np.take({v}, 1, 0)",
    "np.take({v}, k)",
    "np.where({v} > 0, {v}, {w})",
    "np.sort({v}, axis=0)",
    "{v} + {w}",
    "{v} * 2",
    "{v}.sum()",
    "{v}.max(0)",
    "np.zeros_like({v})",
    "np.full_like({v}, k)",
    "np.tile({v}, 1)",
    "np.concatenate([{m}, {n}])",
    "np.stack([{m}, {n}])[1]",
    "lax_sum({v})",
    "lax_shift({v})",
    "lax_gather({v})",
    "np.nan_to_num({v})",
    "np.clip({v}, 0, 2)",
)

WRITES = (
    "{v} {op}= {w}",
    "{v} {op}= {n}[{r}]",
    "{v} {op}= 2",
    "{v} {op}= np.float32(.1) * {w}",
    "{v} {op}= k",
    "{v}[{r}] = {w}",
    "{v}[{r}] {op}= {w}",
    "{v}[k % 2] {op}= {w}",
    "{v}[k % 2] = {w}",
    "{v}[k % 2][1:] += 1",
    "{v}[...] = {w}",
    "{v}[1:] = {v}[:-1]",
    "{v}[1:] {op}= {v}[:-1]",
    "{v}[:, 1:] += {v}[:, :-1]",
    "{v}[{v} > 1] = 0",
    "{m}[{n} > .5] = k",
    "{m}[{n} > .5] = {n}[0, 0]",
    "{v}[[0, 2]] = {w}",
    "{v}[[0, 2, 0]] = {n}",
    "{v}[[0, 1], [k, 1]] = 7",
    "{v}[np.array([1, 1])] += {w}",
    "{v}[k % 2, 1] = 5",
    "{v}[:, k] -= {v}[:, 0]",
    "{v}[()] = {w}",
    "{v}[0, 0] = 300",
    "np.add({v}, {w}, out={m})",
    "np.add({v}, {w}, {m})",
    "np.multiply({v}, {w}, out={v}, where={n} > 0)",
    "np.subtract({v}, {m}[::-1], out={v}[::-1])",
    "np.exp({v}, out={m})",
    "np.negative({v}, out={v})",
    "np.sqrt({v}, out={v}, casting='unsafe')",
    "np.divmod({m}, 3, out=({n}, {m}))",
    "np.modf({v}, out=({m}, None))",
    "np.matmul({m}, {n}.T, out={v})",
    "np.sum({m}, 0, out=d)",
    "np.sum({m}, out=o)",
    "np.mean({m}, 1, out={v})",
    "np.cumsum({m}, 1, out={n})",
    "np.clip({v}, 0, 1, out={v})",
    "np.max({m}, 0, None, d)",
    "np.take({m}, [1, 0], 0, out={v})",
    "np.concatenate([{m}[:1], {m}[1:]], out={v})",
    "np.dot({m}, d, out={v})",
    "np.add.reduce({m}, 0, out={v})",
    "np.add.accumulate({m}, 1, out={m})",
    "np.add.at({v}, [0, 0, 2], {w})",
    "np.add.at({v}, k % 2, 1)",
    "np.subtract.at({v}, ([0, 0], [k, k]), {w})",
    "np.maximum.at({v}, {n}[0] > 0, 2)",
    "np.copyto({v}, {w})",
    "np.copyto({v}, {w}, casting='unsafe', where={n} > 0)",
    "np.put({v}, [0, 0], {w})",
    "np.put({v}, k * 0, 4)",
    "np.place({v}, {v} > 0, [1, 2])",
    "np.putmask({v}, {n} > 0, {w})",
    "np.fill_diagonal({v}, k)",
    "np.fill_diagonal({v}, [1, 2])",
    "np.put_along_axis({v}, np.argsort({m}, 1), {n}, 1)",
    "np.put_along_axis({v}, np.array([[1]]), 9, 1)",
    "np.nan_to_num({v}, copy=False)",
    "{v}.sort()",
    "{v}.sort(0)",
    "{v}.sort(axis=-1, kind='stable')",
    "{v}.partition(1)",
    "{v}.partition(1, 0)",
    "{v}.fill({r})",
    "{v}.fill(k)",
    "{v}.put([0], 3)",
    "{v}.flat[1:3] = {w}",
    "{v}.flat = d",
    "{v}.real = 1",
    "{v}.real {op}= {w}",
    "{v}.imag = 1",
    "{v}.shape = (4, 3)",
    "{v}.shape = -1",
    "for row in {v}: row {op}= 2",
    "for row in {v}: row += d",
    "for i, row in enumerate({v}): row[:] = {w}[i]",
    "for first, second in zip({v}, {n}): first += second",
    "{v} @= np.eye(4)",
    "{v} @= {n}",
    "{v} **= 2",
    "{v} **= np.abs({w})",
    "{v} **= .5",
    "o {op}= s",
    "s {op}= t",
    "o[...] = {v}[0, 0]",
    "o[()] = k",
    "t[...] = 1",
    "np.add(s, t, out=o)",
    "np.add(s, t, out=s)",
    "d[k] = s",
    "d[1:] {op}= {m}[0, :3]",
    "d += {m}[1]",
)

OPERATORS = ("+", "-", "*", "/", "//", "%", "&", "|", "^", "<<", ">>")


def random_program(rng: np.random.Generator) -> str:
    """Return some ten statements, each of which may fail by itself."""
    names = [*MATRICES, "d", "o", "s"]
    lines = []
    for number in range(int(rng.integers(4, 12))):
        view = rng.random() < 0.45
        text = str(rng.choice(VIEWS if view else WRITES))
        # the latest views are the likeliest to be written
        recent = names[-4:] if rng.random() < 0.5 else names
        filled = text.format(
            v=rng.choice(recent),
            w=rng.choice(names),
            m=rng.choice(MATRICES[:4]),
            n=rng.choice(MATRICES),
            r=int(rng.integers(3)),
            op=rng.choice(OPERATORS[:4] if rng.random() < 0.8 else OPERATORS),
        )
        if view:
            name = f"v{number}"
            names.append(name)
            filled = f"{name} = {filled}"
        lines.append(filled)
    return "\n".join(lines)


def random_arguments(rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Return stacked matrices of two dtypes."""
    return tuple(
        (rng.standard_normal((REPLICAS, 3, 4)) * 3).astype(DTYPES[int(rng.integers(len(DTYPES)))])
        for _ in "xy"
    )


Outcome = tuple[dict[str, Any], list[tuple[int, str]]]
"""The arrays and numbers of a program by name, and the statements that failed, with the errors."""

HIDDEN = {
    *("x", "y", "np", "index", "lax_sum", "lax_shift", "lax_gather"),
    *("i", "row", "first", "second", "__builtins__", "__warningregistry__"),
}
"""Names that are no results."""

REFUSALS = ("different shape", "read-only", "masks select")
"""Words of errors for what a map refuses: masks that select unequal numbers of elements, say."""


def run_program(
    program: str, x: Any, y: Any
) -> tuple[dict[str, Any], list[tuple[int, str]], list[int]]:
    """Run the program inside a map, whose axis is i; also return the statements it refused."""
    ring = [(r, (r + 1) % REPLICAS) for r in range(REPLICAS)]
    names = {
        "np": np,
        "x": x,
        "y": y,
        "index": lambda: lax.axis_index("i"),
        "lax_sum": lambda value: lax.psum(value, "i"),
        "lax_shift": lambda value: lax.ppermute(value, "i", ring),
        "lax_gather": lambda value: lax.all_gather(value, "i"),
    }
    failed, refused = [], []
    for number, line in enumerate((START + program).splitlines()):
        try:
            exec(line, names)
            _check_target(line, names)
        except Exception as error:
            failed.append((number, type(error).__name__))
            if any(refusal in str(error) for refusal in REFUSALS):
                refused.append(number)
    return {name: value for name, value in names.items() if name not in HIDDEN}, failed, refused


def run_loop(program: str, x: np.ndarray, y: np.ndarray) -> list[Outcome]:
    """Run the program replica after replica on NumPy, each statement on all of them."""
    replicas: list[dict[str, Any]] = []
    failed: list[list[tuple[int, str]]] = [[] for _ in range(REPLICAS)]
    for r in range(REPLICAS):
        own = {name: value[r, ...] for name, value in (("x", x), ("y", y))}
        for part in own.values():
            part.flags.writeable = False
        replicas.append({"np": np, "index": lambda r=r: np.int32(r), **own})
    for number, line in enumerate((START + program).splitlines()):
        target, collective, argument = line.partition(" = lax_")
        if collective:
            name, _, argument = argument.partition("(")
            line = f"argument = np.asarray({argument}"
        fine = True
        for names, errors in zip(replicas, failed, strict=True):
            try:
                exec(line, names)
                _check_target(line, names)
            except Exception as error:
                errors.append((number, type(error).__name__))
                fine = False
        if collective and fine:
            for names, result in zip(replicas, _collective(name, replicas), strict=True):
                names[target] = result
        for names in replicas:
            names.pop("argument", None)
    found = [{k: v for k, v in names.items() if k not in HIDDEN} for names in replicas]
    return list(zip(found, failed, strict=True))


SILENT = re.compile(r"(?!np\b)(\w+)\.(?:fill|put|flat)\b|np\.(?:put|place|putmask)\((\w+),")


def _check_target(line: str, names: dict[str, Any]) -> None:
    """Refuse what NumPy does with scalars without effect."""
    written = SILENT.match(line)
    if written and isinstance(names.get(written[1] or written[2]), np.generic):
        raise TypeError


def _collective(name: str, replicas: list[dict[str, Any]]) -> list[np.ndarray]:
    stacked = np.stack([names["argument"] for names in replicas])
    calls = {
        "sum": lambda value: lax.psum(value, "i"),
        "shift": lambda value: lax.ppermute(value, "i", [(0, 1), (1, 2), (2, 0)]),
        "gather": lambda value: lax.all_gather(value, "i"),
    }
    results = gpusim.vmap(calls[name], axis_name="i")(stacked)
    return [np.array(result) for result in results]
