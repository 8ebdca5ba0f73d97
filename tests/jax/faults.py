"""Checks of XLA's own bits, of refusals and of errors, on the devices of this process."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import gpusim.jax
from gpusim import Reduction
from gpusim.jax import private, sums
from gpusim.tools.compare.comparing import compare
from gpusim.tools.compare.report import sentences
from gpusim.tools.compare.runs import Run, read
from tests.jax.devices import DEVICES, MESH, mapped, same
from tests.oracles.budget import SEED, budget

XLAS = Reduction.like("xla-cpu")
ROUNDED = Reduction(accumulate="float32")
"""The same sum of operands that are rounded: what a custom call is given without a conversion."""

KEEPS_ROUNDINGS = "--xla_allow_excess_precision=false" in os.environ.get("XLA_FLAGS", "")

Function = Callable[..., Any]


def chosen(function: Function, *arguments: Any, reduction: Any = XLAS, check: bool = False) -> Any:
    """The results with a Reduction, or without one plain JAX's."""
    with gpusim.jax.installed(reduction):
        return jax.tree.map(np.asarray, mapped(function, check=check)(*arguments))


def both(function: Function, *arguments: Any, check: bool = False) -> Any:
    """The results of plain JAX, and those with XLA's Reduction."""
    plain = jax.tree.map(np.asarray, mapped(function, check=check)(*arguments))
    return plain, chosen(function, *arguments, check=check)


def drawn(dtype: str, *shape: int) -> Any:
    rng = np.random.default_rng([SEED, DEVICES])
    return rng.normal(size=(DEVICES, *shape)).astype(np.dtype(dtype))


# ---------------------------------------------------------------- XLA's own bits


def psum(x: Any) -> Any:
    return lax.psum(x, "i")


def scattered(x: Any) -> Any:
    return lax.psum_scatter(x, "i", tiled=True)


def loss(x: Any) -> Any:
    return (psum(jnp.sin(x)) * lax.pmean(x * x, "i")).astype(jnp.float32).sum()


COMPUTED: dict[str, Function] = {
    "a product": lambda x: psum(x.T @ x),
    "tanh": lambda x: psum(jnp.tanh(x)),
    "a square": lambda x: psum(x * x),
    "scattered": lambda x: scattered(x * x),
    "a mean": lambda x: lax.pmean(jnp.exp(x), "i"),
    "in a loop": lambda x: lax.scan(lambda c, _: (psum(c * x) / 8, c), x, None, length=3),
    "several": lambda x: psum({"x": x * x, "y": jnp.sin(x)}),
    "a gradient": lambda x: jax.grad(loss)(x),
}
MEANS = set() if DEVICES & (DEVICES - 1) == 0 else {"a mean", "a gradient"}
"""Programs whose quotient has XLA's own bits, whatever becomes of the operands' roundings."""

ROUNDED_ANYWAY: dict[str, Function] = {
    "the largest": lambda x: lax.pmax(x * x, "i") * x,
    "the smallest": lambda x: jnp.tanh(lax.pmin(jnp.sin(x), "i")),
    "an argument": psum,
    "what follows": lambda x: psum(x) * x + x,
    "what follows scattered": lambda x: jnp.tanh(scattered(x) * 0.4),
}


def operands_of_xlas_sums_are_not_rounded() -> None:
    """XLA drops the rounding of an operand that is computed in bfloat16, and so does xla-cpu."""
    x = drawn("bfloat16", 2 * DEVICES, 2 * DEVICES)
    differing = set()
    for name, function in (COMPUTED | ROUNDED_ANYWAY).items():
        plain, found = both(function, x)
        jax.tree.map(same, found, plain)
        rounded = chosen(function, x, reduction=ROUNDED)
        if not all(map(np.array_equal, jax.tree.leaves(plain), jax.tree.leaves(rounded))):
            differing.add(name)
    assert differing == (MEANS if KEEPS_ROUNDINGS else {*COMPUTED}), differing


def arguments_are_summed_as_collectives_do() -> None:
    """Where nothing is computed, nothing is dropped: the bits are those of gpusim.collectives."""
    x = drawn("bfloat16", 2 * DEVICES, 3)
    for collective in ("psum", "pmax", "pmin"):
        plain, found = both(lambda x: getattr(lax, collective)(x, "i"), x)  # noqa: B023  # called in this round
        expected = getattr(gpusim.collectives, collective)(
            x, **({"reduction": XLAS} if collective == "psum" else {})
        )
        same(found[0], expected.value)
        same(found, plain)


def means_divide_as_xla_does() -> None:
    """JAX's pmean is a sum and a quotient: XLA multiplies, and the transpose divides first."""
    dtypes = ("float32", "float16", "bfloat16", "float64", "complex64")
    x, weights = ([drawn(dtype, 50) + k for dtype in dtypes] for k in range(2))

    def mean(x: Any) -> Any:
        return lax.pmean(x, "i")

    def back(x: Any, weights: Any) -> Any:
        return jax.vjp(mean, x)[1](weights)

    for check in (False, True):
        plain, found = both(mean, x, check=check)
        jax.tree.map(same, found, plain)
    plain, found = both(back, x, weights)
    jax.tree.map(same, found, plain)
    left = chosen(back, x, weights, reduction={"another": "ring"})
    jax.tree.map(same, left, plain)


LOCAL: dict[str, Function] = {
    "tanh": jnp.tanh,
    "square": lambda x: x * x,
    "transpose": lambda x: x.T,
    "plus one": lambda x: x + 1,
    "third": lambda x: x / 3,
    "in float32": lambda x: (x.astype(jnp.float32) * 1.1).astype(x.dtype),
    "product": lambda x: x @ x.T / len(x),
    "wide product": lambda x: jnp.einsum(
        "ab,bc->ac", x, x, preferred_element_type=jnp.float32
    ).astype(x.dtype),
    "sum": lambda x: jnp.broadcast_to(x.sum(0), x.shape),
    "relu": lambda x: jnp.maximum(x, 0),
    "where": lambda x: jnp.where(x > 0, x * 1.3, x),
    "roll": lambda x: jnp.roll(x, 1, 0),
    "cumulated": lambda x: jnp.cumsum(x, 0) / 4,
    "gelu": jax.nn.gelu,
    "loop": lambda x: lax.scan(lambda carry, row: (carry * 0.9 + row, carry), x[0], x)[1],
    "sorted": lambda x: jnp.sort(x, 0),
    "jit": lambda x: jax.jit(lambda x: x * 1.7)(x),
    "checkpoint": lambda x: jax.checkpoint(lambda x: jnp.sin(x) * x)(x),
    "joined": lambda x: jnp.concatenate([x[1:], x[:1] * 2]),
    "branch": lambda x: lax.cond(x[0, 0] > 0, lambda x: x * 1.1, lambda x: x * 0.9, x),
    "barrier": lax.optimization_barrier,
}
SUMS: dict[str, Function] = {
    "psum": psum,
    "pmean": lambda x: lax.pmean(x, "i"),
    "scattered": lambda x: jnp.tile(scattered(x), (DEVICES, 1)),
    "pair": lambda x: sum(psum((x, x * 2))),
    "of a scalar": lambda x: x * psum(x.sum()) / 64,
    "groups": lambda x: lax.psum(x, "i", axis_index_groups=[[*range(DEVICES)][::-1]]),
    "repeated": lambda x: lax.scan(
        lambda carry, _: (psum(carry * 1.1) / DEVICES, None), x, None, length=2
    )[0],
}


def drawn_program(rng: np.random.Generator) -> tuple[list[str], Function]:
    """Operations on one device's matrix, at least one of them a sum."""
    tables = [LOCAL] * int(rng.integers(1, 4)) + [SUMS]
    tables += [(LOCAL, LOCAL, SUMS)[int(rng.integers(3))] for _ in range(int(rng.integers(4)))]
    steps = [(name, table[name]) for table in tables for name in [str(rng.choice([*table]))]]

    def function(x: Any) -> Any:
        for _, step in steps:
            x = step(x)
        return x

    return [name for name, _ in steps], function


def xlas_sums_have_its_bits() -> None:
    """Of random programs, forward and backward."""
    rng = np.random.default_rng([SEED, DEVICES])
    shape = (2 * DEVICES, 2 * DEVICES)
    for dtype, share in (("bfloat16", 60), ("float32", 10), ("float16", 10), ("float8_e5m2", 10)):
        x, weights = drawn(dtype, *shape), rng.normal(size=(DEVICES, *shape)).astype("f4")
        for _ in range(budget(share)):
            names, function = drawn_program(rng)

            def gradient(x: Any, weights: Any, function: Function = function) -> Any:
                def total(x: Any) -> Any:
                    return (function(x).astype(jnp.float32) * weights).sum()

                return jax.grad(total)(x)

            try:
                plain, found = both(function, x)
                same(found, plain)
                # A cotangent of constants would have a sum of them, which XLA multiplies.
                plain, found = both(gradient, x, weights)
                same(found, plain)
            except AssertionError as error:
                raise AssertionError(f"{dtype}: {names}") from error


def sums_of_constants_are_multiplied_by_xla() -> None:
    """The documented exception: XLA's program lacks a sum there, so that bits cannot agree."""
    x = drawn("float32", 2)
    programs = []
    for reduction in (None, XLAS):
        with gpusim.jax.installed(reduction):
            compiled = mapped(lambda x: x + psum(jnp.full_like(x, 0.1))).lower(x).compile()
            programs.append(compiled.as_text())
    assert re.search(r"all-reduce\(|gpusim_collective", programs[0]) is None, programs[0]
    assert "gpusim_collective" in programs[1], "mend docs/jax.md and gpusim jaxrun --help"


def recorded(folder: Path, reduction: Any) -> Run:
    x = drawn("bfloat16", 40)
    with gpusim.jax.installed(reduction), gpusim.record(folder):
        mapped(lambda x: lax.pmean(jnp.tanh(x), "i") + lax.psum(x * x, "i"))(x)  # recorded
    return read(folder)


def records_of_xlas_sums_are_in_float32() -> None:
    """As XLA adds; with other Reductions in the program's dtype. Lines are the program's."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = (k for k, text in enumerate(lines, 1) if text.endswith("  # recorded"))
    site = f"{__file__}:{number}"
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        one, again, ring = (
            recorded(folder / name, reduction)
            for name, reduction in (("a", XLAS), ("b", XLAS), ("c", Reduction(order="ring")))
        )
        for run, dtype in ((one, "float32"), (ring, "bfloat16")):
            assert [event.first.kinds for event in run.events] == [((dtype, (40,)),)] * 2
            sites = {event.first.site for event in run.events}
            assert sites == {site}, sites
        assert compare(one, again).verdict is None, sentences(compare(one, again))
        verdict = compare(one, ring).verdict
        assert verdict is not None
        assert verdict.kind == "other" and "dtypes" in verdict.differs


# ---------------------------------------------------------------- refusals

OTHERS = ("cuda", "rocm", "tpu")


def gathered_back(x: Any) -> Any:
    """The gradient of all_gather: a psum_scatter."""
    return jax.grad(lambda x: (lax.all_gather(x, "i") ** 2).sum())(x)


REDUCING: dict[str, Function] = {
    "psum": psum,
    "pmean": lambda x: lax.pmean(x, "i"),
    "pmax": lambda x: lax.pmax(x, "i"),
    "pmin": lambda x: lax.pmin(x, "i"),
    "psum_scatter": scattered,
    "psum_scatter by a transpose": gathered_back,
    "psum of several": lambda x: psum((x, x * x)),
}


def other_platforms_are_refused() -> None:
    """By each collective with a Reduction; without one they have JAX's own program."""
    x = drawn("float32", DEVICES)

    def lowered(function: Function, platform: str) -> str:
        return str(mapped(function).trace(x).lower(lowering_platforms=(platform,)).as_text())

    for name, function in REDUCING.items():
        for reduction in (XLAS, Reduction(order="ring")):
            for platform in OTHERS:
                plain = lowered(function, platform)
                with gpusim.jax.installed({"another": reduction}):
                    assert "gpusim" not in lowered(function, platform)
                with gpusim.jax.installed(reduction):
                    try:
                        lowered(function, platform)
                    except NotImplementedError as error:
                        said = rf"lax\.p\w+ has a Reduction.* for {platform}: .*JAX_PLATFORMS=cpu"
                        assert re.search(said, str(error)), error
                    else:
                        raise AssertionError((name, platform))
                assert lowered(function, platform) == plain
    with gpusim.jax.installed(XLAS):
        for platform, rules in private.platform_lowerings.items():
            for primitive in sums.rules(XLAS):
                rule = rules[primitive].rule
                assert rule.__module__ == "gpusim.jax.sums", (platform, primitive)


def ragged_calls_for_other_platforms_are_jaxs() -> None:
    x = drawn("float32", DEVICES)
    along = np.tile(np.arange(DEVICES, dtype=np.int32), (DEVICES, 1))

    def exchange(x: Any, along: Any) -> Any:
        ones = jnp.ones_like(along)
        return lax.ragged_all_to_all(x, x, along, ones, along, ones, axis_name="i")

    def gradient(x: Any, along: Any) -> Any:
        return jax.grad(lambda x: (exchange(x, along) ** 2).sum())(x)

    for platform in OTHERS:
        plain = mapped(exchange).trace(x, along).lower(lowering_platforms=(platform,)).as_text()
        for reduction in (None, XLAS):
            with gpusim.jax.installed(reduction):
                traced = mapped(exchange).trace(x, along)
                assert traced.lower(lowering_platforms=(platform,)).as_text() == plain
                back = mapped(gradient).trace(x, along).lower(lowering_platforms=(platform,))
                assert "@ragged_all_to_all" in back.as_text()
                assert "gpusim" not in back.as_text()


# ---------------------------------------------------------------- JAX's errors come first

NAMES = ("operand", "output", "input_offsets", "send_sizes", "output_offsets", "recv_sizes")


def wrong_arguments() -> dict[str, dict[str, Any]]:
    """Arguments of ragged_all_to_all that replace right ones."""
    rows, index = np.ones((DEVICES, 2), np.float32), np.arange(DEVICES, dtype=np.int32)
    found: dict[str, dict[str, Any]] = {"right": {}, "operand and axis": {"operand": None}}
    for name in NAMES[2:]:
        wrong = {
            "float": index.astype(np.float32),
            "bool": index.astype(bool),
            "rank 2": index[:, None],
            "rank 0": np.int32(0),
            "no element": index[:0],
            "an integer": 3,
            "a list": [0] * DEVICES,
            "None": None,
            "text": "text",
            "one too few": index[1:],
        }
        found |= {f"{name}: {kind}": {name: value} for kind, value in wrong.items()}
    found |= {
        "two": {"recv_sizes": index.astype(np.float32), "input_offsets": index[:, None]},
        "operand: a list": {"operand": [1.0]},
        "operand: dtype": {"operand": rows.astype(np.int32)},
        "operand: rank 0": {"operand": np.float32(1)},
        "output: None": {"output": None},
        "output: shape": {"output": rows[:, :1]},
    }
    axes: dict[str, Any] = {
        "unbound": "no", "one unbound": ("i", "no"), "an integer": 0, "None": None, "empty": (),
        "a dict": {},
    }  # fmt: skip
    found |= {f"axis: {kind}": {"axis_name": axis} for kind, axis in axes.items()}
    found["axis and index"] = {"axis_name": "no", "send_sizes": index.astype(np.float32)}
    found["no such argument"] = {"axis": "i"}
    groups: dict[str, Any] = {
        "uneven": [[*range(DEVICES - 1)], [DEVICES - 1]], "not there": [[*range(1, DEVICES + 1)]],
        "an integer": 3, "integers": [0, 1], "empty": [], "text": ["ab", "cd"], "floats": [[0.5]],
    }  # fmt: skip
    found |= {f"groups: {kind}": {"axis_index_groups": each} for kind, each in groups.items()}
    return found


def outcome(place: str, wrong: dict[str, Any]) -> tuple[str, str]:
    """How a call ends that is traced and lowered in a place: an exception's type and text."""
    rows, index = np.ones((DEVICES, 2), np.float32), np.arange(DEVICES, dtype=np.int32)
    arguments = dict(zip(NAMES, (rows, rows, index, index, index, index), strict=True))
    options = {"axis_name": "i", **{k: v for k, v in wrong.items() if k not in NAMES}}
    arguments |= {k: v for k, v in wrong.items() if k in NAMES}
    arrays = {k: v for k, v in arguments.items() if isinstance(v, (np.ndarray, np.generic))}

    def call(arrays: dict[str, Any]) -> Any:
        return lax.ragged_all_to_all(*{**arguments, **arrays}.values(), **options)

    def row(arrays: dict[str, Any]) -> Any:
        return call(arrays)[None]

    stacked = {k: np.broadcast_to(x, (DEVICES, *x.shape)) for k, x in arrays.items()}
    specs: dict[str, Any] = {"mesh": MESH, "in_specs": P(), "out_specs": P("i")}
    try:
        match place:
            case "eager":
                call({})
            case "jit":
                jax.jit(call).lower(arrays)
            case "shard_map":
                jax.jit(jax.shard_map(row, **specs, check_vma=False)).lower(arrays)
            case "types":
                jax.jit(jax.shard_map(row, **specs)).lower(arrays)
            case "pmap":
                jax.pmap(call, axis_name="i").lower(stacked)
            case "vmap":
                jax.jit(jax.vmap(jax.shard_map(row, **specs, check_vma=False))).lower(stacked)
    except Exception as error:
        return type(error).__name__, re.sub("0x[0-9a-f]+", "", str(error))
    return "none", ""


def errors_of_ragged_all_to_all_are_jaxs() -> None:
    """Outside of an axis, in it, with types and in pmap: the same types and texts."""
    wrong = wrong_arguments()
    places = ("eager", "jit", "shard_map", "types", "pmap")
    plain = {key: outcome(key[0], wrong[key[1]]) for key in ((p, w) for p in places for w in wrong)}
    assert {name for name, _ in plain.values()} >= {"none", "NameError", "ValueError", "TypeError"}
    with gpusim.jax.installed():
        for (place, name), expected in plain.items():
            found = outcome(place, wrong[name])
            assert found == expected, (place, name, found, expected)


def indices_are_checked_under_vmap() -> None:
    """JAX's own rule ends in an AssertionError there, and for bool in one of iota."""
    wrong = {
        name: each for name, each in wrong_arguments().items() if name.split(":")[0] in NAMES[2:]
    }
    with gpusim.jax.installed():
        for name, each in wrong.items():
            argument, _, kind = name.partition(": ")
            if kind in ("float", "bool"):
                expected = ("ValueError", f"ragged_all_to_all {argument} must be integer type.")
            elif kind in ("rank 2", "rank 0", "no element", "an integer"):
                expected = outcome("shard_map", each)
                assert "must be rank 1" in expected[1], (name, expected)
            else:
                continue
            assert outcome("vmap", each) == expected, name
