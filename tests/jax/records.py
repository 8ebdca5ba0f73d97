"""Records of JAX programs, compared with each other and with those of maps."""

from __future__ import annotations

import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

import gpusim.jax
from gpusim import Reduction
from gpusim.tools.compare.comparing import compare
from gpusim.tools.compare.report import sentences
from gpusim.tools.compare.runs import Run, read
from tests.collectives.test_ragged_all_to_all import random_program
from tests.jax.devices import DEVICES, mapped


def trained(x: Any, lax: Any, tanh: Any, plant: str) -> Any:
    """Sums of one replica, some of which need nothing of each other, by jax.lax or gpusim.lax."""
    w = x[0]
    for step in range(2):
        now = plant if step == 1 else "none"
        total = lax.psum(x[0] * w, "i")  # total
        part = lax.psum_scatter(x[1] * w, "i", tiled=True)  # part
        largest = lax.pmax(x[2] * w, "i")  # largest
        mean = lax.pmean(tanh(total) + largest + part.sum(), "i")  # mean
        if now == "missing":
            mean = tanh(total) + largest + part.sum()
        w = w - mean * x.dtype.type(0.1 if now != "rate" else 0.2)
    return lax.psum(w, "i")  # last


def line(mark: str) -> str:
    """The place of the line of this file with the comment."""
    for number, text in enumerate(Path(__file__).read_text().splitlines(), 1):
        if text.endswith(f"  # {mark}"):
            return f"{__file__}:{number}"
    raise AssertionError(mark)


def recorded(folder: Path, name: str, plant: str = "none", order: str = "linear") -> Run:
    """The record of the program in JAX, where four runs are in flight."""
    x = np.random.default_rng(5).normal(size=(DEVICES, 3, 8 * DEVICES)).astype(np.float32)
    if plant == "seed":
        x[DEVICES - 1, 1] += 1
    function = mapped(lambda x: trained(x, lax, jnp.tanh, plant))
    with gpusim.jax.installed(Reduction(order=order)), gpusim.record(folder / name, arrays=True):
        for _ in range(4):
            function(x)
    return read(folder / name)


def records_find_what_is_planted() -> None:
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        plain = recorded(folder, "plain")
        assert plain.ranks == DEVICES
        assert len(plain.events) == 4 * 9
        again = compare(plain, recorded(folder, "again"))
        assert again.verdict is None, sentences(again)
        assert all(row.operands == row.results == 0 for row in again.rows)
        everyone = tuple(range(DEVICES))
        for plant, order, kind, mark, ranks in (
            ("seed", "linear", "operands", "part", (DEVICES - 1,)),
            ("rate", "linear", "operands", "last", everyone),
            ("missing", "linear", "missing", "mean", ()),
            ("none", "ring", "collective", "total", None),
        ):
            found = compare(plain, recorded(folder, f"{plant}-{order}", plant, order)).verdict
            assert found is not None
            assert found.a is not None
            sites = {line(mark)}
            if kind == "collective":
                # XLA may run the sum that needs nothing of the first one before it, in both runs.
                sites.add(line("part"))
                assert (found.folds["a"] or [])[0] == "linear"
                assert (found.folds["b"] or [])[0] == "ring"
            else:
                assert found.ranks == ranks, found
            assert found.kind == kind and found.a.site in sites, found


def records_of_maps_and_of_jax_are_compared() -> None:
    x = np.random.default_rng(6).normal(size=(DEVICES, 40)).astype(np.float32)

    def calls(x: Any, lax: Any) -> Any:
        return lax.psum(x, "i") + lax.pmean(x, "i") + lax.psum(x * x, "i", axis_index_groups=halves)

    halves = [[*range(0, DEVICES, 2)], [*range(1, DEVICES, 2)]]
    with TemporaryDirectory() as scratch:
        a, b = Path(scratch) / "a", Path(scratch) / "b"
        order = Reduction(order="nccl-tree")
        with gpusim.jax.installed(order), gpusim.record(a):
            mapped(lambda x: calls(x, lax))(x)
        with gpusim.reduction(order="nccl-tree"), gpusim.record(b):
            gpusim.vmap(lambda x: calls(x, gpusim.lax), axis_name="i")(x)
        one, other = read(a), read(b)
        sums = [[e for e in run.events if len(e.ranks) < DEVICES] for run in (one, other)]
        for run, halved in zip((one, other), sums, strict=True):  # XLA may reorder them
            run.events = sorted(run.events, key=lambda e: (e.first.op, len(e.ranks), e.ranks))
            assert len(halved) == 2
            for k, event in enumerate(run.events):
                event.index = k
                for call in event.calls.values():
                    call.program_call = None
        found = compare(one, other)
        assert found.verdict is None, sentences(found)
        assert [row.results for row in found.rows] == [0] * 4


def ragged_calls_are_recorded() -> None:
    def call(*arguments: Any) -> Any:
        return lax.ragged_all_to_all(*arguments, axis_name="i")  # ragged

    plan = random_program(np.random.default_rng(8), DEVICES, None, row=(3,))
    with TemporaryDirectory() as scratch:
        runs = []
        for name, change in (("a", 0), ("b", 1)):
            folder = Path(scratch) / name
            given = dict(plan.arguments, operand=np.array(plan.arguments["operand"]))
            given["operand"][-1, 0] += change
            with gpusim.jax.installed(), gpusim.record(folder):
                mapped(call)(*given.values())
            runs.append(read(folder))
        (event,) = runs[0].events
        assert event.first.operation == "ragged_all_to_all"
        assert event.first.site == line("ragged")
        assert len(event.first.operands or ()) == 6
        verdict = compare(*runs).verdict
        assert verdict is not None
        assert (verdict.kind, verdict.ranks) == ("operands", (DEVICES - 1,))


def plain_jax_writes_the_record_of_the_docs() -> None:
    """The pages' writer, in a JAX without gpusim, against the record of JAX with gpusim."""
    page = (Path(__file__).parents[2] / "docs" / "losses-differ.md").read_text()
    (writer,) = re.findall(r"```python\n(import json, zlib\n.*?)```", page, re.DOTALL)
    (program,) = re.findall(r'title="plain_jax.py"}\n(.*?)```', page, re.DOTALL)
    with TemporaryDirectory() as scratch:
        os.chdir(scratch)
        exec(compile(writer + program, "plain_jax.py", "exec"), {"__name__": "docs"})
        with gpusim.jax.installed(Reduction(order="xla-cpu")), gpusim.record("ours"):
            again = program.replace('"jax"', '"again"')
            exec(compile(writer + again, "plain_jax.py", "exec"), {"__name__": "docs"})
        found = compare(read(Path("jax")), read(Path("ours")))
        assert found.verdict is None, sentences(found)
        assert [row.results for row in found.rows] == [0] * 4
        os.chdir("/")
