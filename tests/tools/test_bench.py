"""The bench's own code: what it computes, writes and shows. Nothing here depends on a time."""

from __future__ import annotations

import doctest
import json
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from bench import __main__ as command
from bench import (
    machine,
    memory,
    mpirun,
    picture,
    ranks,
    small,
    start,
    table,
    training,
    worker,
    worlds,
)
from bench import measure as measuring
from bench.cases import (
    COLLECTIVES,
    LARGE,
    SHORT,
    SHORT_SIZES,
    VARIANTS,
    Case,
    RaggedSlices,
    parse_size,
    select,
)
from bench.measure import measure
from bench.overhead import LAUNCH, NUMPY_CALL
from bench.peers import Peer, Unserved, roster
from bench.peers.arithmetic import Arithmetic
from bench.peers.base import Samples
from bench.peers.inputs import stacked
from bench.peers.limit import Limit
from bench.peers.ours import Collectives, Vmap
from bench.peers.remote import NumPyKernels, Worker
from bench.popxl import NOTE
from bench.results import (
    ARITHMETIC,
    LIMIT,
    OURS,
    Entry,
    Exchange,
    Outcome,
    Overhead,
    RanksCase,
    Results,
    SmallCall,
    Start,
    Training,
)
from bench.targets import judge
from bench.timing import Timing, interleave
from gpusim import figures
from gpusim.fallback import kernels
from tests.oracles.machine_time import PATIENCE

TINY = list(select(variants=VARIANTS, sizes=[(4, 16)]))
COPY_BYTES = 2**16


class Stand(Peer):
    """A peer that does as it is told."""

    def __init__(self, name: str, run: Callable[[], float], wrong: float = 0.0) -> None:
        self.name, self._run, self._wrong = name, run, wrong
        self.released = 0

    def prepare(self, case: Case) -> None:
        self.case = case

    def run(self, repeats: int) -> list[float]:
        return [self._run() for _ in range(repeats)]

    def sample(self, replicas: list[int], positions: list[int]) -> Samples:
        expected = self.case.expected() + self._wrong
        return dict(zip(replicas, expected.tolist(), strict=True))

    def release(self) -> None:
        self.released += 1


def fail(error: BaseException) -> Callable[..., float]:
    def run(*given: object) -> float:
        raise error

    return run


def local() -> list[Peer]:
    """The peers of this process."""
    peers = [peer for peer in roster(["numpy"]) if not peer.elsewhere]
    return [*peers, Limit(COPY_BYTES)]


def results(outcomes: list[Outcome]) -> Results:
    machine = {"cpu": "c", "cores": 2, "memory_bytes": 1, "system": "s", "python": "3"}
    return Results(machine | {"packages": {}, "commit": None}, "today", outcomes=outcomes)


def outcome(case: Case, **seconds: float) -> Outcome:
    entries = {name: Entry(name, Timing(s, s, 3)) for name, s in seconds.items()}
    return Outcome(case, entries, 0.0)


@pytest.mark.parametrize("module", ["cases", "timing", "table"])
def test_docstrings_say_what_happens(module: str) -> None:
    assert doctest.testmod(import_module(f"bench.{module}")).failed == 0


# ---------------------------------------------------------------- cases


def test_every_collective_is_measured_in_every_plain_dtype() -> None:
    plain = {name for name, variant in VARIANTS.items() if variant.plain}
    found = {(case.collective, case.variant) for case in TINY}
    assert {(c, v) for c in COLLECTIVES for v in plain} <= found


def test_values_that_cannot_be_cut_for_the_replicas_are_no_case() -> None:
    found = {case.collective for case in select(sizes=[(64, 16)])}
    assert found.isdisjoint({"all_to_all", "psum_scatter", "ragged_all_to_all"})


def test_a_size_that_is_none_is_refused() -> None:
    for text in ("8", "8x", "x8", "0x4", "8x4Gi"):
        with pytest.raises(ValueError, match="is no size"):
            parse_size(text)


def test_a_standard_run_has_each_collective_in_three_dtypes_and_psum_in_all() -> None:
    found = list(select())
    others = {case.variant for case in found if case.collective not in ("psum", SHORT)}
    assert others == {"float32", "float16", "bfloat16"}
    for size in LARGE:
        at_size = [case.variant for case in found if (case.collective, case.size) == ("psum", size)]
        assert at_size == list(VARIANTS)
    short = [(case.variant, case.size) for case in found if case.collective == SHORT]
    assert short == [("float32", size) for size in SHORT_SIZES]
    assert {case.row * 4 for case in found if case.collective == SHORT} == {64}
    named = select(["pmean"], ["float8_e5m2"], [(8, 64)])
    assert [str(case) for case in named] == ["pmean float8_e5m2 8 x 64"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_zeros_are_a_wrong_sum_in_every_format(variant: str) -> None:
    case = Case("psum", variant, 256, 512)
    zeros = np.zeros_like(case.expected())
    assert not measuring.compare(case, zeros, None)[0]


@pytest.mark.parametrize("uneven", [False, True])
def test_ragged_slices_fill_each_receiver_without_gaps(uneven: bool) -> None:
    plan = RaggedSlices.make(5, 3, uneven=uneven)
    for receiver in range(5):
        starts, sizes = plan.output_offsets[:, receiver], plan.sizes[:, receiver]
        assert starts[0] == 0
        np.testing.assert_array_equal(starts[1:], np.cumsum(sizes)[:-1])


def test_float32_sums_are_exact_in_any_order() -> None:
    values = Case("psum", "float32", 4096, 8).values()
    np.testing.assert_array_equal(values.sum(axis=0), values.sum(axis=0, dtype=np.float64))


def test_values_of_some_replicas_are_rows_of_all() -> None:
    case = Case("psum", "bfloat16", 8, 5)
    np.testing.assert_array_equal(case.values(range(3, 6)), case.values()[3:6])


# ---------------------------------------------------------------- measuring


@pytest.mark.parametrize("case", TINY, ids=str)
def test_numpy_and_gpusim_agree_with_the_definition(case: Case) -> None:
    entries = measure(case, local(), 0.0).entries
    for name in (OURS, "gpusim.collectives", "gpusim pmap", "NumPy", LIMIT):
        assert entries[name].problem is None, name
        assert entries[name].timing is not None, name
    assert entries["gpusim.collectives"].agreement == "equal"


@pytest.mark.parametrize("collective", ["all_gather", "pbroadcast", "all_to_all"])
def test_a_view_is_measured_by_the_collectives_and_its_copy_by_the_maps(collective: str) -> None:
    case = Case(collective, "float32", 4, 16)
    (x,) = stacked(case)
    assert np.shares_memory(Collectives().operation(case)(), x)
    assert not np.shares_memory(Vmap().operation(case)(), x)


def test_stochastic_rounding_is_measured_beside_nearest() -> None:
    entries = measure(Case("psum", "float16-sr", 4, 16), local(), 0.0).entries
    assert entries["gpusim, nearest"].timing is not None


def test_copies_of_short_rows_are_measured_alone_and_beside_memcpy() -> None:
    entries = measure(Case(SHORT, "float32", 4, 64), local(), 0.0).entries
    for name in ("gpusim, segments", "memcpy"):
        assert entries[name].agreement == "equal" and entries[name].timing is not None


def test_each_case_and_run_say_which_kernels_ran(tmp_path: Path) -> None:
    for choice in ("numpy", "compiled"):
        with kernels.chosen(choice):
            outcome = measure(TINY[0], [Vmap()], 0.0)
            assert (outcome.kernels, machine.survey()["kernels"]) == (choice, choice)
    made = results([outcome])
    made.save(tmp_path / "r.json")
    assert Results.load(tmp_path / "r.json").outcomes[0].kernels == "compiled"


def test_numpys_kernels_are_measured_beside_compiled_ones() -> None:
    narrow, wide = (Case("psum", variant, 8, 4096) for variant in ("float16", "float32"))
    with kernels.chosen("compiled"):
        peers = [Vmap(), NumPyKernels("gpusim, NumPy kernels")]
        try:
            entry = measure(narrow, peers, 0.0).entries["gpusim, NumPy kernels"]
            assert entry.agreement == "equal" and entry.timing is not None, entry.problem
            assert peers[1]._ask(do="kernels") == ["numpy"]
            entry = measure(wide, peers, 0.0).entries["gpusim, NumPy kernels"]
            assert entry.problem == "gpusim itself runs them"
        finally:
            peers[1].close()
    with kernels.chosen("numpy"), pytest.raises(Unserved, match="itself runs them"):
        NumPyKernels("gpusim, NumPy kernels").prepare(narrow)


@pytest.mark.parametrize("replicas", [8, 16, 32])
@pytest.mark.parametrize("variant", ["float16", "float8_e5m2", "float8_e4m3fn"])
def test_the_arithmetic_is_that_of_the_sum(variant: str, replicas: int) -> None:
    case = Case("psum", variant, replicas, 6144)
    entry = measure(case, [Vmap(), Arithmetic()], 0.0).entries[ARITHMETIC]
    assert entry.agreement == "equal" and entry.timing is not None, entry.problem


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (Case("psum", "float32", 8, 4096), "float16 accumulator"),
        (Case("pmean", "float16", 8, 4096), "float16 accumulator"),
        (Case("psum", "float16", 7, 4096), "multiples of 8 replicas and 2048 elements"),
        (Case("psum", "float16", 8, 4095), "multiples of 8 replicas and 2048 elements"),
    ],
    ids=str,
)
def test_the_arithmetic_of_other_cases_is_not_measured(case: Case, reason: str) -> None:
    with pytest.raises(Unserved, match=reason):
        Arithmetic().prepare(case)


def test_a_peer_that_fails_is_a_row_with_the_reason() -> None:
    broken = Stand("broken", fail(Unserved("it broke")))
    entries = measure(TINY[0], [Vmap(), broken, Stand("fine", lambda: 1.0)], 0.0).entries
    assert entries["broken"] == Entry("broken", problem="it broke")
    assert entries["fine"].timing is not None and entries["fine"].timing.min == 1.0
    assert broken.released == 1


def test_a_wrong_result_has_no_time() -> None:
    entries = measure(TINY[0], [Stand("wrong", lambda: 1.0, wrong=0.5)], 0.0).entries
    assert entries["wrong"].timing is None
    assert (entries["wrong"].problem or "").startswith("wrong result: within")


def test_a_peer_that_needs_too_much_memory_is_not_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measuring.machine, "available_bytes", lambda: 100)
    entry = measure(TINY[0], [Stand("large", fail(AssertionError()))], 0.0).entries["large"]
    assert "would need" in (entry.problem or "")


def test_every_participant_has_its_turns_however_slow_the_others_are() -> None:
    runners = {"slow": Stand("slow", lambda: 5.0), "fast": Stand("fast", lambda: 1e-6)}
    found = interleave(runners, 0.0)
    assert found["slow"] == Timing(5.0, 5.0, 1)  # longer than its share: once
    assert isinstance(found["fast"], Timing) and found["fast"].min == 1e-6


def test_the_limit_is_the_bytes_at_the_speed_of_the_fastest_copy() -> None:
    limit = Limit(COPY_BYTES)
    case = Case("all_gather", "float32", 4, 16)
    timing = measure(case, [limit], 0.0).entries[LIMIT].timing
    assert timing is not None and timing.min == case.moved_bytes / limit.bandwidth
    limit.close()


def test_memory_beyond_the_inputs_is_measured_in_another_process() -> None:
    extra = memory.extra_bytes(Case("psum", "float32", 2, 2**21))
    assert extra is not None and 2**22 < extra < 2**25  # the result has 2**23 bytes
    assert memory.extra_bytes(Case("psum", "float32", 2, 2**10)) is None


# ---------------------------------------------------------------- other processes


class Doomed(Worker):
    def _command(self, path: str) -> list[str]:
        return [sys.executable, "-c", "raise SystemExit('no licence')"]


def test_a_process_that_does_not_start_says_why() -> None:
    with pytest.raises(Unserved, match="does not start: no licence"):
        Doomed("doomed").prepare(TINY[0])


def test_a_worker_answers_every_command_and_every_error_with_a_line() -> None:
    peer = Stand("stand", lambda: 0.25)
    prepare = {"do": "prepare", "case": TINY[0].describe()}
    assert worker.reply(peer, prepare) == {"value": None}
    assert worker.reply(peer, {"do": "run", "repeats": 2}) == {"value": [0.25, 0.25]}
    assert worker.reply(peer, {"do": "dance"}) == {"problem": "ValueError: unknown command 'dance'"}


# ---------------------------------------------------------------- worlds


def test_a_world_is_measured_beside_raw_mpi_and_its_results_are_right() -> None:
    found = list(worlds.exchanges(0.0, [(1, 64), (3, 48)]))
    assert [exchange.problem for exchange in found] == [None] * 12
    orders = ["linear", "reverse", "ring", "tree", "engine", ""]
    assert [exchange.order for exchange in found] == 2 * orders
    assert [exchange.collective for exchange in found[4:6]] == ["psum", "all_to_all"]
    assert [(e.instances, e.held, e.elements) for e in found[5:7]] == [(2, 1, 64), (2, 3, 48)]
    assert all(e.ours and e.raw and e.ours.runs == e.raw.runs == 3 for e in found)
    assert len({e.raw for e in found if e.collective == "psum" and e.held == 1}) == 1


def test_wrong_bits_on_one_instance_are_found_on_all() -> None:
    script = (
        "from bench import world_program as w; import numpy as np; r = w.MPI.COMM_WORLD.rank; "
        "x = np.array([1.0, 1.0 + r * 2**-23], np.float32); one = np.ones(2, np.float32); "
        "assert w.wrong(x, one, bits=True) == 'wrong bits', 'unseen'; "
        "assert w.wrong(x, one, bits=False) is None, 'too strict'; "
        "assert 'further off' in w.wrong(x + r, one, bits=False), 'too lax'"
    )
    start = mpirun.command(2)
    assert start is not None
    done = subprocess.run(
        [*start, sys.executable, "-c", script],
        cwd=worlds.ROOT,
        env=mpirun.environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr


def test_a_world_that_cannot_be_measured_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(worlds.machine, "available_bytes", lambda: 10**6)
        (found,) = worlds.exchanges(0.0, [(4, 10**6)])
        assert (found.problem, found.held, found.elements) == ("not enough memory", 4, 10**6)
    with monkeypatch.context() as patch:
        patch.setattr(worlds.mpirun, "command", lambda processes: None)
        assert [e.problem for e in worlds.exchanges(0.0)] == ["mpirun is not installed"]
    monkeypatch.setattr(worlds.mpirun, "command", lambda processes: [])
    failing = [sys.executable, "-c", "raise ValueError('no luck')"]
    monkeypatch.setattr(worlds, "program", lambda: failing)
    assert [e.problem for e in worlds.exchanges(0.0)] == ["ValueError: no luck"]
    hanging = [sys.executable, "-c", "import time; time.sleep(600)"]
    monkeypatch.setattr(worlds, "program", lambda: hanging)
    assert [e.problem for e in worlds.exchanges(0.0, patience=0.2)] == ["not done in 0.2 s"]


def exchange(order: str, ratio: float, held: int = 1, elements: int = 2**22) -> Exchange:
    ours, raw = Timing(ratio, 2 * ratio, 3), Timing(1.0, 1.0, 3)
    return Exchange("psum", order, 2, held, elements, ours, raw)


def test_worlds_are_judged_by_the_worst_of_their_large_values() -> None:
    found = results([])
    found.exchanges = [
        exchange("engine", 1.05),
        exchange("engine", 3.0, elements=2**10),  # small
        exchange("engine", 1.3, held=4),  # of one replica each the target speaks
        exchange("ring", 1.7),
        exchange("linear", 2.5, held=4),
        Exchange("psum", "reverse", 2, 1, 2**22, problem="wrong bits"),
    ]
    verdicts = {v.description: v for v in judge(found) if "World" in v.description}
    engine, tree, passed_on = verdicts.values()
    assert (engine.ratio, engine.met) == (1.05, True)
    assert (tree.ratio, tree.met) == (None, None)
    assert (passed_on.ratio, passed_on.met) == (2.5, False)
    assert passed_on.basis == "psum linear, 2 instances of 4 x 4 Mi"


def test_what_was_not_measured_of_worlds_is_a_note() -> None:
    found = results([])
    wrong = Exchange("psum", "ring", 2, 1, 2**22, problem="wrong bits")
    found.exchanges = [exchange("tree", 1.25), wrong, worlds.failure("mpirun is not installed")]
    made = table.worlds_table(found)
    assert [row[:5] for row in made.rows] == [["psum", "tree", "2 of 1 x 4 Mi", "1.25", "2.50"]]
    assert made.notes == (
        "psum ring, 2 instances of 1 x 4 Mi: wrong bits",
        "mpirun is not installed",
    )


# ---------------------------------------------------------------- training


def test_all_ways_to_train_take_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    found = list(training.trainings(0.0, [1, 3]))
    assert [(t.replicas, t.problem) for t in found] == [(1, None), (3, None)]
    assert all(t.ours and t.model and t.loop and t.whole for t in found)
    monkeypatch.setattr(training.Looped, "step", lambda self, x, y: None)
    (wrong,) = training.trainings(0.0, [2])
    assert wrong.problem == "loop: other weights after a step" and wrong.ratio() is None


def test_more_replicas_than_a_training_model_may_have_run_in_lockstep(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(training, "IPUS", 2)
    (found,) = training.trainings(0.0, [3])
    assert found.problem is None and found.ours and not found.model


def test_the_number_of_replicas_that_the_target_names_is_judged() -> None:
    found = results([])

    def verdicts() -> list[tuple[float | None, bool | None, str]]:
        named = [v for v in judge(found) if v.description.startswith("a step of training")]
        return [(v.ratio, v.met, v.basis) for v in named]

    assert verdicts() == [(None, None, ""), (None, None, "")]
    times = [Timing(seconds, seconds, 3) for seconds in (1.0, 1.5, 12.0, 0.2)]
    two = [Timing(seconds, seconds, 3) for seconds in (1.0, 1.1, 1.0)]
    found.trainings = [Training(2, 4, *two), Training(8, 4, *two), Training(64, 4, *times)]
    assert verdicts() == [(1.1, True, "trainingModel"), (8.0, True, "trainingModel")]
    found.trainings = [Training(2, 4, two[1], two[0], two[0]), Training(64, 4, *times)]
    assert verdicts()[0] == (1.1, True, "lockstep")
    made = table.trainings_table(found)
    assert made.rows[1] == [
        "64 x 4", "12.0", "0.20", "1.00 s", "1.50 s", "12.0 s", "200 ms", "64"
    ]  # fmt: skip
    slow = Timing(1.6, 1.6, 3)
    found.trainings = [
        Training(2, 4, two[0], slow, two[0]),
        Training(64, 4, times[0], slow, times[2]),
    ]
    assert verdicts() == [(1.6, False, "trainingModel"), (7.5, False, "trainingModel")]


# ---------------------------------------------------------------- simulated ranks


@pytest.mark.slow  # each starts four processes that import torch
@pytest.mark.parametrize("case", ["all_reduce", "ddp", "fsdp2"])
def test_simulated_ranks_take_the_same_step_in_all_participants(case: str) -> None:
    """LocalTensor runs no DDP and no FSDP2; a torch that does so is to be measured then."""
    (found,) = ranks.ranks_cases(0.0, [(case, 3)])
    measured = {"turns", "free", "threaded"} | ({"LocalTensor"} if case == "all_reduce" else set())
    assert set(found.timings) == measured, found.problems
    assert all(timing.runs for timing in found.timings.values())
    assert set(found.problems) == set(ranks.PARTICIPANTS) - measured


def test_a_participant_that_cannot_run_a_case_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "PARTICIPANTS", ("nobody",))
    (found,) = ranks.ranks_cases(0.0, [("all_reduce", 3)])
    assert (found.timings, found.problems) == ({}, {"nobody": "KeyError: 'nobody'"})


def test_ranks_are_judged_by_the_worst_case() -> None:
    def case(name: str, **seconds: float) -> RanksCase:
        return RanksCase(name, 4, {who: Timing(s, s, 3) for who, s in seconds.items()})

    found = results([])
    assert all(v.met is None for v in judge(found) if v.description.startswith("ranks"))
    found.ranks = [
        case("a", turns=3.0, free=2.5, threaded=6.0, LocalTensor=2.0),
        case("b", turns=1.4, free=1.0, threaded=1.75),
    ]
    verdicts = [v for v in judge(found) if v.description.startswith("ranks of torch")]
    assert [(v.ratio, v.met, v.basis) for v in verdicts] == [
        (1.4, True, "b on 4 ranks"),
        (1.25, True, "b on 4 ranks, turns"),
        (2.0 / 3.0, False, "a on 4 ranks, turns"),
    ]
    rows = table.ranks_table(found).rows
    assert rows[1][:4] == ["b on 4 ranks", "1.40", "1.25", "-"]


# ---------------------------------------------------------------- results


def test_results_survive_their_json(tmp_path: Path) -> None:
    made = results([measure(TINY[0], local(), 0.0)])
    made.overheads = [Overhead("vmap, x", 1.5, NUMPY_CALL), Overhead("pmap, x", None, "it broke")]
    made.exchanges = [exchange("tree", 1.25), worlds.failure("mpirun is not installed")]
    made.trainings = [
        Training(2, 4, Timing(1.0, 2.0, 3), None, Timing(1.0, 1.0, 3), Timing(1.0, 1.0, 3)),
        Training(4, 4, problem="it broke"),
    ]
    made.ranks = [RanksCase("ddp", 4, {"turns": Timing(1.0, 2.0, 3)}, {"free": "it broke"}, 0.5)]
    made.starts = [Start("float16", 0.5, 4.0, 0.5, 0.1), Start("", problem="it broke")]
    made.targets = judge(made)
    path = tmp_path / "results.json"
    made.save(path)
    again = Results.load(path)
    again.save(tmp_path / "again.json")
    assert Results.load(tmp_path / "again.json") == again
    assert table.tables(again)[-1].title == "Targets"
    (case,) = json.loads(path.read_text())["cases"]
    assert case["collective"] == TINY[0].collective and set(case["ratios"]["NumPy"]) == {
        "min",
        "median",
    }


def test_results_of_another_version_are_refused() -> None:
    with pytest.raises(ValueError, match="schema 0"):
        Results.of({"schema": 0})


def test_a_target_is_judged_by_its_worst_case() -> None:
    large, many = (Case("psum", "float32", *size) for size in ((8, 2**22), (256, 2**16)))
    found = results(
        [
            outcome(large, **{OURS: 1.0, "JAX shard_map": 3.0, LIMIT: 0.5}),
            outcome(many, **{OURS: 1.0, "JAX shard_map": 1.5, LIMIT: 0.9}),
        ]
    )
    verdicts = {verdict.description: verdict for verdict in judge(found)}
    jax = verdicts["psum float32, than JAX shard_map"]
    assert (jax.ratio, jax.met) == (1.5, False) and "256 x 64 Ki" in jax.basis
    limit = verdicts["psum float32, of the memory limit"]
    assert (limit.ratio, limit.met) == (2.0, False)
    assert verdicts["psum bfloat16, than JAX shard_map"].met is None


@pytest.mark.parametrize("variant", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize(("ratio", "met"), [(1.5, True), (1.6, False)])
def test_narrow_folds_are_judged_by_the_memory_limit(variant: str, ratio: float, met: bool) -> None:
    cases = [Case("psum", variant, *size) for size in LARGE]
    found = results([outcome(cases[0], **{OURS: 1.0, LIMIT: 1.0})])
    found.outcomes.append(outcome(cases[1], **{OURS: ratio, LIMIT: 1.0}))
    verdicts = {verdict.description: verdict for verdict in judge(found)}
    verdict = verdicts[f"psum {variant}, of the memory limit"]
    assert (verdict.ratio, verdict.met) == (ratio, met) and "256 x 64 Ki" in verdict.basis


def test_narrow_folds_may_be_near_their_arithmetic_instead() -> None:
    cases = [Case("psum", "float8_e5m2", *size) for size in LARGE]
    for first, second, met in ((1.6, 1.6, True), (1.5, 1.6, False), (1.6, 1.5, False)):
        found = results([outcome(cases[0], **{OURS: 2.0, LIMIT: 1.0, ARITHMETIC: first})])
        found.outcomes.append(outcome(cases[1], **{OURS: 2.0, LIMIT: 0.9, ARITHMETIC: second}))
        (verdict,) = [v for v in judge(found) if v.description.startswith("psum float8_e5m2, of")]
        assert verdict.met is met and "or 1.3x of the arithmetic" in verdict.target
        assert verdict.ratio == pytest.approx(2.0 if first < second else 2 / 0.9)


@pytest.mark.parametrize("variant", ["float16-sr16", "bfloat16-srb16"])
@pytest.mark.parametrize(("nanoseconds", "met"), [(1.19, True), (1.21, False)])
def test_stochastic_rounding_is_judged_by_nanoseconds_an_element(
    variant: str, nanoseconds: float, met: bool
) -> None:
    cases = [Case("psum", variant, *size) for size in LARGE]
    elements = LARGE[0][0] * LARGE[0][1]
    seconds = [nanoseconds * 1e-9 * elements, 1.0e-9 * LARGE[1][0] * LARGE[1][1]]
    found = results([outcome(c, **{OURS: s}) for c, s in zip(cases, seconds, strict=True)])
    verdicts = {verdict.description: verdict for verdict in judge(found)}
    verdict = verdicts[f"psum {variant}, stochastic rounding at every step"]
    assert verdict.ratio == pytest.approx(nanoseconds) and verdict.met is met
    assert (verdict.target, verdict.basis) == ("≤ 1.2 ns an element", str(cases[0]))


def test_short_rows_are_judged_by_memcpy() -> None:
    times = {OURS: 2.5, "gpusim, segments": 1.9, "memcpy": 1.0, LIMIT: 9.0}
    found = results([outcome(Case(SHORT, "float32", *size), **times) for size in SHORT_SIZES])
    verdicts = [v for v in judge(found) if v.description.endswith("of memcpy")]
    assert [(v.ratio, v.met) for v in verdicts] == [(2.5, False), (pytest.approx(1.9), True)]


def test_first_sums_are_judged_by_the_slowest() -> None:
    def verdicts() -> list[tuple[float | None, bool | None, str]]:
        named = [v for v in judge(found) if v.description.startswith("the first psum")]
        return [(v.ratio, v.met, v.basis) for v in named]

    found = results([])
    found.starts = [Start("", problem="NumPy's kernels run")]
    assert verdicts() == [(None, None, ""), (None, None, "")]
    found.starts += [
        Start("float16", 0.5, 4.0, 9.0, 0.1),
        Start("float16-sr16", 0.5, 1.0, 0.5, 0.2),
    ]
    assert verdicts() == [(4.5, True, "float16"), (0.2, True, "float16-sr16")]
    made = table.starts_table(found)
    assert made.rows[0] == ["float16", "500 ms", "4.00 s", "9.00 s", "100 ms"]
    assert made.notes == (": NumPy's kernels run",)
    found.starts = [Start("float16", 0.5, 4.6, 0.5, 0.31)]
    assert verdicts() == [(5.1, False, "float16"), (0.31, False, "float16")]


@pytest.mark.slow  # it compiles a kernel and starts four processes
def test_the_first_psum_compiles_a_kernel_that_later_processes_find() -> None:
    with kernels.chosen("compiled"):
        (found,) = start.starts(["float16"])
    assert found.problem is None
    assert 0 < found.later < found.cold and found.cold_import > 0 < found.later_import


def test_a_first_psum_without_compiled_kernels_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with kernels.chosen("numpy"):
        (found,) = start.starts()
    assert "pip install" in (found.problem or "")
    monkeypatch.setattr(machine, "kernel_set", lambda: "compiled")
    monkeypatch.setattr(start, "PROGRAM", Path("nowhere.py"))
    (found,) = start.starts(["float16"])
    assert "nowhere.py" in (found.problem or "")


def test_dispatch_is_judged_by_the_costliest_operation() -> None:
    found = results([])
    found.overheads = [Overhead(f"vmap, {us}", us, NUMPY_CALL) for us in (3.0, 11.0, 2.0)]
    found.overheads += [Overhead("popxl, exp", 1.5, NOTE), Overhead("popxl, many", 99.0, "1.01")]
    found.overheads += [Overhead(f"launch, {us}", us, LAUNCH) for us in (7.5, 19.0)]
    found.overheads += [Overhead("launch, psum", 99.0, "a call")]
    verdict, session, launch = judge(found)[-3:]
    assert (launch.ratio, launch.met, launch.basis) == (19.0, True, "launch, 19.0")
    assert (verdict.ratio, verdict.met, verdict.basis) == (11.0, False, "vmap, 11.0")
    assert (session.ratio, session.met, session.basis) == (1.5, True, "popxl, exp")


@pytest.mark.slow
def test_small_calls_are_measured_beside_another_checkout() -> None:
    calls = list(small.small_calls(0.0, small.ROOT))
    assert len(calls) == len(small.CASES)
    for call, (_, beside) in zip(calls, small.CASES.values(), strict=True):
        assert call.problem is None
        assert call.calls and call.calls == call.before  # the same checkout
        assert call.ours and call.old
        if beside is not None:
            assert call.numpy and call.numpy.min > 0


def test_a_checkout_without_gpusim_says_why(tmp_path: Path) -> None:
    (tmp_path / "gpusim.py").write_text("raise RuntimeError('not a checkout')")
    psum, *others = small.small_calls(0.0, tmp_path)
    assert {call.problem for call in (psum, *others)} == {"RuntimeError: not a checkout"}
    assert psum.before == 254


def test_small_calls_are_judged_by_python_calls_and_time() -> None:
    found = results([])
    timing = {
        "ours": Timing(1e-5, 1e-5, 3),
        "old": Timing(3e-5, 3e-5, 3),
        "numpy": Timing(5e-7, 5e-7, 3),
    }
    found.small = [SmallCall("psum of 8", 254, 85, **timing), SmallCall("PopTorch step", 754, 301)]
    verdicts = {v.description: (v.ratio, v.met) for v in judge(found)}
    assert verdicts["Python calls of a small psum"] == (85, True)
    assert verdicts["Python calls of a small PopTorch step"] == (301, False)
    (reduce,) = [v for name, v in verdicts.items() if "np.add.reduce" in name]
    assert reduce == (pytest.approx(20), False)
    assert [v for name, v in verdicts.items() if "(--beside)" in name] == [(pytest.approx(3), True)]
    for ratio, met in ((12.0, True), (12.5, False)):
        found.small = [SmallCall("psum", 254, 110, Timing(ratio, ratio, 3), Timing(1.0, 1.0, 3))]
        (verdict,) = [v for v in judge(found) if v.description.endswith("of np.add.reduce")]
        assert (verdict.ratio, verdict.met) == (ratio, met)
    threads = {"ours": Timing(3e-3, 4e-3, 3), "numpy": Timing(2e-3, 2e-3, 3)}
    for times, met in ((1, True), (2, False)):
        threads["ours"] = Timing(3e-3 * times, 4e-3, 3)
        found.small = [SmallCall("pmap of 64 replicas, five", 9, 9, **threads)]
        (verdict,) = [v for v in judge(found) if "Python loop" in v.description]
        assert (verdict.ratio, verdict.met) == (pytest.approx(1.5 * times), met)
    found.small = []
    assert all(v.met is None for v in judge(found) if "small p" in v.description)


def test_every_row_has_a_cell_for_every_heading() -> None:
    found = results([measure(case, local(), 0.0) for case in TINY[:4]])
    found.exchanges = [exchange("tree", 1.25)]
    found.ranks = [RanksCase("ddp", 4, {"turns": Timing(1.0, 2.0, 3)}, {"free": "it broke"}, 0.5)]
    found.small = [SmallCall("psum", 254, 110, Timing(1.0, 1.0, 1)), SmallCall("x", 1, problem="y")]
    found.targets = judge(found)
    for made in table.tables(found):
        assert {len(row) for row in made.rows} == {len(made.headings)}


def test_tables_print_without_rich(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gpusim.tools.tables.available", lambda name: False)
    table.show(results([outcome(TINY[0], **{OURS: 2e-3, "NumPy": 5e-3})]))
    line = next(row for row in capsys.readouterr().out.splitlines() if row.startswith("psum"))
    assert line.split() == ["psum", "float32", "-", "2.50", "2.00", "ms", "2.00", "ms"]


# ---------------------------------------------------------------- the command


def run_command(path: Path, *arguments: str) -> int:
    options = ("--sizes", "4x16", "--dtypes", "float32", "--budget", "0.001", "--json", str(path))
    return command.main(
        [*options, "--without", "memory,overhead,small,start,worlds,training,ranks,jax", *arguments]
    )


def test_the_command_writes_what_it_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.json"
    assert run_command(path, "--peers", "numpy", "--collectives", "psum,ppermute") == 0
    assert [case["collective"] for case in json.loads(path.read_text())["cases"]] == [
        "psum",
        "ppermute",
    ]
    shown = capsys.readouterr().out
    assert command.main(["--show", str(path)]) == 0
    assert capsys.readouterr().out == shown


def test_ctrl_c_keeps_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Impatient(Stand):
        def prepare(self, case: Case) -> None:
            super().prepare(case)
            if case.collective == "pmax":
                raise KeyboardInterrupt

    monkeypatch.setattr(command, "roster", lambda families: [Impatient(OURS, lambda: 1.0)])
    path = tmp_path / "r.json"
    assert run_command(path) == 130
    found = Results.load(path)
    assert found.interrupted
    assert [outcome.case.collective for outcome in found.outcomes] == ["psum", "pmean"]


def test_worlds_are_a_part_of_the_command_that_can_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def found(budget: float, sizes: object) -> list[Exchange]:
        asked.append(budget)
        return [exchange("tree", 1.25)]

    monkeypatch.setattr(worlds, "exchanges", found)
    path = tmp_path / "r.json"
    for parts, count in (
        ("cases,memory,overhead,small,start,training,ranks,jax", 1),
        ("cases,memory,overhead,small,start,training,ranks,jax,worlds", 0),
    ):
        assert command.main(["--quick", "--json", str(path), "--without", parts]) == 0
        assert len(Results.load(path).exchanges) == count
    assert asked == [1.0]


@pytest.mark.parametrize(
    "arguments",
    [["--collectives", "allreduce"], ["--sizes", "8"], ["--peers", "nccl"], ["--dtypes", "f4"]],
    ids=" ".join,
)
def test_unknown_names_are_refused_with_the_known_ones(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert arguments[1] in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_an_error_before_anything_is_measured(
    tmp_path: Path,
) -> None:
    assert run_command(tmp_path / "nowhere" / "r.json") == 2
    assert run_command(tmp_path / "r.json", "--beside", str(tmp_path)) == 2


# ---------------------------------------------------------------- the picture


def pictured() -> Results:
    """psum in two dtypes and sizes, and an all_gather that has no limit."""
    times = {OURS: 1.5, "gpusim, NumPy kernels": 9.0, "JAX shard_map": 30.0, LIMIT: 1.0}
    found = results(
        [
            outcome(Case("psum", "float16", 8, 2**22), **times),
            outcome(Case("psum", "float16", 8, 2**10), **{OURS: 99.0, LIMIT: 1.0}),
            outcome(Case("psum", "float32", 256, 2**16), **{OURS: 1.25, LIMIT: 1.0}),
            outcome(Case("all_gather", "float32", 8, 2**22), **{OURS: 1.0}),
            outcome(Case("pmax", "float32", 8, 2**22), **times),
        ]
    )
    found.bandwidth = 41e9
    return found


def test_the_picture_has_a_row_for_each_collective_and_dtype(tmp_path: Path) -> None:
    path = tmp_path / "limit.svg"
    with figures.styled({"svg.fonttype": "none"}):  # text stays text
        picture.draw(pictured(), path)
    text = " ".join(ElementTree.parse(path).getroot().itertext())
    assert "psum float16 " in text and "psum float32, 256 x 64 Ki" in text
    assert "pmax float32" in text and "all_gather" not in text
    assert all(label in text for label in ("1.50", "1.25", "41 GB/s", "8 x 4 Mi elements"))
    legend = ("gpusim, NumPy's kernels", "JAX shard_map", picture.LIMITED)
    assert all(label in text for label in legend) and "LocalTensor" not in text
    assert "99.0" not in text  # of each collective and dtype the largest size


def test_a_picture_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        picture.draw(results([outcome(TINY[0], **{OURS: 1.0})]), tmp_path / "x.svg")
    assert not list(tmp_path.iterdir())


def test_results_of_another_run_are_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, path = tmp_path / "r.json", tmp_path / "limit.png"
    pictured().save(source)
    assert command.main(["--show", str(source), "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    results([]).save(source)
    assert command.main(["--show", str(source), "--plot", str(path)]) == 1
    assert "nothing to draw" in capsys.readouterr().err


def test_a_run_draws_what_it_has_measured(tmp_path: Path) -> None:
    path = tmp_path / "limit.svg"
    options = ("--peers", "limit", "--collectives", "psum", "--plot", str(path))
    assert run_command(tmp_path / "r.json", *options) == 0
    assert path.stat().st_size


def test_arguments_are_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "measure", fail(AssertionError()))
    good, json_path = str(tmp_path / "x.svg"), tmp_path / "r.json"

    def refusal(*arguments: str) -> str:
        assert run_command(json_path, *arguments) == 2
        return capsys.readouterr().err

    assert "its folder does not exist" in refusal("--plot", str(tmp_path / "nowhere" / "x.svg"))
    assert "ends in .png or .svg" in refusal("--plot", str(tmp_path / "x.gif"))
    assert "the part cases" in refusal("--plot", good, "--peers", "numpy")
    assert "the part cases" in refusal("--plot", good, "--without", "cases")
    assert "cannot be written" in refusal("--json", str(tmp_path))
    assert "not results" in refusal("--show", str(tmp_path / "missing.json"))
    json_path.write_text("[1]")
    assert "not results" in refusal("--show", str(json_path))
    monkeypatch.setattr(picture, "require", fail(ModuleNotFoundError("no matplotlib")))
    assert "--plot: no matplotlib" in refusal("--plot", good)
