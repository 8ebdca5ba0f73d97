"""Planned calls of ranks that are processes: never stale, and refused if they are unknown."""

from __future__ import annotations

import itertools
import mmap
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpusim import GpusimError
from gpusim.torch.distributed import Recorder, launch
from gpusim.torch.distributed.private import bindings
from gpusim.torch.distributed.runners import child, messages, plans, processes
from tests.torch.children import needs_linux
from tests.torch.distributed_programs import start

SUM, MAX, AVG = dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG
Planned = Counter[int]


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Planned:
    """How often a call was made by each plan."""
    counts: Planned = Counter()
    plan_of = processes.Proxy._plan_of

    def counting(proxy: Any, brief: bytes) -> Any:
        found = plan_of(proxy, brief)
        counts[plans.CALL.unpack(brief)[1]] += 1
        return found

    monkeypatch.setattr(processes.Proxy, "_plan_of", counting)
    return counts


def agree(program: Callable[[int], list[torch.Tensor]], ranks: int) -> None:
    """Ranks as processes have the bits of threads, which plan nothing."""
    both = launch(program, ranks), launch(program, ranks, processes=True)
    for one, other in zip(*both, strict=True):
        assert len(one) == len(other) > 0
        for x, y in zip(one, other, strict=True):
            assert x.dtype == y.dtype and torch.equal(x, y)


# Keys


def options(kind: Any = bindings.AllreduceOptions, **fields: Any) -> Any:
    made = kind()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


DIFFERENT: list[tuple[Any, ...]] = [
    ("allreduce", [torch.ones(3)], options()),
    ("allreduce", [torch.ones(3)], options(reduceOp=dist.ReduceOp(MAX))),
    ("allreduce", [torch.ones(3)], options(asyncOp=False)),
    ("allreduce", [torch.ones(3)]),
    ("allreduce", [torch.ones(3)], MAX),
    ("allreduce", [torch.ones(3)], dist.ReduceOp(MAX)),
    ("allreduce", [torch.ones(4)], options()),
    ("allreduce", [torch.ones(1, 3)], options()),
    ("allreduce", [torch.ones(3, dtype=torch.float64)], options()),
    ("allreduce", [torch.ones(3), torch.ones(3)], options()),
    ("allreduce", (torch.ones(3),), options()),
    ("allreduce_coalesced", [torch.ones(3)], options()),
    ("broadcast", [torch.ones(3)], options(bindings.BroadcastOptions, rootRank=1)),
    ("broadcast", [torch.ones(3)], options(bindings.BroadcastOptions, rootRank=2)),
    ("broadcast", [torch.ones(3)], options(bindings.BroadcastOptions, rootRank=1, rootTensor=1)),
    ("broadcast", [torch.ones(3)], 1),
    ("broadcast", [torch.ones(3)], True),
    ("send", [torch.ones(3)], 1, 0),
    ("send", [torch.ones(3)], 1, 1),
    ("send", [torch.ones(3)], 1),
    ("recv", [torch.ones(3)], 1, 0),
    ("barrier",),
    ("all_to_all_single", torch.ones(3), torch.ones(3), [1, 2], [2, 1]),
    ("all_to_all_single", torch.ones(3), torch.ones(3), [2, 1], [1, 2]),
    ("all_to_all_single", torch.ones(3), torch.ones(3), [], []),
    ("all_to_all_single", torch.ones(3), torch.ones(3), None, None),
]


def test_different_calls_have_different_keys() -> None:
    keys = [plans.key_of(method, args, []) for method, *args in DIFFERENT]
    assert None not in keys
    for (one, left), (other, right) in itertools.combinations(enumerate(keys), 2):
        assert left != right, (DIFFERENT[one], DIFFERENT[other])


def test_keys_of_equal_calls_are_equal_whatever_the_memory() -> None:
    for method, *args in DIFFERENT:
        tensors: list[torch.Tensor] = []
        key = plans.key_of(method, args, tensors)
        again: list[torch.Tensor] = []
        assert plans.key_of(method, args, again) == key
        assert hash(key) == hash(plans.key_of(method, args, []))
        assert len(tensors) == len(again) and all(
            x is y for x, y in zip(tensors, again, strict=True)
        )
    one, other = torch.zeros(8)[2:5], torch.ones(3)
    assert plans.key_of("allreduce", ([one],), []) == plans.key_of("allreduce", ([other],), [])


class Subclass(torch.Tensor):
    pass


class Options(bindings.AllreduceOptions):
    pass


NOT_PLANNED: dict[str, tuple[Any, ...]] = {
    "a transposed tensor": ([torch.ones(2, 3).t()],),
    "a tensor with gaps": ([torch.ones(4, 2)[:, 0]],),
    "an expanded tensor": ([torch.ones(1).expand(3)],),
    "an empty tensor": ([torch.ones(0, 3)],),
    "a conjugate": ([torch.ones(2, dtype=torch.complex64).conj()],),
    "a negative view": ([torch._neg_view(torch.ones(2))],),
    "a sparse tensor": ([torch.eye(2).to_sparse()],),
    "a meta tensor": ([torch.ones(2, device="meta")],),
    "a subclass": ([torch.ones(2).as_subclass(Subclass)],),
    "a factor": ([torch.ones(2)], options(reduceOp=dist._make_nccl_premul_sum(2.0))),
    "options of a program's": ([torch.ones(2)], Options()),
    "a number with a fraction": ([torch.ones(2)], 0.5),
    "an object": ([torch.ones(2)], object()),
}


@pytest.mark.parametrize("args", NOT_PLANNED.values(), ids=NOT_PLANNED)
def test_what_a_key_does_not_tell_is_not_planned(args: tuple[Any, ...]) -> None:
    assert plans.key_of("allreduce", args, []) is None
    assert plans.key_of("monitored_barrier", (), []) is None  # its answer depends on others


# Programs


def changing(rank: int) -> list[torch.Tensor]:
    """One line makes calls that differ in one thing at a time, and come again and again."""
    start()
    pair = dist.new_group([0, 2])
    groups = [dist.group.WORLD] + [pair] * (rank != 1)
    found = []
    for repeat in range(3):
        base = torch.arange(24.0).reshape(4, 6) * (rank + 1) + repeat
        values: list[torch.Tensor] = [
            base.clone(),
            base.double(),
            base.int(),
            base.t().contiguous(),
            base.t(),
            base[:, 1],
            base[1],
            base.reshape(-1)[3:9],
            base.to(torch.complex64),
            torch.empty(0, 2),
        ]
        for value in values:
            for group in groups:
                for op in (SUM, MAX, AVG):
                    x = value.clone(memory_format=torch.preserve_format)
                    if op != SUM and (x.is_complex() or not x.dtype.is_floating_point):
                        continue
                    dist.all_reduce(x, op, group=group)
                    found.append(x)
        for root in (0, 1, 2):
            x = base.clone()
            dist.broadcast(x, root)
            out = base.clone()
            dist.reduce(out, root)
            found += [x, *([out] if rank == root else [])]
    return found


@needs_linux
def test_calls_of_one_line_that_differ(planned: Planned) -> None:
    agree(changing, 3)
    assert len(planned) > 15 and planned.total() > 100


def aliases(rank: int) -> list[torch.Tensor]:
    """Arguments that share memory, or that a call which is under way writes."""
    start()
    found = []
    for repeat in range(4):
        x = torch.arange(6.0) + rank + repeat
        works = [dist.all_reduce(part, async_op=True) for part in (x, x[1:4], x[2:], x)]
        for work in reversed(works):
            work.wait()
        row = torch.zeros(3, 2)
        dist.all_gather_into_tensor(row, row[rank : rank + 1] + rank)
        dist.all_gather_into_tensor(row, row[rank : rank + 1])  # a part of the output
        dist.all_gather([x[0:2], x[2:4], x[4:6]], x[1:3])
        peer, mail = (rank + 1) % 3, torch.empty(2)
        sent = dist.isend(x[:2], peer)
        dist.recv(mail, (rank - 1) % 3)
        sent.wait()
        exchanged = torch.empty(3)
        dist.all_to_all_single(exchanged, row[:, 0].contiguous())
        found += [x, row, mail, exchanged]
    return found


@needs_linux
def test_tensors_that_share_memory(planned: Planned) -> None:
    agree(aliases, 3)
    assert planned.total() > 30


@needs_linux
def test_plans_that_are_too_many_and_segments_that_change(
    planned: Planned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "PLANS", 3)
    monkeypatch.setattr(messages, "SEGMENT", 1 << 12)

    def program(rank: int) -> list[torch.Tensor]:
        start()
        found = []
        for size in (5, 5, 5, 7, 7, 900, 900, 5, 5, 5, 4000, 4000, 5, 5, 7, 7, 3, 3):
            pending = torch.full((11,), float(rank))
            work = dist.all_reduce(pending, async_op=True)
            x = torch.arange(float(size)) * (rank + 1)
            dist.all_reduce(x)
            work.wait()
            found += [x, pending]
        return found

    agree(program, 3)
    assert {0, 1, 2} >= planned.keys() and planned.total() > 30


@needs_linux
def test_records_and_errors_are_those_of_calls_that_are_not_planned(tmp_path: Any) -> None:
    def program(rank: int) -> str:
        start()
        for turn in range(4):
            x = torch.full((3,), rank + 1.0)
            try:
                dist.all_reduce(x, SUM if turn < 3 else dist.ReduceOp.BXOR)
            except RuntimeError as error:
                return str(error)
        return ""

    paths, said = [tmp_path / "threads", tmp_path / "processes"], []
    for path, as_processes in zip(paths, (False, True), strict=True):
        recorder = Recorder(path, digests=True)
        said.append(launch(program, 3, recorder=recorder, processes=as_processes))
    assert said[0] == said[1] and "BXOR" in said[0][0]
    one, other = (
        {each.relative_to(path): each.read_bytes() for each in path.rglob("*") if each.is_file()}
        for path in paths
    )
    assert one == other and len(b"".join(one.values()).splitlines()) > 9


# What the parent refuses


class _Channel:
    shares_memory = True


class _Rank:
    index, site, channel = 3, "", _Channel()


def proxy() -> Any:
    made: Any = object.__new__(processes.Proxy)
    made.rank, made.plans, made.memory = _Rank(), {}, None
    return made


@pytest.mark.parametrize(
    "brief",
    [
        plans.CALL.pack(plans.CALLED, 0, 1, 0),
        plans.CALL.pack(plans.CALLED, 2**32 - 1, 1, 0),
        plans.CALL.pack(plans.ANSWERED, 7, 1, 0),
        plans.CALL.pack(plans.CALLED, 7, 1, 0)[:-1],
        plans.CALL.pack(plans.CALLED, 7, 1, 0) + b"x",
        b"x",
    ],
)
def test_a_call_of_an_unknown_plan_is_refused(brief: bytes) -> None:
    one = proxy()
    one.plans[7] = object()
    with pytest.raises(GpusimError, match=r"rank 3 makes a planned call .* whose plan is unknown"):
        one._plan_of(brief)


def test_memory_beyond_the_segment_is_refused() -> None:
    one = proxy()
    plan = plans.Plan(
        processes.ProxyGroup.__new__(processes.ProxyGroup),
        "a.py:1",
        "allreduce",
        {"tensors": [{"tensor": 0}]},
        [("float32", [3], [1], 64)],
        64,
        True,
        True,
        None,
    )
    with pytest.raises(GpusimError, match="has sent no memory"):
        one._post_planned(plan, 0)
    one.memory = mmap.mmap(-1, 4096)
    for begin in (4096, 4092, 2**63):
        with pytest.raises((ValueError, OverflowError, RuntimeError)):
            one._post_planned(plan, begin)
    assert not plan.calls


@needs_linux
def test_a_plan_needs_a_number_in_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "PLANS", 2)  # of the parent alone

    def program(rank: int) -> list[str]:
        start()
        said = []
        for size in (1, 2, 3):
            try:
                dist.all_reduce(torch.ones(size))
            except GpusimError as error:
                said.append(str(error))
        return said

    (said,) = launch(program, 1, processes=True)
    assert len(said) == 1 and "expected the number of a plan below 2, got 2" in said[0]


def test_brief_answers() -> None:
    for complete, title in (
        ([], ""),
        ([(1, -1)], ""),
        ([(2**40, 3), (5, -1)], "send to rank 3, ä"),
    ):
        content = plans.answered(complete, title)
        assert content[:1] != b"{"
        assert plans.answer_of(content) == (complete, title)
    with pytest.raises(struct.error):
        plans.answer_of(b"\2")
