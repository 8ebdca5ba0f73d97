"""Records of the sums that XLA's partitioner inserts, and what `gpusim compare` says of them."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gpusim.jax
from gpusim.tools.compare.comparing import compare
from gpusim.tools.compare.report import sentences
from gpusim.tools.compare.runs import Run, read
from tests.jax.programs.partitioned import Partitioned, dumped, shards

DEVICES = jax.device_count()
MESH = Mesh(np.array(jax.devices()), ("data",))
ROWS = NamedSharding(MESH, P("data", None))
STEPS = 3


def step(w: Any, x: Any, rate: float) -> Any:
    """A step of training whose rows are split."""

    def loss(w: Any) -> Any:
        found = x @ w  # gradient
        return jnp.mean(found**2)  # loss

    value, gradient = jax.value_and_grad(loss)(w)
    largest = jnp.abs(x).max(0)  # largest
    rest = lax.fori_loop(0, 2, lambda _, y: y + (x * y).sum(0), largest)  # loop
    return w - rate * gradient, value + rest.sum()


def arrays(change: float = 0.0) -> tuple[Any, Any]:
    rng = np.random.default_rng(3)
    x = rng.normal(size=(2 * DEVICES, 5)).astype(np.float32) / 4
    x[-1, 0] += change
    w = rng.normal(size=5).astype(np.float32)
    return jax.device_put(w, NamedSharding(MESH, P())), jax.device_put(x, ROWS)


def line(mark: str) -> str:
    """The place of the line of this file with the comment."""
    for number, text in enumerate(Path(__file__).read_text().splitlines(), 1):
        if text.endswith(f"  # {mark}"):
            return f"{__file__}:{number}"
    raise AssertionError(mark)


def recorded(
    folder: Path, name: str, reduction: str, *, change: float = 0.0, rate: float = 0.125
) -> Run:
    with gpusim.jax.installed(reduction), gpusim.record(folder / name, arrays=True):
        w, x = arrays(change)
        program = jax.jit(step, static_argnums=2)
        for _ in range(STEPS):
            w, _ = program(w, x, rate)
    return read(folder / name)


def records_have_the_sums_of_the_partitioned_program() -> None:
    w, x = arrays()
    _, text = dumped(lambda w, x: step(w, x, 0.125), w, x)
    _, sums = Partitioned(text, DEVICES).run([shards(w), shards(x)])
    expected = [each for each in sums if not each.moves]
    with TemporaryDirectory() as scratch:
        run = recorded(Path(scratch), "a", "linear")
    assert run.ranks == DEVICES
    assert len(run.events) == STEPS * len(expected)
    found = {event.first.site for event in run.events}
    assert found == {line(mark) for mark in ("gradient", "loss", "largest", "loop")}
    assert {event.first.operation for event in run.events} == {"all_reduce"}
    ops = [event.first.op for event in run.events]
    assert ops.count("MAX") == STEPS * sum(each.op == "maximum" for each in expected)


def comparing_two_records_names_the_inserted_sum_and_its_line() -> None:
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        plain = recorded(folder, "plain", "linear")
        again = compare(plain, recorded(folder, "again", "linear"))
        assert again.verdict is None, sentences(again)
        everyone = tuple(range(DEVICES))
        # The sums come in the order of the program, the loss's before the gradient's.
        for name, given, kind, marks, ranks in (
            ("order", {"reduction": "reverse"}, "collective", ("loss", "loop"), everyone),
            ("input", {"change": 1.0}, "operands", ("loss", "largest"), (DEVICES - 1,)),
            ("rate", {"rate": 0.25}, "operands", ("loss", "gradient"), everyone),
        ):
            other = recorded(folder, name, **{"reduction": "linear", **given})
            verdict = compare(plain, other).verdict
            assert verdict is not None, name
            assert verdict.a is not None
            assert verdict.kind == kind, verdict
            assert verdict.a.site in {line(mark) for mark in marks}, verdict
            assert verdict.ranks == ranks, verdict
            if kind == "collective":
                assert [verdict.folds[side][0] for side in "ab"] == ["linear", "reverse"]
