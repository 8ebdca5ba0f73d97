"""The bench: its cases, how it measures, other processes. Nothing here depends on a time."""

from __future__ import annotations

import doctest
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from bench import (
    machine,
    memory,
    mpirun,
    ranks,
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
from bench.peers import Unserved
from bench.peers.arithmetic import Arithmetic
from bench.peers.inputs import stacked
from bench.peers.limit import Limit
from bench.peers.ours import Collectives, Vmap
from bench.peers.remote import NumPyKernels, Worker
from bench.results import (
    ARITHMETIC,
    LIMIT,
    OURS,
    Entry,
    Exchange,
    RanksCase,
    Results,
    Training,
)
from bench.targets import judge
from bench.timing import Timing, interleave
from gpusim.fallback import kernels
from tests.oracles.machine_time import PATIENCE
from tests.tools.bench_parts import COPY_BYTES, TINY, Stand, exchange, fail, local, results


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
