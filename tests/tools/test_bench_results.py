"""Results of the bench: files, targets, tables, the command and the picture."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench import __main__ as command
from bench import (
    machine,
    picture,
    small,
    start,
    table,
    worlds,
)
from bench.cases import (
    LARGE,
    SHORT,
    SHORT_SIZES,
    Case,
)
from bench.measure import measure
from bench.overhead import LAUNCH, NUMPY_CALL
from bench.popxl import NOTE
from bench.results import (
    ARITHMETIC,
    LIMIT,
    OURS,
    Exchange,
    Overhead,
    RanksCase,
    Results,
    SmallCall,
    Start,
    Training,
)
from bench.targets import judge
from bench.timing import Timing
from gpusim import figures
from gpusim.fallback import kernels
from tests.tools.bench_parts import TINY, Stand, exchange, fail, local, outcome, results

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
