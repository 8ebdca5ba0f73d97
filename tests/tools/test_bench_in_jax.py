"""The part `jax` of the bench: programs with gpusim's sums beside plain JAX's."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import in_jax, table
from bench.in_jax import COMPILE, INSERTED, PSUM, RUN, Case
from bench.results import InJax, Results
from bench.targets import COMPILED_WITHIN, IN_JAX, judge
from bench.timing import Timing

pytest.importorskip("jax")


def seconds(each: float) -> Timing:
    return Timing(each, each, 3)


def results(cases: list[InJax]) -> Results:
    return Results(
        {"cpu": "a CPU", "cores": 2, "memory_bytes": 2**30, "system": "Linux", "python": "3.12",
         "packages": {}, "commit": "abc"},
        "2026-01-01 00:00 UTC",
        in_jax=cases,
    )  # fmt: skip


def test_sums_and_compilations_are_measured_in_turns_and_the_sums_are_right() -> None:
    cases = [
        Case(RUN, PSUM, 4, "bfloat16", 64, ("linear", "tree")),
        Case(RUN, INSERTED, 4, "float32", 64, ("ring",)),
        Case(COMPILE, INSERTED, 4, reductions=("linear",)),
    ]
    found = [*in_jax.in_jax_cases(0.0, cases)]
    assert [(case.measures, case.program, case.reduction, case.problem) for case in found] == [
        (RUN, PSUM, "linear", None),
        (RUN, PSUM, "tree", None),
        (RUN, INSERTED, "ring", None),
        (COMPILE, INSERTED, "linear", None),
    ]
    for case in found:
        assert case.ours is not None and case.xla is not None and case.cpu_ratio is not None
        assert case.ours.runs and case.xla.runs


@pytest.mark.slow  # each compiles for seconds
@pytest.mark.parametrize("case", in_jax.COMPILATIONS[1:], ids=str)
def test_every_program_is_compiled_with_chosen_sums(case: Case) -> None:
    """A sum that stayed XLA's would be a ReductionWarning, and so a problem."""
    (found,) = in_jax.in_jax_cases(0.0, [case])
    assert (found.problem, found.ours is not None) == (None, True)


def test_what_cannot_be_measured_says_why() -> None:
    cases = [
        Case(RUN, "product", 2, reductions=("tree",)),
        Case(RUN, PSUM, 2, size=8, reductions=("sideways", "tree")),
    ]
    unknown, wrong, right = in_jax.in_jax_cases(0.0, cases)
    assert unknown.problem == "KeyError: 'product'"
    assert wrong.problem is not None and "'sideways': expected an order" in wrong.problem
    assert (right.problem, right.ours is not None) == (None, True)


def test_a_process_that_is_gone_has_no_answer() -> None:
    with in_jax.Process(2) as process:
        process._process.kill()
        process._process.wait()
        with pytest.raises(in_jax.Failure, match="no answer"):
            process.measure(Case(RUN, PSUM, 2), 0.0)


def test_sums_and_compilations_are_judged_by_the_worst_median() -> None:
    def case(measures: str, devices: int, ratio: float) -> InJax:
        slow, fast = Timing(1.0, ratio, 3), Timing(1.0, 1.0, 3)
        return InJax(measures, "x.sum(0)", devices, "float32", 0, "tree", slow, fast)

    def verdicts(cases: list[InJax]) -> list[tuple[float | None, bool | None]]:
        found = [v for v in judge(results(cases)) if v.description.startswith("JAX ")]
        assert len(found) == len(IN_JAX) + 1
        return [(v.ratio, v.met) for v in found]

    assert verdicts([]) == [(None, None)] * 3
    first, second = IN_JAX
    met = [case(RUN, first, 1.25), case(RUN, first, IN_JAX[first]), case(RUN, second, 0.5)]
    missed = case(COMPILE, 8, COMPILED_WITHIN + 0.25)
    assert verdicts([*met, missed]) == [
        (IN_JAX[first], True), (0.5, True), (COMPILED_WITHIN + 0.25, False)
    ]  # fmt: skip


def test_results_survive_their_json_and_have_rows(tmp_path: Path) -> None:
    sums = InJax(RUN, PSUM, 8, "float32", 2**18, "ring", seconds(3e-3), seconds(2e-3), 6e-3, 4e-3)
    made = results([sums, InJax(COMPILE, INSERTED, 8, problem="it broke")])
    path = tmp_path / "results.json"
    made.save(path)
    assert Results.load(path).in_jax == made.in_jax
    (found,) = [t for t in table.tables(made) if t.title.startswith("JAX programs")]
    (row,) = found.rows
    assert row[:4] == ["run psum in shard_map of 256 KiB", "float32", "ring", "8"]
    assert row[4:] == ["1.50", "1.50", "3.00 ms", "2.00 ms", "-"]
    assert found.notes == ("compile x.sum(0) on 8 devices: it broke",)
    assert len(found.headings) == len(row)
