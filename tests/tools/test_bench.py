"""The bench's own code: what it computes, writes and shows. Nothing here depends on a time."""

from __future__ import annotations

import doctest
import json
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from bench import __main__ as command
from bench import measure as measuring
from bench import memory, mpirun, ranks, small, table, training, worker, worlds
from bench.cases import COLLECTIVES, VARIANTS, Case, RaggedSlices, parse_size, select
from bench.measure import measure
from bench.overhead import LAUNCH, NUMPY_CALL
from bench.peers import Peer, Unserved, roster
from bench.peers.base import Samples
from bench.peers.limit import Limit
from bench.peers.ours import Vmap
from bench.peers.remote import Worker
from bench.popxl import NOTE
from bench.results import (
    LIMIT,
    OURS,
    Entry,
    Exchange,
    Outcome,
    Overhead,
    RanksCase,
    Results,
    SmallCall,
    Training,
)
from bench.targets import judge
from bench.timing import Timing, interleave
from tests.oracles.budget import slow
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


def fail(error: BaseException) -> Callable[[], float]:
    def run() -> float:
        raise error

    return run


def local() -> list[Peer]:
    peers = roster(["numpy"])
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


def test_a_view_is_also_measured_copied() -> None:
    entries = measure(Case("all_gather", "float32", 4, 16), local(), 0.0).entries
    assert entries["gpusim, copied"].timing is not None


def test_stochastic_rounding_is_measured_beside_nearest() -> None:
    entries = measure(Case("psum", "float16-sr", 4, 16), local(), 0.0).entries
    assert entries["gpusim, nearest"].timing is not None


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
    assert judge(found)[-3].met is None
    times = [Timing(seconds, seconds, 3) for seconds in (1.0, 1.5, 6.0, 0.2)]
    found.trainings = [Training(2, 4, times[2], *times[1:]), Training(64, 4, *times)]
    (verdict,) = (v for v in judge(found) if v.description.startswith("a step of training"))
    assert (verdict.ratio, verdict.met) == (6.0, True)
    made = table.trainings_table(found)
    assert made.rows[1] == [
        "64 x 4", "6.00", "0.20", "1.00 s", "1.50 s", "6.00 s", "200 ms", "64"
    ]  # fmt: skip


# ---------------------------------------------------------------- simulated ranks


@pytest.mark.parametrize("case", ["all_reduce", *slow("ddp", "fsdp2")])
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
    psum, threads, meeting, step = small.small_calls(0.0, small.ROOT)
    for call in (psum, threads, meeting, step):
        assert call.problem is None
        assert call.calls and call.calls == call.before  # the same checkout
        assert call.ours and call.old
    for call in (psum, threads, meeting):
        assert call.numpy and call.ours and call.numpy.min < call.ours.min


def test_a_checkout_without_gpusim_says_why(tmp_path: Path) -> None:
    (tmp_path / "gpusim.py").write_text("raise RuntimeError('not a checkout')")
    psum, *others = small.small_calls(0.0, tmp_path)
    assert {call.problem for call in (psum, *others)} == {"RuntimeError: not a checkout"}
    assert psum.before == 254


def test_small_calls_are_judged_by_python_calls_and_time() -> None:
    found = results([])
    timing = {"ours": Timing(1e-5, 1e-5, 3), "old": Timing(3e-5, 3e-5, 3)}
    found.small = [SmallCall("psum of 8", 254, 110, **timing), SmallCall("PopTorch step", 754, 401)]
    verdicts = {v.description: (v.ratio, v.met) for v in judge(found)}
    assert verdicts["Python calls of a small psum"] == (110, True)
    assert verdicts["Python calls of a small PopTorch step"] == (401, False)
    assert [v for name, v in verdicts.items() if "(--beside)" in name] == [(pytest.approx(3), True)]
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
    monkeypatch.setattr(table, "find_spec", lambda name: None)
    table.show(results([outcome(TINY[0], **{OURS: 2e-3, "NumPy": 5e-3})]))
    line = next(row for row in capsys.readouterr().out.splitlines() if row.startswith("psum"))
    assert line.split() == ["psum", "float32", "-", "2.50", "2.00", "ms", "2.00", "ms"]


# ---------------------------------------------------------------- the command


def run_command(path: Path, *arguments: str) -> int:
    options = ("--sizes", "4x16", "--dtypes", "float32", "--budget", "0.001", "--json", str(path))
    return command.main(
        [*options, "--without", "memory,overhead,small,worlds,training,ranks", *arguments]
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
        ("cases,memory,overhead,small,training,ranks", 1),
        ("cases,memory,overhead,small,training,ranks,worlds", 0),
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
