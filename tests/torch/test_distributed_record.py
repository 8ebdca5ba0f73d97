"""The record of a launch: calls, counts and places, in memory and as lines of JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard

from gpusim import CollectiveMismatchError, Reduction, ReplicaError
from gpusim.recording import digest_of
from gpusim.recording.arrays import BLOCK, NANS, raw_bytes, with_one_nan
from gpusim.tools.compare.runs import dtype_of, read
from gpusim.torch.distributed import RecordedCall, Recorder, launch
from tests.oracles.budget import slow
from tests.oracles.machine_time import PATIENCE
from tests.torch.distributed_programs import PROGRAMS, start

THIS = __file__


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def line_of(text: str) -> str:
    """The place of the one line of this file that begins with a text."""
    source = Path(THIS).read_text().splitlines()
    (number,) = [k for k, line in enumerate(source, 1) if line.strip().startswith(text)]
    return f"{THIS}:{number}"


def ddp_steps(rank: int, counted: bool) -> list[int]:
    """Two steps; if asked for, the elements of the buckets, which change after the first."""
    start()
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.002)
    buckets: list[int] = []

    def count(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        buckets.append(bucket.buffer().numel())
        return allreduce_hook(state, bucket)

    count.__annotations__.clear()  # DDP compares them with classes, and these are strings
    if counted:
        ddp.register_comm_hook(None, count)
    for _ in range(2):
        ddp(torch.ones(2, 16)).sum().backward()
    return buckets


@pytest.mark.parametrize(
    ("counted", "line"),
    [(True, "return allreduce_hook(state, bucket)"), (False, "ddp(torch.ones(2, 16))")],
)
def test_ddp_reduces_once_for_each_bucket(counted: bool, line: str) -> None:
    buckets = launch(ddp_steps, 1, (True,))[0]
    assert len(buckets) > 4
    assert sum(buckets) == 2 * 8 * 16 * 17
    recorder = Recorder()
    launch(ddp_steps, 3, (counted,), recorder=recorder, reduction="gloo-ring")
    for rank in range(3):
        made = [c for c in recorder.calls if c.rank == rank and c.operation == "all_reduce"]
        assert [call.shapes for call in made] == [((size,),) for size in buckets]
        assert [call.bytes for call in made] == [4 * size for size in buckets]
        assert {call.site for call in made} == {line_of(line)}
        assert all(call.reduction == "gloo-ring" for call in made)


def test_fsdp2_gathers_and_scatters_each_module() -> None:
    ranks = 4

    def step(rank: int) -> None:
        start()
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        loss = model(torch.ones(2, 8)).sum()  # FSDP2
        loss.backward()

    recorder = Recorder()
    launch(step, ranks, recorder=recorder)
    forward, backward = line_of("loss = model(torch.ones(2, 8))"), line_of("loss.backward()")
    sharded = 8 * 9 * 4 // ranks
    found = {
        (row.site, row.operation): (row.op, row.dtype, row.ranks, row.calls, row.bytes)
        for row in recorder.summary()
    }
    assert found == {
        (forward, "all_gather"): ("", "float32", ranks, 3, 3 * sharded),
        (backward, "all_gather"): ("", "float32", ranks, 3, 3 * sharded),
        (backward, "reduce_scatter"): ("AVG", "float32", ranks, 3, 3 * sharded * ranks),
    }


def every_call(rank: int) -> None:
    size = start()[1]
    x = torch.ones(2, 3)
    pair = dist.new_group([2, 1])
    dist.all_reduce(x, dist.ReduceOp.MAX)
    dist.broadcast(x, 2)
    dist.barrier()
    if rank:
        dist.reduce(x, 2, group=pair)
        dist.send(x[0], 3 - rank, tag=5) if rank == 1 else dist.recv(x[0], tag=5)
    splits = [rank + 1] * size
    sent, received = torch.ones(sum(splits), 2), torch.ones(sum(range(size + 1)), 2)
    dist.all_to_all_single(received, sent, list(range(1, size + 1)), splits)
    with dist._coalescing_manager():
        dist.all_reduce(x)
        dist.all_reduce(x[0])


def test_what_is_recorded_of_a_call() -> None:
    recorder = Recorder()
    launch(every_call, 3, recorder=recorder, reduction=Reduction(accumulate="float64"))
    calls = [call for call in recorder.calls if call.rank == 2]
    assert [call.sequence for call in calls] == list(range(7))
    assert {call.site.rpartition(":")[0] for call in calls} == {THIS}
    one, reduction = ("float32",), "linear accumulate=float64"
    expected = [
        ("0", 0, "all_reduce", one, ((2, 3),), 24, "MAX", reduction, 0, None, None, None),
        ("0", 1, "broadcast", one, ((2, 3),), 24, None, None, None, 2, None, None),
        ("0", 2, "barrier", (), (), 0, None, None, None, None, None, None),
        ("1", 0, "reduce", one, ((2, 3),), 24, "SUM", reduction, 0, 2, None, None),
        ("0", None, "recv", one, ((3,),), 12, None, None, None, None, None, 5),
        ("0", 3, "all_to_all", one, ((9, 2),), 72, None, None, None, None, None, None),
        ("0", 4, "all_reduce", one * 2, ((2, 3), (3,)), 36, "SUM", reduction, 1, None, None, None),
    ]
    found = [
        (*c[2:8], c.op, c.reduction, c.reductions_before, c.root, c.peer, c.tag) for c in calls
    ]
    assert found == expected
    assert [c.peer for c in recorder.calls if c.operation == "send"] == [2]


@pytest.mark.parametrize("name", ["ddp", "groups", "messages"])
def test_lines_are_the_same_in_every_run(name: str, tmp_path: Path) -> None:
    contents = []
    for _ in range(3):
        path = tmp_path / "calls.jsonl"
        launch(lambda rank: PROGRAMS[name](seed=0), 3, recorder=Recorder(path))
        contents.append(path.read_bytes())
    assert contents[0] == contents[1] == contents[2]
    assert contents[0].count(b"\n") > 10


def test_free_threads_record_the_same_calls() -> None:
    def by_rank(schedule: str) -> list[RecordedCall]:
        recorder = Recorder()
        launch(lambda rank: PROGRAMS["ddp"](seed=0), 4, recorder=recorder, schedule=schedule)
        return sorted(recorder.calls, key=lambda call: (call.rank, call.sequence))

    assert by_rank("free") == by_rank("turns")


def test_lines_have_what_memory_has(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    recorder = Recorder(path, keep=4)
    launch(every_call, 3, recorder=recorder)
    first, *middle, last = lines_of(path)
    assert first == {
        "kind": "launch",
        "format": 3,
        "gpusim": first["gpusim"],
        "ranks": 3,
        "schedule": "turns",
        "torch": torch.__version__,
    }
    calls = [line for line in middle if line.pop("kind") == "call"]
    groups = {line["group"]: line for line in middle if line not in calls}
    assert groups["1"]["ranks"] == [1, 2]
    assert groups["0"]["ranks"] == [0, 1, 2]
    assert groups["0"]["description"] == "default_pg"
    assert last == {"kind": "end", "calls": len(calls)}
    assert len(recorder.calls) == 4
    kept = [{k: v for k, v in c._asdict().items() if v is not None} for c in recorder.calls]
    assert json.loads(json.dumps(kept)) == calls[-4:]
    totals = {(row.site, row.operation, row.op, row.dtype): row for row in recorder.summary()}
    for key, row in totals.items():
        each: dict[int, list[int]] = {}
        for c in calls:
            if (c["site"], c["operation"], c.get("op", ""), ", ".join(set(c["dtypes"]))) == key:
                each.setdefault(c["rank"], []).append(c["bytes"])
        most = (max(map(len, each.values())), max(map(sum, each.values())))
        assert (row.ranks, row.calls, row.bytes) == (len(each), *most)
    assert sum(row.calls * row.ranks for row in totals.values()) == len(calls)


def test_groups_of_one_name_have_labels_of_their_own(tmp_path: Path) -> None:
    def program(rank: int) -> None:
        for _ in range(2):
            start()
            dist.barrier()
            dist.destroy_process_group()

    path = tmp_path / "calls.jsonl"
    launch(program, 2, recorder=Recorder(path))
    groups = [line for line in lines_of(path) if line["kind"] == "group"]
    assert len({line["group"] for line in groups}) == len(groups) == 2


def disagree(rank: int) -> None:
    start()
    dist.barrier()
    if rank:
        dist.broadcast(torch.ones(2), 0)  # wrong
    dist.all_reduce(torch.ones(2))


def fail(rank: int) -> None:
    start()
    dist.barrier()
    if rank:
        raise ValueError("bad")
    dist.all_reduce(torch.ones(2))


@pytest.mark.parametrize("program", [disagree, fail])
def test_lines_are_there_after_an_error(program: Any, tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    with pytest.raises((CollectiveMismatchError, ReplicaError)) as caught:
        launch(program, 2, recorder=Recorder(path))
    *calls, last = lines_of(path)
    name, _, message = last["error"].partition(": ")
    assert (name, message) == (type(caught.value).__name__, str(caught.value))
    operations = [line["operation"] for line in calls if line["kind"] == "call"]
    assert operations == ["barrier"] * 2 + ["broadcast", "all_reduce"] * (program is disagree)
    if program is disagree:
        wrong = [line for line in calls if line.get("operation") == "broadcast"]
        assert [line["site"] for line in wrong] == [line_of("dist.broadcast(torch.ones(2), 0)")]


KILLED_LAUNCH = """
    import torch, torch.distributed as dist
    from gpusim.torch.distributed import Recorder, launch

    def program(rank):
        dist.init_process_group()
        for step in range(50):
            dist.all_reduce(torch.ones(3))
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    launch(program, 2, recorder=Recorder(sys.argv[1]))
"""
KILLED_RECORDER = """
    from gpusim.recording import RecordedGroup, Recorder

    recorder, world = Recorder(sys.argv[1]), RecordedGroup("0", "0", "", (0, 1))
    recorder.begin(2)
    for number in range(50):
        for rank in (0, 1):
            recorder.add(world, rank, number, "all_reduce", [("float32", (3,), 12)], "train.py:1")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("text", [KILLED_RECORDER, *slow(KILLED_LAUNCH)], ids=["alone", "launch"])
def test_lines_are_whole_after_a_kill(text: str, tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    text = f"import os, signal, sys\n{dedent(text)}"
    done = subprocess.run([sys.executable, "-c", text, path], timeout=PATIENCE, env=os.environ)
    assert done.returncode == -signal.SIGKILL
    assert path.read_bytes().endswith(b"\n")
    assert [line["kind"] for line in lines_of(path)] == ["launch", "group"] + ["call"] * 100


def test_a_full_disk_ends_the_record_and_not_the_launch() -> None:
    recorder = Recorder("/dev/full")
    with pytest.warns(RuntimeWarning, match="the record /dev/full ends"):
        launch(disagree_not, 2, recorder=recorder)
    assert len(recorder.calls) == 2


def disagree_not(rank: int) -> None:
    start()
    dist.all_reduce(torch.ones(2))


def test_a_recorder_holds_the_last_launch(tmp_path: Path) -> None:
    seen: list[RecordedCall] = []
    recorder = Recorder(tmp_path / "calls.jsonl", each=seen.append)
    launch(lambda rank: PROGRAMS["local_sgd"](seed=0), 2, recorder=recorder)
    count = len(seen)
    launch(disagree_not, 2, recorder=recorder)
    assert seen[count:] == list(recorder.calls)
    assert [row.calls for row in recorder.summary()] == [1]
    assert len(lines_of(tmp_path / "calls.jsonl")) == 5


def test_the_path_is_that_of_the_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    recorder = Recorder("calls.jsonl")
    monkeypatch.chdir("/")
    launch(disagree_not, 2, recorder=recorder)
    assert len(lines_of(tmp_path / "calls.jsonl")) == 5


def test_recorder_arguments(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"launch: recorder='calls\.jsonl': expected"):
        launch(disagree_not, 2, recorder="calls.jsonl")
    with pytest.raises(ValueError, match="keep=-1: expected a number of calls from 0"):
        Recorder(keep=-1)
    with pytest.raises(FileNotFoundError):
        launch(disagree_not, 2, recorder=Recorder(tmp_path / "none" / "calls.jsonl"))
    assert launch(lambda rank: rank, 2) == [0, 1]


def digested(rank: int) -> None:
    """Each kind of call, on values that differ between ranks."""
    size = start()[1]
    x = torch.arange(6.0).reshape(2, 3).t() + rank  # not contiguous
    dist.all_reduce(x)
    dist.broadcast(y := torch.full((3,), float(rank)), 1)
    row = [torch.empty(3, 2) for _ in range(size)]
    dist.all_gather(row, x.contiguous())
    dist.reduce(y.bfloat16(), 2)
    dist.scatter(y, [torch.full((3,), 7.0 + r) for r in range(size)] if rank == 0 else None, 0)
    dist.gather(y, [torch.empty(3) for _ in range(size)] if rank == 1 else None, 1)
    if rank < 2:
        dist.send(y, 1) if rank == 0 else dist.recv(y, 0)


def test_operands_and_results_are_those_of_the_tensors(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    launch(digested, 3, recorder=Recorder(folder, arrays=range(100)))
    run = read(folder)
    calls = {(c.operation, c.rank): c for event in run.events for c in event.calls.values()}

    def values(operation: str, rank: int, name: str) -> list[Any]:
        found = run.arrays(getattr(calls[operation, rank], name))
        assert found is not None
        return [(str(x.dtype), x.astype(float).tolist()) for x in found]

    grid = [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    total = [[3 * x + 3 for x in row] for row in grid]
    for rank in range(3):
        plus = [[x + rank for x in row] for row in grid]
        assert values("all_reduce", rank, "operands") == [("float32", plus)]
        assert values("all_reduce", rank, "results") == [("float32", total)]
        assert values("all_gather", rank, "operands") == [("float32", total)]
        assert values("all_gather", rank, "results") == [("float32", total)] * 3
        ones = [("float32", [1.0] * 3)]
        assert values("broadcast", rank, "operands") == (ones if rank == 1 else [])
        assert values("broadcast", rank, "results") == ones
        assert values("reduce", rank, "operands") == [("bfloat16", [1.0] * 3)]
        assert values("reduce", rank, "results") == [("bfloat16", [3.0] * 3)] * (rank == 2)
        sevens = [("float32", [7.0 + r] * 3) for r in range(3)]
        assert values("scatter", rank, "operands") == (sevens if rank == 0 else [])
        assert values("scatter", rank, "results") == [sevens[rank]]
        assert values("gather", rank, "operands") == [sevens[rank]]
        assert values("gather", rank, "results") == (sevens if rank == 1 else [])
    assert values("send", 0, "operands") == values("recv", 1, "results") == [sevens[0]]
    assert calls["recv", 1].operands == []


def test_a_digest_is_its_definition() -> None:
    for size in range(9):
        data = bytes(range(200, 200 + size))
        words = [int.from_bytes(data[k : k + 4], "little") for k in range(0, size, 4)]
        expected = f"{zlib.crc32(data):08x}{sum(words) % 2**32:08x}"
        assert digest_of(np.frombuffer(data, np.uint8)) == expected


@pytest.mark.parametrize("dtype", NANS)
def test_all_nans_have_one_digest(dtype: str) -> None:
    """Whichever NaN it is, and of a complex number whichever part; infinities keep theirs."""
    word, largest, nan = NANS[dtype]
    sign = 1 << (8 * np.dtype(word).itemsize - 1)
    codes = np.array([nan, largest + 1, sign - 1, nan + sign, 2 * sign - 1], word)
    numbers = np.array([0, sign, largest, largest + sign, 1], word)

    def digest(values: Any) -> str:
        return digest_of(with_one_nan(raw_bytes(values), dtype))

    arrays = [np.tile(numbers, BLOCK) for _ in codes]  # longer than a block
    for array, code in zip(arrays, codes, strict=True):
        array[[1, BLOCK + 1, -1]] = code
    before = [array.copy() for array in arrays]
    assert {digest(array) for array in arrays} == {digest_of(raw_bytes(arrays[0]))}
    np.testing.assert_array_equal(arrays, before)
    assert digest(numbers) == digest_of(raw_bytes(numbers))
    if not dtype.startswith("complex"):
        with np.errstate(invalid="ignore"):
            assert np.isnan(codes.view(dtype_of(dtype))).all()
            assert not np.isnan(numbers.view(dtype_of(dtype))).any()
        assert nan == np.full(2, np.nan).astype(dtype_of(dtype)).view(word)[0]


def reduce_random(rank: int, steps: int) -> None:
    start()
    draw = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        dist.all_reduce(torch.randn(1000, generator=draw))


def test_a_window_of_calls_and_a_limit(tmp_path: Path) -> None:
    def kept(**options: Any) -> list[int]:
        folder = tmp_path / "run"
        launch(reduce_random, 2, (20,), recorder=Recorder(folder, **options))
        size = sum(path.stat().st_size for path in (folder / "arrays").glob("*"))
        assert size <= options.get("limit", size)
        run = read(folder)
        assert len(run.events) == 20
        assert all(call.results for event in run.events for call in event.calls.values())
        return [
            event.index
            for event in run.events
            if all(run.arrays(c.operands) and run.arrays(c.results) for c in event.calls.values())
        ]

    assert kept(arrays=range(100)) == list(range(20))
    assert kept(arrays=range(5, 8)) == [5, 6, 7]
    newest = kept(arrays=range(100), limit=60_000)
    assert 2 <= len(newest) < 10
    assert newest == list(range(20 - len(newest), 20))
    with pytest.warns(RuntimeWarning, match="exceed the limit of 100 and are not kept"):
        assert kept(arrays=range(100), limit=100) == []
    launch(reduce_random, 2, (1,), recorder=Recorder(tmp_path / "run", digests=True))
    assert list((tmp_path / "run" / "arrays").iterdir()) == []  # those of the run before


def test_what_a_kill_leaves_of_a_folder_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    launch(reduce_random, 2, (5,), recorder=Recorder(folder, arrays=range(100), limit=200_000))
    whole = (folder / "calls.jsonl").read_bytes()
    counts = set()
    for length in range(len(whole) - 200, len(whole)):
        (folder / "calls.jsonl").write_bytes(whole[:length])
        run = read(folder)
        assert not run.ended
        counts.add(len(run.events))
    assert counts == {5}
    (folder / "calls.jsonl").write_bytes(whole[:300] + b"\n" + whole[300:])
    with pytest.raises(ValueError, match=r"calls\.jsonl:[23]: not a line of a record"):
        read(folder)


def test_readers_ignore_what_they_do_not_know(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    launch(reduce_random, 2, (3,), recorder=Recorder(folder, digests=True))
    path = folder / "calls.jsonl"
    lines = [{**line, "colour": "blue"} for line in lines_of(path)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in [*lines, {"kind": "note"}]))
    assert len(read(folder).events) == 3


def test_digests_need_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="digests and arrays need a path"):
        Recorder(digests=True)
    with pytest.raises(ValueError, match="limit=-1: expected a number of bytes from 0"):
        Recorder(tmp_path, digests=True, limit=-1)
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        launch(disagree_not, 2, recorder=Recorder(tmp_path / "file", digests=True))


@pytest.mark.parametrize(
    ("error", "said"), [(KeyboardInterrupt(), "KeyboardInterrupt"), (OSError("x"), "OSError: x")]
)
def test_the_last_line_names_the_error(error: BaseException, said: str, tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "calls.jsonl")
    recorder.begin(1)
    recorder.end(error)
    last = (tmp_path / "calls.jsonl").read_text().splitlines()[-1]
    assert json.loads(last) == {"kind": "end", "calls": 0, "error": said}
