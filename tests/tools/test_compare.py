"""Where two runs begin to differ: planted differences, on simulated ranks and against gloo."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

from gpusim import CollectiveMismatchError, Reduction
from gpusim.recording import RecordedGroup
from gpusim.recording.torch_hook import TorchRecording
from gpusim.tools.cli import main
from gpusim.tools.compare import report
from gpusim.tools.compare.comparing import Comparison, compare
from gpusim.tools.compare.pairing import describe
from gpusim.tools.compare.replaying import replay
from gpusim.tools.compare.report import sentences
from gpusim.tools.compare.runs import Call, Run, read
from gpusim.torch.distributed import Recorder, launch
from tests.oracles.machine_time import PATIENCE
from tests.tools import planted

ROOT = Path(__file__).parents[2]
EVERYTHING = range(10_000)


def simulated(folder: Path, name: str, plant: str = "none", reduction: Any = "gloo-ring") -> Run:
    """The record of a simulated run."""
    recorder = Recorder(folder / name, arrays=EVERYTHING)
    run = planted.program
    launch(lambda rank: run(plant), planted.RANKS, recorder=recorder, reduction=reduction)
    return read(folder / name)


@dataclass(frozen=True)
class Planted:
    """A pair of runs, and the verdict that is expected of it."""

    name: str
    kind: str
    mark: str  # of the line in the program
    nth: int = 0  # call of the rank at that line
    rank: int = 0
    plants: tuple[str, str] = ("none", "none")
    reductions: tuple[Any, Any] = ("gloo-ring", "gloo-ring")
    folds: tuple[str, str] | None = None
    differs: tuple[str, ...] = ()
    ranks: tuple[int, ...] = (0, 1, 2, 3)


def fold(
    name: str, a: Any, b: Any, names: tuple[str, str], plant: str = "none", **more: Any
) -> Planted:
    mark = more.pop("mark", "backward")
    return Planted(
        name, "collective", mark, plants=(plant, plant), reductions=(a, b), folds=names, **more
    )


def plant(name: str, kind: str, mark: str, *place: int, **more: Any) -> Planted:
    return Planted(name, kind, mark, *place, plants=("none", name), **more)


def scattered(order: str) -> Any:
    """A chooser that has another order for the reduce-scatter only."""
    return lambda call: order if call.operation == "reduce_scatter" else "gloo-ring"


WIDE = Reduction(accumulate="float64")
#: Differences of the program. DDP reduces one bucket in the first step, two in the others.
PROGRAMS = [
    plant("seed", "operands", "backward", 0, 1, ranks=(1,)),
    plant("split", "other", "exchange", 1, differs=("splits",)),
    plant("missing", "missing", "norm", 1),
    plant("doubled", "additional", "norm", 2),
    # DDP broadcasts the sizes of the new buckets before it uses them.
    plant("bucket", "operands", "forward", ranks=(0,)),
    plant("input-cast", "operands", "backward", 1),
    plant("epsilon", "operands", "backward", 1),
]
PAIRS = [
    fold("linear-tree", "linear", "tree", ("linear", "tree")),
    fold("linear-reverse", "linear", "reverse", ("linear", "reverse")),
    fold("gloo-nccl", "gloo-ring", "nccl-ring", ("gloo-ring", "nccl-ring")),
    fold("ring-tree", "nccl-ring", "nccl-tree", ("nccl-ring", "nccl-tree")),
    fold("mpich", "linear", "mpich", ("linear", "mpich")),
    fold("float64", "linear", WIDE, ("linear", "linear, in float64")),
    fold(
        "bfloat16",
        "linear",
        Reduction(accumulate="bfloat16"),
        ("linear", "linear, in bfloat16"),
        "bfloat16",
    ),
    fold("hops", "linear", "gloo-ring", ("linear", "gloo-ring"), "bfloat16"),
    fold(
        "scatter",
        scattered("linear"),
        scattered("ring"),
        ("linear", "ring"),
        "sharded",
        mark="shards",
        rank=1,
        ranks=(1, 2, 3),
    ),
    *PROGRAMS,
    plant("late-seed", "operands", "backward", 1, 2, ranks=(2,)),
    plant("doubled-line", "additional", "again"),
    plant("metric-cast", "other", "metric", 1, differs=("dtypes",)),
    plant("decay", "operands", "backward", 1),
    plant("cut", "other", "cut", 1, differs=("buckets",)),
]
#: The same against real gloo processes: a fold each, and each difference of the program.
AGAINST_GLOO = [
    fold("gloo-linear", "gloo-ring", "linear", ("gloo-ring", "linear")),
    fold("gloo-nccl", "gloo-ring", "nccl-ring", ("gloo-ring", "nccl-ring")),
    fold("gloo-float64", "gloo-ring", WIDE, ("gloo-ring", "linear, in float64")),
    *PROGRAMS,
]


def line_of(mark: str) -> str:
    """The place of the line of the program with this comment."""
    source = Path(planted.__file__).read_text().splitlines()
    (number,) = [k for k, line in enumerate(source, 1) if line.endswith(f"# {mark}")]
    return f"{planted.__file__}:{number}"


def call_at(run: Run, pair: Planted) -> Call:
    """The call at which the difference was planted."""
    site = line_of(pair.mark)
    calls = [e.calls[pair.rank] for e in run.events if pair.rank in e.calls]
    calls = [call for call in calls if call.site == site]
    return calls[pair.nth]


def check(found: Comparison, pair: Planted) -> None:
    """The verdict is the one that is expected, at the planted place."""
    verdict = found.verdict
    assert verdict is not None
    told = "\n".join(sentences(found))
    assert (verdict.kind, verdict.differs) == (pair.kind, pair.differs), told
    for name, run, call in (("a", found.a, verdict.a), ("b", found.b, verdict.b)):
        lacks = {"missing": "b", "additional": "a"}.get(pair.kind)
        assert call is (None if name == lacks else call_at(run, pair)), told
    if pair.kind in ("operands", "collective"):
        assert verdict.ranks == pair.ranks
        assert verdict.difference is not None
        assert verdict.difference.differing > 0
    check_interval(found, pair)
    if pair.folds is not None:
        for name, expected in zip("ab", pair.folds, strict=True):
            assert expected in (verdict.folds[name] or []), (name, verdict.folds[name])
            assert expected not in (verdict.folds["b" if name == "a" else "a"] or [])


def check_interval(found: Comparison, pair: Planted) -> None:
    """The interval ends at the planted call, and begins at an equal call of the same place."""
    assert found.verdict is not None
    interval = found.verdict.interval
    for name, run in (("a", found.a), ("b", found.b)):
        if name in interval.until:
            assert interval.until[name] is call_at(run, pair)
    if pair.kind == "collective":
        assert interval.kind == "call"
    elif interval.kind == "turn":
        for run, near, call in (
            (found.a, interval.after["a"], interval.until["a"]),
            (found.b, interval.after["b"], interval.until["b"]),
        ):
            assert near.rank == call.rank
            assert near.sequence < call.sequence
            assert near.site == call.site
            assert near in [event.calls.get(near.rank) for event in run.events]
    else:
        assert interval.kind == "until"
        assert interval.after == {}


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_the_planted_place_and_fold_are_found(pair: Planted, tmp_path: Path) -> None:
    a, b = (
        simulated(tmp_path, name, *about)
        for name, *about in zip("ab", pair.plants, pair.reductions, strict=True)
    )
    check(compare(a, b), pair)
    assert compare(a, a).verdict is None


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of real processes: without a difference, and with each of the program's."""
    folder = tmp_path_factory.mktemp("gloo")
    plants = ["none", *(pair.plants[1] for pair in PROGRAMS), *planted.SHARDED]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", "tests.tools.planted", str(folder), *plants]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("pair", AGAINST_GLOO, ids=lambda pair: pair.name)
def test_the_planted_place_is_found_against_gloo(pair: Planted, gloo: Path, tmp_path: Path) -> None:
    real = read(gloo / "none")
    check(compare(real, simulated(tmp_path, "b", pair.plants[1], pair.reductions[1])), pair)


SHARDED = [
    plant("sharded-seed", "operands", "sharded forward", 3, 2, ranks=(2, 3)),
    plant("sharded-table", "operands", "placement", 0, 3, ranks=(3,)),
    plant("sharded-message", "operands", "message", 0, 1, ranks=(1,)),
]


@pytest.mark.slow
@pytest.mark.parametrize("pair", SHARDED, ids=lambda pair: pair.name)
def test_the_planted_place_is_found_in_fsdp_and_tensor_parallel_against_gloo(
    pair: Planted, gloo: Path, tmp_path: Path
) -> None:
    """In functional collectives, FSDP's and messages, on both sides."""
    real, other = gloo / "sharded-none", gloo / pair.plants[1]
    ours = tmp_path / "ours"
    found = compare(read(real), simulated(tmp_path, "ours", "sharded-none"))
    assert found.verdict is None, sentences(found)
    assert {row.operands for row in found.rows} == {0}
    assert all(row.results == 0 or row.operation.startswith("send") for row in found.rows)
    assert {"all_gather", "reduce_scatter", "all_reduce", "send", "recv"} <= {
        event.first.operation for event in found.a.events
    }
    check(compare(read(real), simulated(tmp_path, "planted", pair.plants[1])), pair)
    check(compare(read(ours), read(other)), pair)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["none", *(pair.plants[1] for pair in PROGRAMS)])
def test_gloos_record_is_that_of_its_twin(name: str, gloo: Path, tmp_path: Path) -> None:
    found = compare(read(gloo / name), simulated(tmp_path, "b", name))
    assert found.verdict is None, sentences(found)
    assert all(row.operands == row.results == 0 for row in found.rows)


def test_runs_of_different_numbers_of_calls_are_aligned(tmp_path: Path) -> None:
    """A difference that begins before calls that one run lacks is the first."""

    def steps(rank: int, count: int, wrong: int) -> None:
        dist.init_process_group("gloo")
        for step in range(count):
            x = torch.full((3,), 0.1 * (rank + step + 10 * (step == wrong)))
            for _ in range(2):
                dist.all_reduce(x.clone())

    runs = []
    for name, arguments in (("a", (6, -1)), ("b", (8, 2)), ("c", (8, -1))):
        launch(steps, 3, arguments, recorder=Recorder(tmp_path / name, digests=True))
        runs.append(read(tmp_path / name))
    a, b, c = runs
    first = compare(a, b).verdict
    assert first is not None
    assert first.a is not None
    assert (first.kind, first.a.sequence) == ("operands", 4)
    last = compare(a, c)
    assert last.verdict is not None
    assert last.verdict.b is not None
    assert (last.verdict.kind, last.verdict.b.sequence) == ("end", 12)
    assert "Run a ends" in sentences(last)[0]


def test_a_run_that_failed_is_compared_to_its_end(tmp_path: Path) -> None:
    def program(rank: int, wrong: bool) -> None:
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(2))
        if wrong and rank == 1:
            dist.broadcast(torch.ones(2), 0)
        dist.all_reduce(torch.ones(2))  # last

    launch(program, 3, (False,), recorder=Recorder(tmp_path / "a", digests=True))
    with pytest.raises(CollectiveMismatchError):
        launch(program, 3, (True,), recorder=Recorder(tmp_path / "b", digests=True))
    found = compare(read(tmp_path / "a"), read(tmp_path / "b"))
    assert found.verdict is not None
    assert found.verdict.kind == "other"
    assert "operation" in found.verdict.differs
    assert found.verdict.a is not None
    assert found.verdict.a.number == 1
    assert "A run ended with CollectiveMismatchError" in sentences(found)[-1]


@pytest.fixture(scope="module")
def rings(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("rings")
    simulated(folder, "ring")
    simulated(folder, "tree", reduction="nccl-tree")
    return folder / "ring", folder / "tree"


def expected_figures(a: Run, b: Run, row: Any) -> tuple[int, int, int, float]:
    """Elements, those that differ, the largest ulp and the norm, from the arrays themselves."""
    calls = [run.events[k].calls[0] for run, k in ((a, row.a), (b, row.b))]
    (x,), (y,) = (
        [run.array(t) for t in call.results or ()] for run, call in zip((a, b), calls, strict=True)
    )
    assert x is not None
    assert y is not None
    assert x.dtype == np.float32
    apart = [abs(int(p) - int(q)) for p, q in zip(order(x), order(y), strict=True)]
    norm = float(np.linalg.norm(y.astype(float) - x) / np.linalg.norm(x.astype(float)))
    return x.size, int((x.view("u4") != y.view("u4")).sum()), max(apart), norm


def order(x: Any) -> list[int]:
    """float32 as integers in the same order, neighbours as neighbours."""
    bits = [int(each) for each in x.reshape(-1).view("u4")]
    return [bit if bit < 1 << 31 else (1 << 31) - bit for bit in bits]


def test_every_figure_of_the_page_is_the_datas(rings: tuple[Path, Path], tmp_path: Path) -> None:
    a, b = map(read, rings)
    found = compare(a, b)
    page = report.write(found, tmp_path / "page.html").read_text()
    tables = re.findall(r"<table>.*?</table>", page, re.DOTALL)
    lines = [
        [html.unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", line)]
        for line in re.findall(r"<tr[^>]*>(.*?)</tr>", tables[0], re.DOTALL)[1:]
    ]
    assert [int(line[0]) for line in lines] == list(range(2, len(found.rows)))
    seen = 0
    for number, operation, place, operands, results, kind, elements, *figures in lines:
        largest, median, norm = figures
        row = found.rows[int(number)]
        call = a.events[int(number)].first
        assert operation == describe(call)
        assert call.site.endswith(place)
        for text, name in ((operands, "operands"), (results, "results")):
            unequal = sum(
                getattr(one, name) != getattr(b.events[int(number)].calls[rank], name)
                for rank, one in a.events[int(number)].calls.items()
            )
            assert text == (f"{unequal} ranks differ" if unequal else "equal")  # never 1 here
        assert bool(elements) == (results != "equal")
        assert kind == ("" if row.kind == "equal" else row.kind)
        if elements:
            size, differing, most, ratio = expected_figures(a, b, row)
            assert elements == f"{differing:,} / {size:,}"
            assert norm == f"{ratio:.2g}"
            assert bool(largest) == bool(median) == (row.kind == "rounding")
            if largest:
                assert largest == f"{most:,}"
                assert 1 <= float(median.replace(",", "")) <= most
            seen += 1
    assert seen > 4
    first = next(row for row in found.rows if row.difference is not None)
    size, differing, most, ratio = expected_figures(a, b, first)
    assert f"{differing:,} of {size:,} elements of the results differ, by at most {most:,}" in page
    assert re.search(r'src="(?!data:)|href=|url\(', page) is None  # nothing is loaded
    runs = re.findall(r'<p class="run">(.*?)</p>', page)
    assert all(html.escape(str(r.path)) in line for r, line in zip((a, b), runs, strict=True))
    assert page.index(runs[1]) < page.index("The cause is")  # who they are comes first
    with report.drawn(found) as figure:
        marks = {line.get_label(): line for line in figure.axes[0].get_lines()}
        drawn = {(int(x), float(y)) for x, y in zip(*marks["differs"].get_data(), strict=True)}
    assert drawn == {
        (k, row.difference.relative_norm)
        for k, row in enumerate(found.rows)
        if row.difference is not None
    }
    assert len(drawn) == seen
    assert set(marks) == {"differs", "equal"}
    assert [int(x) for x in marks["equal"].get_xdata()] == [
        k for k, row in enumerate(found.rows) if row.results == 0
    ]


def test_the_command_says_it_in_text_json_and_exit_codes(
    rings: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ring, tree = map(str, rings)
    assert main(["compare", ring, ring]) == 0
    assert capsys.readouterr().out.startswith("The runs are equal: 22 calls")
    page, picture = tmp_path / "page.html", tmp_path / "picture.png"
    assert main(["compare", ring, tree, "--html", str(page), "--picture", str(picture)]) == 1
    assert page.exists()
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert printed.startswith("The cause is all_reduce SUM of float32[1200] at ")
    assert "\na: added as gloo-ring, " in printed
    assert "\nb: added as nccl-tree, " in printed
    assert main(["compare", ring, tree, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["equal"] is False
    assert told["verdict"]["kind"] == "collective"
    assert told["verdict"]["folds"]["a"][0] == "gloo-ring"
    assert [row.get("results") for row in told["rows"]][:4] == [0, 0, 0, 4]
    for words in (["compare", ring], ["compare", ring, tree, "--reduction", "tree"], ["compare"]):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert ended.value.code == 2
    capsys.readouterr()
    assert main(["compare", ring, str(tmp_path)]) == 2
    assert "no record: expected calls.jsonl" in capsys.readouterr().err
    assert main(["compare", ring, str(tmp_path / "gone")]) == 2
    assert (
        capsys.readouterr().err == f"gpusim compare: {tmp_path / 'gone'}: there is no such file\n"
    )
    assert main(["compare", ring, ring, "--picture", str(tmp_path / "a.bmp")]) == 2


def test_a_replay_has_the_results_of_a_run(
    rings: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The first reduction has the same operands in both runs: a replay gives the other's result."""
    ring, tree = rings
    assert main(["compare", "--replay", str(ring), "--reduction", "gloo-ring"]) == 0
    assert main(["compare", "--replay", str(ring), "--reduction", "nccl-tree", "--json"]) == 1
    told = json.loads(capsys.readouterr().out.partition("\n")[2])
    direct = compare(read(ring), read(tree)).record()
    assert told["verdict"]["difference"] == direct["verdict"]["difference"]
    with pytest.raises(SystemExit, match="2"):
        main(["compare", "--replay", str(ring), "--reduction", "butterfly"])


@pytest.mark.parametrize("form", ["tensor", "list", "coalesced", "reduce", "average"])
@pytest.mark.parametrize("reduction", ["gloo-ring", "linear", "ring"])
def test_replays_repeat_every_reduction(form: str, reduction: str, tmp_path: Path) -> None:
    def program(rank: int) -> None:
        dist.init_process_group("gloo")
        draw = torch.Generator().manual_seed(rank)
        x = torch.randn(4, 31, generator=draw)
        if form == "tensor":
            dist.reduce_scatter_tensor(torch.empty(31), x.reshape(-1))
        elif form == "list":
            dist.reduce_scatter(torch.empty(31), list(x))
        elif form == "coalesced":
            with dist._coalescing_manager():
                dist.all_reduce(x)
                dist.all_reduce(x[0].clone())
        elif form == "reduce":
            dist.reduce(x, 2)
        else:
            dist.all_reduce(x, dist.ReduceOp.AVG)

    recorder = Recorder(tmp_path / "a", arrays=EVERYTHING)
    launch(program, 4, recorder=recorder, reduction=reduction)
    run = read(tmp_path / "a")
    assert replay(run, reduction).verdict is None
    changed = replay(run, "reverse").verdict
    assert changed is not None
    assert changed.difference is not None
    assert changed.difference.elements == (124 if form != "coalesced" else 155)


INVARIANT = """
    import sys, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        x = torch.arange(8.0) + step  # exact in any order
        if step == 1 and len(sys.argv) > 1:
            x = torch.randn(1000, generator=torch.Generator().manual_seed(1))
        part = x.chunk(size)[rank].sum().reshape(1)
        dist.all_reduce(part)  # total
"""


def test_invariant_fails_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1 says that results differ."""
    gone, broken = tmp_path / "gone.py", tmp_path / "broken.py"
    broken.write_text("raise SystemExit(3)")
    assert main(["invariant", "--ranks", "1,2", str(gone)]) == 2
    assert capsys.readouterr().err == f"gpusim invariant: {gone}: there is no such file\n"
    assert main(["invariant", "--ranks", "1,2", str(broken)]) == 2
    assert "gpusim invariant: the script failed on 1 rank" in capsys.readouterr().err


def test_without_torch_it_is_said_in_one_line(rings: tuple[Path, Path], tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['torch'] = None; from gpusim.tools.cli import main; "
        "sys.exit(main(sys.argv[1:]))"
    )
    script = tmp_path / "train.py"
    script.write_text("print('runs')")
    for code, needs, words in (
        (2, "simulated ranks need", ["torchrun", str(script)]),
        (2, "simulated ranks need", ["invariant", str(script)]),
        (2, "gpusim.torch needs", ["compare", "--replay", str(rings[0]), "--reduction", "tree"]),
    ):
        command = [sys.executable, "-c", program, *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
        said = f"gpusim {words[0]}: {needs} PyTorch: pip install 'gpusim[torch]'\n"
        assert (done.returncode, done.stdout, done.stderr) == (code, "", said)


@pytest.mark.slow
def test_invariance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(dedent(INVARIANT))
    assert main(["invariant", "--ranks", "1,4", str(script)]) == 0
    assert (
        "The runs are equal: 3 calls have the same bits (1 and 4 ranks)" in capsys.readouterr().out
    )
    words = ["invariant", "--ranks", "1,4", "--arrays", "all", "--keep", str(tmp_path / "kept")]
    assert main([*words, str(script), "rounded"]) == 1
    printed = capsys.readouterr().out
    assert f"differ are those of all_reduce SUM of float32[1] at {script}:10 (call 1 " in printed
    assert "1 of 1 elements of the results differ, by at most" in printed
    assert read(tmp_path / "kept" / "ranks-4").ranks == 4


def every_operation(rank: int) -> None:
    """Each operator that torch dispatches, in a group of one rank."""
    x = torch.arange(4.0)
    dist.all_reduce(x)
    dist.all_reduce(x, dist.ReduceOp.MAX)
    dist.all_reduce(x.bfloat16())
    dist.broadcast(x, 0)
    dist.reduce(x, 0)
    dist.all_gather([torch.empty(4)], x)
    dist.all_gather_into_tensor(torch.empty(4), x)
    dist.reduce_scatter(torch.empty(4), [x])
    dist.reduce_scatter_tensor(torch.empty(4), x)
    dist.gather(x, [torch.empty(4)], 0)
    dist.scatter(torch.empty(4), [x], 0)
    dist.all_to_all_single(torch.empty(4), x)
    dist.all_to_all_single(torch.empty(4), x, [4], [4])
    dist.barrier()
    with dist._coalescing_manager():
        dist.all_reduce(x)
        dist.all_reduce(x[:2])
    world = dist.group.WORLD
    for found in (
        funcol.all_reduce(x, "sum", world),
        funcol.all_gather_tensor(x, 0, world),
        funcol.reduce_scatter_tensor(x, "sum", 0, world),
        funcol.all_to_all_single(x, [4], [4], world),
        funcol.broadcast(x, 0, world),
        *funcol.all_reduce_coalesced([x, x[:3]], "max", world),
    ):
        x = x + found.sum()  # an operator on an AsyncCollectiveTensor


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_hook_writes_what_the_recorder_writes(tmp_path: Path) -> None:
    def simulate(rank: int) -> None:
        dist.init_process_group("gloo")
        every_operation(rank)

    launch(simulate, 1, recorder=Recorder(tmp_path / "ours", arrays=EVERYTHING))
    with pytest.raises(ValueError, match="expected a process group, or RANK and WORLD_SIZE"):
        TorchRecording(tmp_path / "real").__enter__()
    where = f"file://{tmp_path}/meet"
    dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    try:
        with TorchRecording(tmp_path / "real", arrays=EVERYTHING):
            every_operation(0)
            with pytest.warns(RuntimeWarning, match=r"irecv\.default is not recorded"):
                with pytest.raises(RuntimeError, match="not connected"):  # to itself
                    torch.ops._c10d_functional.irecv(torch.ones(2), 0, 0, "0")
    finally:
        dist.destroy_process_group()
    real, ours = read(tmp_path / "real"), read(tmp_path / "ours")
    assert len(real.events) == 21
    assert compare(real, ours).verdict is None
    for one, other in zip(real.events, ours.events, strict=True):
        for name in ("site", "op", "root", "operands", "results", "send_counts"):
            assert getattr(one.first, name) == getattr(other.first, name), name
        assert real.arrays(one.first.results) is not None


def test_a_record_without_an_end_is_named(tmp_path: Path) -> None:
    simulated(tmp_path, "a")
    simulated(tmp_path, "b")
    path = tmp_path / "b" / "calls.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    told = sentences(compare(read(tmp_path / "a"), read(tmp_path / "b")))
    assert told[1:] == ["The record of b has no end: its last calls may lack results."]


def test_records_without_digests_have_no_results(tmp_path: Path) -> None:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, plant in zip(paths, ("none", "missing"), strict=True):
        recorder = Recorder(path)
        launch(lambda rank, plant=plant: planted.train(plant), planted.RANKS, recorder=recorder)
    with pytest.raises(ValueError, match="have no results that can be compared; records in fold"):
        compare(read(paths[0]), read(paths[0]))
    found = compare(*map(read, paths)).verdict
    assert found is not None
    assert found.a is not None
    assert (found.kind, found.a.site) == ("missing", line_of("norm"))


def test_a_folder_has_one_run(tmp_path: Path) -> None:
    """What an earlier run left in a folder is replaced, or is an error."""
    world = RecordedGroup("0", "0", "", (0, 1))

    def write(ranks: int, rank: int | None) -> None:
        recorder = Recorder(tmp_path / "run", digests=True)
        recorder.begin(ranks, rank)
        recorder.add(world, rank or 0, 0, "barrier", [], "train.py:1")
        recorder.end()

    def names() -> list[str]:
        return sorted(path.name for path in (tmp_path / "run").glob("calls*"))

    write(2, None)
    write(2, 0)
    write(2, 1)
    assert names() == ["calls-0.jsonl", "calls-1.jsonl"]
    assert len(read(tmp_path / "run").events[0].calls) == 2
    write(1, 0)
    with pytest.raises(ValueError, match="2 ranks, others 1; record anew"):
        read(tmp_path / "run")
    write(2, None)
    assert names() == ["calls.jsonl"]
