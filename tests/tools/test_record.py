"""gpusim.record: programs in maps, Worlds, PopTorch and torch, with planted differences."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import gpusim
import gpusim.torch as gt
from gpusim import lax, poptorch, popxl
from gpusim.recording import RecordedGroup, digest_of
from gpusim.recording.arrays import raw_bytes
from gpusim.tools.compare.comparing import compare
from gpusim.tools.compare.replaying import replay
from gpusim.tools.compare.report import sentences
from gpusim.tools.compare.runs import Call, Run, read
from gpusim.torch.distributed import Recorder, launch
from tests.oracles.budget import slow
from tests.tools import recorded
from tests.worlds.test_world import start

ROOT = Path(__file__).parents[2]
MODULE = sys.modules[__name__]


@dataclass(frozen=True)
class Planted:
    """A planted difference, and the expected verdict."""

    plant: str
    kind: str
    mark: str
    nth: int = 1
    rank: int = 0
    ranks: tuple[int, ...] = (0, 1, 2, 3)
    orders: tuple[str, str] = ("linear", "linear")
    differs: tuple[str, ...] = ()


PAIRS = [
    Planted("seed", "operands", "backward", rank=2, ranks=(2,)),
    Planted("rate", "operands", "shard", 0),
    Planted("missing", "missing", "norm"),
    Planted("doubled", "additional", "again", 0),
    Planted("cast", "other", "backward", differs=("dtypes",)),
    Planted("root", "other", "broadcast", differs=("root",)),
    Planted("none", "collective", "backward", 0, orders=("linear", "tree")),
    Planted("none", "collective", "backward", 0, orders=("gloo-ring", "nccl-tree")),
]


def line_of(source: Any, mark: str) -> str:
    """The place of the line of a program with this comment."""
    lines = Path(source.__file__).read_text().splitlines()
    (number,) = [k for k, line in enumerate(lines, 1) if line.endswith(f"# {mark}")]
    return f"{source.__file__}:{number}"


def called(run: Run, mark: str, rank: int, nth: int) -> Call:
    site = line_of(recorded, mark)
    calls = [e.calls[rank] for e in run.events if rank in e.calls and e.calls[rank].site == site]
    return calls[nth]


def check(a: Run, b: Run, pair: Planted) -> None:
    found = compare(a, b)
    verdict, told = found.verdict, "\n".join(sentences(found))
    assert verdict is not None
    assert (verdict.kind, verdict.differs) == (pair.kind, pair.differs), told
    lacks = {"missing": "b", "additional": "a"}.get(pair.kind)
    for name, run, call in (("a", a, verdict.a), ("b", b, verdict.b)):
        expected = None if name == lacks else called(run, pair.mark, pair.rank, pair.nth)
        assert call is expected, told
    if pair.kind in ("operands", "collective"):
        assert verdict.ranks == pair.ranks
        assert verdict.difference is not None
        assert verdict.difference.differing > 0
    if pair.kind == "collective":
        for side, order in zip("ab", pair.orders, strict=True):
            assert (verdict.folds[side] or [])[0] == order
            assert verdict.reductions[side] == order


@pytest.mark.parametrize("mapper", [gpusim.vmap, gpusim.pmap], ids=["vmap", "pmap"])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.plant}-{pair.orders[1]}")
def test_the_planted_place_and_fold_are_found(mapper: Any, pair: Planted, tmp_path: Path) -> None:
    for name, plant, order in zip("ab", ("none", pair.plant), pair.orders, strict=True):
        recorded.run(tmp_path / name, mapper, plant, order)
    a, b = read(tmp_path / "a"), read(tmp_path / "b")
    check(a, b, pair)
    assert compare(a, a).verdict is None
    assert replay(a, pair.orders[0]).verdict is None


def test_vmap_and_pmap_have_one_record(tmp_path: Path) -> None:
    """The record of each replica is the same, in lockstep and in threads, on any nesting."""

    def program(x: Any) -> Any:
        total = lax.psum(x, "model")
        mean = lax.pmean({"a": x, "b": x * 2}, ("data", "model"))
        first = lax.psum(x, ("data", 0))  # axis 0 of the array is summed too
        pair = lax.psum(x, "model", axis_index_groups=[[0, 2], [1]])
        shuffled = lax.ppermute(x, "data", [(0, 1)])
        assert lax.psum(1, "model") == 3  # no exchange
        return total, mean["a"], mean["b"], first, pair, shuffled

    x = np.random.default_rng(1).standard_normal((2, 3, 5)).astype(np.float32)
    runs = []
    for number, (outer, inner) in enumerate(
        (one, other) for one in (gpusim.vmap, gpusim.pmap) for other in (gpusim.vmap, gpusim.pmap)
    ):
        with gpusim.record(tmp_path / str(number)):
            outer(inner(program, axis_name="model"), axis_name="data")(x)
        runs.append(read(tmp_path / str(number)))
    first = runs[0]
    assert first.ranks == 6
    groups = [event.ranks for event in first.events]
    everyone, rows, columns = (0, 1, 2, 3, 4, 5), [(0, 1, 2), (3, 4, 5)], [(0, 3), (1, 4), (2, 5)]
    assert groups == [
        *rows, everyone, everyone, *columns, (0, 2), (1,), (3, 5), (4,), *columns
    ]  # fmt: skip
    assert {event.first.operation for event in first.events} == {"all_reduce", "ppermute"}
    for event in first.events[:2]:
        for rank, call in event.calls.items():
            own = np.ascontiguousarray(x.reshape(6, 5)[rank])
            assert call.operands == [("float32", (5,), digest_of(raw_bytes(own)))]
    for other in runs[1:]:
        found = compare(first, other)
        assert found.verdict is None, sentences(found)
        assert all(row.operands == row.results == 0 for row in found.rows)
        assert [event.first.site for event in other.events] == [e.first.site for e in first.events]


@pytest.mark.parametrize(
    ("mapper", "instances"), [("vmap", 2), *slow(("pmap", 2), ("vmap", 4), ("pmap", 3))]
)
def test_instances_write_their_parts_of_one_record(
    mapper: str, instances: int, tmp_path: Path
) -> None:
    pairs = [PAIRS[0], PAIRS[2], PAIRS[6]]
    runs = ["none,linear", *(f"{pair.plant},{pair.orders[1]}" for pair in pairs)]
    done = start(instances, "-m", "tests.tools.recorded", str(tmp_path), mapper, *runs)
    assert done.returncode == 0, done.stderr[-3000:]
    alone = tmp_path / "alone"
    recorded.run(alone, getattr(gpusim, mapper), "none", "linear")
    for name, pair in zip(runs[1:], pairs, strict=True):
        parts = sorted(path.name for path in (tmp_path / name).glob("*.jsonl"))
        assert parts == [f"calls-{instance}.jsonl" for instance in range(instances)]
        check(read(alone), read(tmp_path / name), pair)
    same = tmp_path / runs[0]
    found = compare(read(alone), read(same))
    assert found.verdict is None, sentences(found)
    assert all(row.operands == row.results == 0 for row in found.rows)
    (same / "calls-0.jsonl").unlink()
    with pytest.raises(ValueError, match=f"of {instances - 1} instances, expected {instances}"):
        read(same)


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        return y, poptorch.identity_loss(((y - x.flip(1)) ** 2).mean(), reduction="mean")


def train_poptorch(folder: Path, plant: str, order: str) -> Run:
    """Three steps of four replicas in PopTorch, recorded."""
    options = poptorch.Options()
    options.replicationFactor(4)
    torch.manual_seed(0)
    model = Regression()
    rate = 0.2 if plant == "rate" else 0.1
    optimizer = poptorch.optim.SGD(model.parameters(), lr=rate)
    training = poptorch.trainingModel(model, options, optimizer)
    draws = torch.Generator().manual_seed(1)
    with gpusim.record(folder, arrays=True), gpusim.reduction(order=order):
        for step in range(3):
            x = torch.randn(8, 12, generator=draws)
            if plant == "seed" and step == 1:
                x[4:6] += 1  # the third replica's
            training(x)  # step
    training.destroy()
    return read(folder)


@pytest.mark.parametrize(
    ("plant", "orders", "kind", "nth", "ranks"),
    [
        ("seed", ("linear", "linear"), "operands", 2, (2,)),
        ("rate", ("linear", "linear"), "operands", 2, (0, 1, 2, 3)),
        ("none", ("linear", "tree"), "collective", 0, (0, 1, 2, 3)),
        ("none", ("linear", "linear"), None, 0, ()),
    ],
)
def test_poptorch_is_recorded(
    plant: str, orders: tuple[str, str], kind: str | None, nth: int, ranks: tuple[int, ...],
    tmp_path: Path,
) -> None:  # fmt: skip
    a = train_poptorch(tmp_path / "a", "none", orders[0])
    b = train_poptorch(tmp_path / "b", plant, orders[1])
    site = line_of(MODULE, "step")
    # weight and bias in each of three steps
    assert [event.first.site for event in a.events] == [site] * 6
    assert {event.first.operation for event in a.events} == {"all_reduce"}
    verdict = compare(a, b).verdict
    if kind is None:
        assert verdict is None
        return
    assert verdict is not None
    assert (verdict.kind, verdict.ranks) == (kind, ranks)
    assert verdict.a in a.events[nth].calls.values()
    if kind == "collective":
        for side, order in zip("ab", orders, strict=True):
            assert (verdict.folds[side] or [])[0] == order


def exchange(x: Any, *, of_torch: bool) -> None:
    """The same calls with torch.distributed on ranks, and with gpusim.torch on replicas."""
    scattered = x.reshape(-1)
    if of_torch:
        y = x.clone()
        dist.all_reduce(y)
        dist.all_reduce(y.clone(), dist.ReduceOp.MAX)
        dist.all_gather_into_tensor(torch.empty(16), y.reshape(-1)[:4])
        dist.all_gather(list(torch.empty(4, 4)), y.reshape(-1)[:4])
        dist.all_to_all_single(torch.empty(4), y.reshape(-1)[:4].contiguous())
        dist.broadcast(scattered[:4].clone(), 2)
        dist.reduce_scatter_tensor(torch.empty(25), scattered)
    else:
        y = gt.psum(x, "i")
        gt.pmax(y, "i")
        gt.all_gather(y.reshape(-1)[:4], "i", tiled=True)
        gt.all_gather(y.reshape(-1)[:4], "i")
        gt.all_to_all(y.reshape(-1)[:4], "i", 0, 0, tiled=True)
        gt.pbroadcast(scattered[:4], "i", 2)
        gt.psum_scatter(scattered, "i", tiled=True)


@pytest.mark.parametrize("mapper", [gt.vmap, gt.pmap], ids=["vmap", "pmap"])
@pytest.mark.parametrize("planted", [False, True])
def test_maps_and_torch_distributed_are_compared(
    mapper: Any, planted: bool, tmp_path: Path
) -> None:
    x = torch.randn(4, 10, 10, generator=torch.Generator().manual_seed(3))

    def rank(rank: int) -> None:
        dist.init_process_group("gloo")
        exchange(x[rank], of_torch=True)

    launch(rank, 4, reduction="linear", recorder=Recorder(tmp_path / "a", arrays=range(99)))
    order = "reverse" if planted else "linear"
    with gpusim.record(tmp_path / "b", arrays=True), gpusim.reduction(order=order):
        mapper(lambda x: exchange(x, of_torch=False), axis_name="i")(x)
    a, b = read(tmp_path / "a"), read(tmp_path / "b")
    found = compare(a, b)
    if planted:
        assert found.verdict is not None
        assert (found.verdict.kind, found.verdict.a) == ("collective", a.events[0].first)
        assert [found.verdict.folds[side][0] for side in "ab"] == ["linear", "reverse"]
    else:
        assert found.verdict is None, sentences(found)
        assert [row.results for row in found.rows] == [0] * 7


def test_a_failure_ends_the_record(tmp_path: Path) -> None:
    x = np.ones((2, 3), np.float32)

    def fail(x: Any) -> None:
        lax.psum(x, "i")
        raise KeyError("boom")

    with pytest.raises(KeyError), gpusim.record(tmp_path / "run"):
        gpusim.vmap(fail, axis_name="i")(x)
    run = read(tmp_path / "run")
    assert run.error is not None
    assert "boom" in run.error
    assert [event.complete for event in run.events] == [True]
    with gpusim.record(tmp_path / "run"):  # another one replaces it
        pass
    assert read(tmp_path / "run").events == []


def test_what_record_refuses(tmp_path: Path) -> None:
    with gpusim.record(tmp_path / "a"):
        with pytest.raises(RuntimeError, match=r"inside another gpusim\.record block"):
            with gpusim.record(tmp_path / "b"):
                pass
        gpusim.collectives.psum(np.ones((2, 3)))
    assert len(read(tmp_path / "a").events) == 1
    with pytest.raises(TypeError, match="arrays='all': expected True, False or a range"):
        with gpusim.record(tmp_path / "b", arrays="all"):
            pass
    with pytest.raises(ValueError, match="limit=-1"):
        with gpusim.record(tmp_path / "b", limit=-1):
            pass


def test_a_launch_in_the_block_is_recorded(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(3) * rank)

    x = np.ones((2, 3), np.float32)
    with gpusim.record(tmp_path / "a"):
        launch(program, 3)
        with pytest.raises(RuntimeError, match="has a record already"):
            launch(program, 3)
        with pytest.raises(RuntimeError, match="has a record already"):
            gpusim.vmap(lambda x: lax.psum(x, "i"), axis_name="i")(x)
    launch(program, 3, recorder=Recorder(tmp_path / "b", digests=True))
    found = compare(read(tmp_path / "a"), read(tmp_path / "b"))
    assert found.verdict is None
    assert [row.results for row in found.rows] == [0]


@pytest.mark.own_process  # threads of gloo's may stay until the group is collected
def test_a_real_process_is_recorded_by_the_hook(tmp_path: Path) -> None:
    where = f"file://{tmp_path}/meet"
    with pytest.warns(RuntimeWarning, match="lacks torch.distributed's calls"):
        with gpusim.record(tmp_path / "early"):
            dist.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    try:
        with gpusim.record(tmp_path / "run", arrays=True):
            dist.all_reduce(torch.ones(3))
    finally:
        dist.destroy_process_group()
    run = read(tmp_path / "run")
    assert [event.first.operation for event in run.events] == ["all_reduce"]
    assert run.arrays(run.events[0].first.results) is not None


def test_replicas_and_simulated_ranks_are_refused(tmp_path: Path) -> None:
    def replica(x: Any) -> None:
        with gpusim.record(tmp_path / "run"):
            pass

    def rank(rank: int) -> None:
        dist.init_process_group("gloo")
        replica(None)

    with pytest.raises(gpusim.ReplicaError, match=r"by one replica of pmap; enter gpusim\.record"):
        gpusim.pmap(replica, axis_name="i")(np.ones((2, 3)))
    for processes in (False, True):
        with pytest.raises(gpusim.ReplicaError, match=r"gpusim\.record around the launch"):
            launch(rank, 2, processes=processes)
    assert not (tmp_path / "run").exists()


def test_popxl_is_recorded(tmp_path: Path) -> None:
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        x_stream = popxl.h2d_stream((2,), popxl.float32, "x")
        y_stream = popxl.d2h_stream((2,), popxl.float32, "y")
        total = popxl.ops.collectives.replicated_all_reduce(popxl.ops.host_load(x_stream))
        popxl.ops.host_store(y_stream, total)
    x = np.arange(8.0, dtype=np.float32).reshape(4, 2)
    with gpusim.record(tmp_path / "run", arrays=True), popxl.Session(ir, "ipu_model") as session:
        session.run({x_stream: x})  # session
    run = read(tmp_path / "run")
    assert [event.ranks for event in run.events] == [(0, 1, 2, 3)]
    for rank, call in run.events[0].calls.items():
        assert (call.operation, call.site) == ("all_reduce", line_of(MODULE, "session"))
        np.testing.assert_array_equal(run.arrays(call.operands), [x[rank]])
        np.testing.assert_array_equal(run.arrays(call.results), [x.sum(0)])


def test_a_later_map_may_have_more_replicas(tmp_path: Path) -> None:
    with gpusim.record(tmp_path / "run"):
        for replicas in (2, 5, 3):
            gpusim.vmap(lambda x: lax.psum(x, "i"), axis_name="i")(np.ones((replicas, 3)))
    run = read(tmp_path / "run")
    assert run.ranks == 5
    assert [event.ranks for event in run.events] == [(0, 1), (0, 1, 2, 3, 4), (0, 1, 2)]


def test_record_stays_light() -> None:
    program = (
        "import sys, gpusim\n"
        "assert callable(gpusim.record)\n"
        "heavy = {'torch', 'jax', 'cupy', 'gpusim.recording.recorder'} & {*sys.modules}\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_calls_of_compiled_programs_are_compared_in_any_order(tmp_path: Path) -> None:
    """Two runs of a program whose devices come to calls 0 and 1 in either order."""
    world = RecordedGroup("0", "0", "", (0, 1))

    def write(name: str, orders: list[list[int]], changed: int | None = None) -> Run:
        recorder = Recorder(tmp_path / name, digests=True)
        recorder.begin(2)
        for step, order in enumerate(orders):
            for place in order:
                x = np.full(3, 10 * step + place + 100 * (changed == 10 * step + place), np.float32)
                number = next(numbers[name])
                for rank in (0, 1):
                    made = recorder.add(
                        world, rank, number, "all_reduce", [("float32", (3,), 12)],
                        f"train.py:{place}", [("float32", (3,), x)], op="SUM", program_call=place,
                    )  # fmt: skip
                    recorder.add_results([(rank, made)], [("float32", (3,), 2 * x)])
        recorder.end()
        return read(tmp_path / name)

    numbers = {name: itertools.count() for name in "abc"}
    a = write("a", [[0, 1, 2], [0, 1, 2]])
    b = write("b", [[1, 0, 2], [0, 1, 2]])
    c = write("c", [[0, 1, 2], [1, 0, 2]], changed=11)
    assert compare(a, b).verdict is None
    verdict = compare(b, c).verdict
    assert verdict is not None
    assert verdict.a is not None
    assert (verdict.kind, verdict.a.site, verdict.a.sequence) == ("operands", "train.py:1", 4)
