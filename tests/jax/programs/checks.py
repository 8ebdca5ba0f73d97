"""Programs of jit with sharded arrays, under chosen reductions, against a plain computation.

`partitioned` runs the program that XLA's partitioner has made, part by part, with
`gpusim.collectives` between the devices. For each random program two things are compared:

- With XLA's own order (the twin xla-cpu) that computation has the results of plain JAX. So its
  operands are those of the partitioned program, and so is all that follows the sums.
- With a chosen reduction it has the results of JAX with gpusim installed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import gpusim.jax
from gpusim import Reduction, as_reduction, collectives
from tests.jax.programs import random_programs
from tests.jax.programs.partitioned import EXECUTION, Partitioned, Sum, dumped, shards
from tests.jax.programs.random_programs import Draw, Program
from tests.oracles.budget import budget, seeds

DEVICES = jax.device_count()

#: XLA keeps a bfloat16 operand of its own sums in float32, unless it is told not to.
ROUNDED = {"xla_allow_excess_precision": False}

#: How the 200 random programs are divided between numbers of devices.
PROGRAMS = {2: 20, 3: 25, 4: 50, 6: 15, 8: 90}

EVERY = ("float16", "bfloat16", "float32", "float64", "complex64")
REAL = EVERY[:4]
#: Reductions and the dtypes that they add: orders, accumulators, roundings, wires, levels, twins.
REDUCTIONS = {
    "linear": EVERY,
    "reverse": EVERY,
    "tree": EVERY,
    "ring": EVERY,
    "exact": EVERY,
    "fixed": REAL,
    "tree accumulate=float64": REAL,
    "ring accumulate=float16": ("float16", "float32"),
    "reverse accumulate=bfloat16": ("bfloat16", "float32"),
    "linear accumulate=float16 rounding=stochastic seed=1": ("float16", "float32"),
    "tree accumulate=bfloat16 rounding=stochastic seed=2": ("bfloat16", "float32"),
    "ring rounding=stochastic seed=3": ("float16", "bfloat16"),
    "linear wire=bfloat16": REAL,
    "ring wire=float8_e4m3fn": REAL,
    "tree wire=int8:amax:64@ends": REAL,
    "ring wire=mx:float8_e4m3fn:even": REAL,
    "linear rounding=stochastic seed=4 wire=bfloat16:stochastic": REAL,
    "ring groups_of=2 across tree": REAL,
    "gloo-ring": REAL,
    "nccl-ring": REAL,
    "openmpi-recursive-doubling": ("float32", "float64", "complex64"),
}  # fmt: skip
#: Through which hardly any element passes unchanged.
NARROW = "tree accumulate=float16 wire=float8_e4m3fn"


@contextmanager
def without_warnings(reduction: Any) -> Iterator[gpusim.jax.Installation]:
    """An installation that reaches each sum: a ReductionWarning is an error."""
    with gpusim.jax.installed(reduction) as installation, warnings.catch_warnings():
        warnings.simplefilter("error", gpusim.jax.ReductionWarning)
        yield installation


def same(found: Any, expected: Any, text: str) -> None:
    """Equal dtypes, shapes and bits; a NaN is a NaN."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), text
    both = (found != found) & (expected != expected)
    found, expected = np.where(both, 0, found), np.where(both, 0, expected)
    if found.tobytes() != expected.tobytes():
        flat = np.ascontiguousarray(found).reshape(-1), np.ascontiguousarray(expected).reshape(-1)
        differ = [a.tobytes() != b.tobytes() for a, b in zip(*flat, strict=True)]
        first = differ.index(True)
        raise AssertionError(
            f"{text}: {sum(differ)} of {len(differ)} elements differ, the first is "
            f"{flat[0][first]!r}, expected {flat[1][first]!r}"
        )


def all_same(results: Any, expected: Sequence[Any], text: str) -> None:
    """The same on each device, for each result of a program."""
    flat = jax.tree.leaves(results)
    for number, (result, devices) in enumerate(zip(flat, expected, strict=True)):
        for device, (found, value) in enumerate(zip(shards(result), devices, strict=True)):
            same(found, value, f"{text}: result {number} on device {device}")


def executed(program: Program) -> Any:
    """The results of a program, compiled anew."""
    compiled = jax.jit(program.function, keep_unused=True, **program.options)
    return jax.block_until_ready(compiled(*program.arguments))


class Plain:
    """A program in plain JAX, and as XLA's partitioner leaves it."""

    def __init__(self, program: Program) -> None:
        self.program = program
        compiled, self.text = dumped(
            program.function, *program.arguments, options=ROUNDED, **program.options
        )
        self.results = compiled(*program.arguments)
        self.partitioned = Partitioned(self.text, DEVICES)
        self.given = [shards(array) for array in program.arguments]

    def check_operands(self) -> list[Sum]:
        """Compare with plain JAX, by XLA's order. Returns the sums."""
        rounded = Partitioned(self.text, DEVICES, ROUNDED)
        expected, sums = rounded.run(self.given)
        all_same(self.results, expected, f"{self.program.text}, by XLA")
        return sums

    def check(self, reduction: Reduction, calls: int = 0) -> None:
        """Compare JAX with gpusim installed with the plain computation."""
        with without_warnings(reduction) as installation:
            installation.calls = calls
            results = executed(self.program)
        expected, _ = self.partitioned.run(self.given, lambda groups: reduction, calls)
        all_same(results, expected, f"{self.program.text}, {reduction}, calls={calls}")


def usable(sums: Sequence[Sum]) -> list[str]:
    """The reductions that add the dtypes of these sums."""
    used = {each.dtype.name for each in sums if each.op == "add" and not each.moves}
    if not used:
        return [NARROW]
    return [text for text, dtypes in REDUCTIONS.items() if used <= {*dtypes}]


def random_programs_have_the_chosen_bits() -> None:
    reached, failures = 0, []
    for seed in seeds(budget(PROGRAMS[DEVICES])):
        program = random_programs.draw(seed)
        try:
            plain = Plain(program)
            sums = plain.check_operands()
            rng = np.random.default_rng(seed)
            for text in rng.permutation(usable(sums))[:2]:
                plain.check(as_reduction(str(text)), calls=int(rng.integers(3)) * 1000)
        except Exception as error:
            failures.append(f"{program.text}: {type(error).__name__}: {error}")
        else:
            reached += any(each.op == "add" and not each.moves for each in sums)
    assert not failures, "\n".join(failures)
    assert reached  # a program that only moves has no bits to choose


# ---------------------------------------------------------------- elements that are special


def special(d: Draw, shape: Sequence[int]) -> Any:
    """Values among which are NaN, infinities, zeros of both signs and subnormal numbers."""
    x = d.values(shape).reshape(-1)
    info = np.finfo(np.float32 if d.dtype == "bfloat16" else d.dtype)
    least = np.float64(info.smallest_subnormal)
    chosen = [np.nan, np.inf, -np.inf, 0.0, -0.0, least, -3 * least, float(info.max)]
    for k in range(0, len(x), 3):
        x[k] = np.asarray(chosen[d.rng.integers(len(chosen))]).astype(x.dtype)
    return x.reshape(shape)


SPECIAL: dict[str, Callable[[Any], Any]] = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(0),
    "all": lambda x: x.sum(),
    "max": lambda x: (x.max(0), x.min(0), x.max(), x.min()),
    "product": lambda x: jnp.ones((2, x.shape[0]), x.dtype) @ x,
    "scan": lambda x: lax.scan(lambda c, _: (c + x.sum(0), c), x[0], None, 2),
}


def special_elements_have_the_bits_of_collectives() -> None:
    mesh = Mesh(np.array(jax.devices()), ("d",))
    rng = np.random.default_rng(DEVICES)
    for dtype in REAL:
        d = Draw(rng, mesh, dtype)
        for rows in (1, 3):  # with one row for each device its sum is the operand itself
            x = d.put(special(d, (rows * DEVICES, 40)), ["d", None])
            zeros = np.where(rng.random((rows * DEVICES, 9)) < 0.5, 0.0, -0.0).astype(dtype)
            zeros[:, 0] = -0.0
            for given in (x, d.put(zeros, ["d", None])):
                for name, function in SPECIAL.items():
                    plain = Plain(Program(f"{name} of {dtype}", function, [given]))
                    plain.check(as_reduction("reverse" if name != "scan" else "tree"))


# ---------------------------------------------------------------- what only moves elements


def moves_are_exact_and_sums_of_zeros_are_sums() -> None:
    """A wire of eight bits changes what it carries: moved elements do not pass through it."""
    rng = np.random.default_rng(DEVICES)
    shapes = random_programs.SHAPES[DEVICES]
    moved = 0
    for name, function in {**random_programs.MOVES, **random_programs.ORDERED}.items():
        for shape in shapes[:: max(1, len(shapes) // budget(4, most=1))]:
            mesh = Mesh(np.array(jax.devices()).reshape(shape), random_programs.NAMES[: len(shape)])
            d = Draw(rng, mesh, "float32")
            program = Program(f"{name} on {shape}", function, random_programs.moved_arrays(d))
            compiled, text = dumped(function, *program.arguments)
            expected = [shards(each) for each in jax.tree.leaves(compiled(*program.arguments))]
            with without_warnings(NARROW):
                all_same(executed(program), expected, program.text)
            moved += "all-reduce" in text
    assert moved  # the partitioner does move by sums
    # It gathers what a product needs whole, by a sum that has the product's name.
    for shape in shapes:
        mesh = Mesh(np.array(jax.devices()).reshape(shape), random_programs.NAMES[: len(shape)])
        d = Draw(rng, mesh, "float32")
        x = d.array([1, 4], ["d", None])
        program = Program(f"x @ x.T on {shape}", lambda x: x @ x.T, [x])
        expected = [shards(jax.jit(program.function)(x))]
        with without_warnings(NARROW):
            all_same(executed(program), expected, program.text)
    d = Draw(rng, Mesh(np.array(jax.devices()), ("d",)), "float32")
    table = d.array([2, 5], ["d", None])
    index = d.indices((7,), table.shape[0], [None])
    for name, function in {
        "one-hot": lambda table, index: (
            jax.nn.one_hot(index, table.shape[0], dtype=table.dtype) @ table
        ),
        "mask": lambda table, index: jnp.where(
            jnp.arange(table.shape[0])[:, None] == index[0], table, 0
        ).sum(0),
        "a row of a sum": lambda table, index: (table * 2).sum(0)[index],
    }.items():
        plain = Plain(Program(name, function, [table, index]))
        plain.check_operands()
        plain.check(as_reduction(NARROW))
        with without_warnings(NARROW):
            narrow = executed(plain.program)
        assert (np.asarray(narrow) != np.asarray(plain.results)).any(), name


# ---------------------------------------------------------------- numbers of random sums


STOCHASTIC = "ring accumulate=bfloat16 rounding=stochastic seed=11"


def split_rows(rows: int = 2, columns: int = 200) -> Any:
    d = Draw(np.random.default_rng(7), Mesh(np.array(jax.devices()), ("d",)), "float32")
    return d.array([rows, columns], ["d", None])


def one(x: Any) -> Any:
    return x.sum(0)


def two(x: Any) -> Any:
    return (x * 2).sum(0), (x * 3).sum(0)


def looping(x: Any) -> Any:
    return lax.scan(lambda carry, _: (carry, (x * carry).sum(0)), x.dtype.type(1), None, 3)[1]


def numbers_do_not_depend_on_the_order_of_compilation() -> None:
    x = split_rows()
    found = []
    for order in ((one, two, looping), (looping, two, one), (two, looping, one)):
        with without_warnings(STOCHASTIC):
            runs = {each: jax.tree.leaves(jax.jit(each)(x)) for each in order}
            found.append([np.asarray(leaf) for each in (one, two, looping) for leaf in runs[each]])
    for each in found[1:]:
        for a, b in zip(found[0], each, strict=True):
            same(a, b, "another order of compilation")


def calls_shift_the_numbers_and_rounds_have_their_own() -> None:
    x = split_rows(rows=1)  # a device's sum is its row, so that the operands are known
    rows = np.asarray(x)
    reduction = as_reduction(STOCHASTIC)

    def fold(number: int, factor: float = 1) -> Any:
        return collectives.psum(rows * np.float32(factor), reduction=reduction, call=number).value

    with without_warnings(reduction) as installation:
        programs = [jax.jit(each) for each in (one, two, looping)]
        for calls in (0, 5, 1000):
            installation.calls = calls
            for _ in range(2):
                same(programs[0](x), fold(calls), "one")
                first, second = programs[1](x)
                same(first, fold(calls, 2), "the first of two")
                same(second, fold(calls + 1, 3), "the second of two")
                rounds = programs[2](x)
                for k in range(3):
                    same(np.asarray(rounds)[k], fold(calls + k * EXECUTION), f"round {k}")
                assert (np.asarray(rounds)[0] != np.asarray(rounds)[1]).any()
    # lax.psum comes first, wherever it stands
    mesh = x.sharding.mesh

    def whole(x: Any) -> Any:
        body = jax.shard_map(
            lambda x: lax.psum(x[0], "d"), mesh=mesh, in_specs=P("d"), out_specs=P()
        )
        return (x * 2).sum(0), body(x)

    with without_warnings(reduction):
        inserted, lowered = jax.jit(whole)(x)
        same(lowered, fold(0), "lax.psum")
        same(inserted, fold(1, 2), "the partitioner's")
