"""The check of a launch: its arguments, its findings, and how they are shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from gpusim.errors import GpusimError, ReplicaError
from gpusim.torch.distributed import launch
from gpusim.torch.distributed.checks import ENGINES, KINDS, Check, CheckError, Finding, as_check
from gpusim.torch.distributed.checks import findings as of_findings
from gpusim.torch.distributed.checks.arguments import given_of, replaced
from gpusim.torch.distributed.checks.completions import (
    completion_of,
    first_difference,
    turns_of,
)
from gpusim.torch.distributed.checks.findings import merged, ranks_in_words, shown
from gpusim.torch.distributed.checks.log import Log, read
from gpusim.torch.distributed.checks.results import Results
from tests.check.right_calls import drawn, reduced
from tests.check.small import BOTH, needs_linux

pytestmark = needs_linux


def right(rank: int) -> float:
    dist.init_process_group()
    x = drawn(rank, 3)
    dist.all_reduce(x)
    return float(x.sum())


def wrong(rank: int) -> Tensor:
    dist.init_process_group()
    x = drawn(rank, 4, 2).t()
    dist.all_reduce(x)
    return x


def both_wrong(rank: int) -> float:
    """Wrong on rank 1 alone, in two ways."""
    dist.init_process_group()
    work = reduced(x := drawn(rank, 3))
    total = float(x.sum()) if rank == 1 else 0.0
    work.wait()
    total += float(x.sum())
    if rank == 1:
        dist.isend(x, 0)
    else:
        dist.recv(x, 1)
        total += float(x.sum())
    return total


# ---------------------------------------------------------------- launch


@BOTH
def test_findings_are_raised_after_a_good_end(processes: bool) -> None:
    with pytest.raises(CheckError) as raised:
        launch(wrong, 3, check="nccl", processes=processes)
    [finding] = raised.value.findings
    assert (finding.kind, finding.ranks) == ("not-contiguous", [0, 1, 2])
    text = str(raised.value)
    assert text.startswith("check: 1 finding, by the rules of nccl\nnot-contiguous at ")
    assert "ranks 0 to 2\n" in text and "  cure: call contiguous()" in text
    assert isinstance(raised.value, GpusimError)


@BOTH
def test_a_check_that_is_given_keeps_them_and_raises_nothing(processes: bool) -> None:
    check = Check("nccl")
    assert len(launch(wrong, 2, check=check, processes=processes)) == 2
    assert [each.kind for each in check.findings] == ["not-contiguous"]
    assert launch(right, 2, check=check) == launch(right, 2)
    assert check.findings == [] and str(check) == "check: no findings, by the rules of nccl"


@BOTH
def test_each_finding_has_its_own_ranks(processes: bool) -> None:
    check = Check()
    launch(both_wrong, 3 - 1, check=check, processes=processes)
    assert [(each.kind, each.ranks) for each in check.findings] == [
        ("read-before-wait", [1]),
        ("never-waited", [1]),
    ]


@pytest.mark.parametrize("check", [False, True, "nccl", "gloo"])
@BOTH
def test_right_programs_return_what_they_return(check: bool | str, processes: bool) -> None:
    for ranks in (1, 2, 5):
        assert launch(right, ranks, check=check, processes=processes) == launch(right, ranks)


@BOTH
def test_an_error_of_a_rank_is_raised_and_findings_are_kept(processes: bool) -> None:
    def run(rank: int) -> None:
        wrong(rank)
        if rank:
            raise ValueError("stop")

    check = Check("nccl")
    with pytest.raises(ReplicaError, match="stop"):
        launch(run, 2, check=check, processes=processes)
    assert [each.kind for each in check.findings] == ["not-contiguous"]
    with pytest.raises(ReplicaError, match="stop"):
        launch(run, 2, check="nccl", processes=processes)


@BOTH
def test_ranks_that_exit_are_checked(processes: bool) -> None:
    def run(rank: int) -> None:
        wrong(rank).sum()
        raise SystemExit(0)

    check = Check("nccl")
    assert launch(run, 2, check=check, processes=processes) == [None, None]
    assert [each.ranks for each in check.findings] == [[0, 1]]


def test_a_rank_that_is_killed_has_no_log() -> None:
    def run(rank: int) -> None:
        wrong(rank)
        dist.barrier()
        if rank == 1:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGKILL)

    check = Check("nccl")
    with pytest.raises(ReplicaError):
        launch(run, 2, check=check, processes=True)
    assert all(each.ranks == [0] for each in check.findings)


def test_values_that_check_does_not_take() -> None:
    for value in ("mpi", "NCCL", "True"):
        with pytest.raises(ValueError, match=f"check='{value}': expected True, 'nccl' or 'gloo'"):
            launch(right, 2, check=value)
    for value in (None, 1, 0, ["nccl"], Check):
        with pytest.raises(TypeError, match="expected True, False, 'nccl', 'gloo' or a Check"):
            launch(right, 2, check=value)
    given = Check("gloo")
    assert as_check(given) is given and as_check(True).engine == ""
    assert set(ENGINES) == {"nccl", "gloo"}


def test_programs_without_a_process_group() -> None:
    assert launch(lambda rank: rank, 2, check=True) == [0, 1]


def test_several_groups_and_groups_made_anew() -> None:
    def run(rank: int) -> float:
        total = 0.0
        for backend in ("gloo", "nccl", None):
            dist.init_process_group(backend)
            pair = dist.new_group([0, 2])
            x = drawn(rank, 3)
            if rank != 1:
                dist.all_reduce(x, group=pair)
            work = reduced(x)
            work.wait()
            total += float(x.sum())
            dist.destroy_process_group()
        return total

    assert launch(run, 3, check=True) == launch(run, 3)


def test_the_caller_may_check_in_a_launch_of_free_ranks() -> None:
    assert launch(right, 4, check=True, schedule="free") == launch(right, 4)


# ---------------------------------------------------------------- findings


def finding(kind: str = "never-waited", site: str = "a.py:1", **more: Any) -> Finding:
    return Finding(kind, site, more.pop("ranks", [0]), more.pop("text", "text"), **more)


def test_findings_of_one_place_are_one() -> None:
    found = merged(
        [
            finding(ranks=[2], seen=3, related=["b.py:1: x"]),
            finding(ranks=[0, 1], seen=5, related=["b.py:1: x", "c.py:2: y"]),
            finding(site="a.py:2"),
            finding(call="send"),
            finding("read-before-wait", "z.py:9"),
        ]
    )
    assert [(each.kind, each.site, each.call) for each in found] == [
        ("read-before-wait", "z.py:9", ""),
        ("never-waited", "a.py:1", ""),
        ("never-waited", "a.py:1", "send"),
        ("never-waited", "a.py:2", ""),
    ]
    one = found[1]
    assert (one.ranks, one.seen, one.related) == ([0, 1, 2], 5, ["b.py:1: x", "c.py:2: y"])


def test_merging_leaves_its_arguments() -> None:
    one, other = finding(ranks=[0]), finding(ranks=[1])
    merged([one, other])
    assert (one.ranks, other.ranks) == ([0], [1])


def test_json_has_the_fields_of_the_page() -> None:
    row = json.loads(json.dumps(finding().as_json()))
    names = "kind site ranks call text related seen cluster cure source"
    assert list(row) == names.split()
    for kind in KINDS:
        assert finding(kind).as_json()["cluster"] == KINDS[kind].cluster


def test_every_kind_says_what_a_cluster_does_and_the_cure() -> None:
    for kind, about in KINDS.items():
        assert kind == kind.lower() and all(about), kind
        assert not any(text.endswith(".") or text[0] == " " for text in about), kind


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([0], "rank 0"),
        ([0, 1], "ranks 0, 1"),
        ([0, 1, 2], "ranks 0 to 2"),
        ([5, 0, 2, 1, 7, 8], "ranks 0 to 2, 5, 7, 8"),
    ],
)
def test_ranks_in_words(ranks: list[int], words: str) -> None:
    assert ranks_in_words(ranks) == words


def test_the_report_as_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    assert shown([], "") == "check: no findings"
    assert shown([], "gloo") == "check: no findings, by the rules of gloo"
    two = [finding(seen=4, related=["b.py:2: posted"]), finding(site="a.py:3", ranks=[0, 1])]
    lines = shown(two, "nccl").splitlines()
    assert lines[0] == "check: 2 findings, by the rules of nccl"
    assert lines[1:4] == [
        "never-waited at a.py:1, rank 0, 4 times",
        "  text",
        "  see b.py:2: posted",
    ]
    assert lines[4].startswith("  on a cluster: ") and lines[5].startswith("  cure: ")
    monkeypatch.chdir(tmp_path)
    assert "at train.py:3," in shown([finding(site=f"{tmp_path}/train.py:3")], "")
    assert of_findings.KINDS is KINDS


def test_logs_come_back_from_their_files(tmp_path: Any) -> None:
    logs = [Log(1, 2, "nccl", {"0": [0, 1]}, [["done", 3]], [finding()], {"x": [1]}, "Error")]
    logs.append(Log(0, 2))
    for each in logs:
        each.write(tmp_path)
    assert read(tmp_path) == [logs[1], logs[0]]


def test_the_log_of_a_rank_that_was_ended_as_it_wrote_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    write = Path.write_text

    def half(path: Path, text: str, *rest: Any, **named: Any) -> int:
        write(path, text[: len(text) // 2], *rest, **named)
        raise Killed

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(Killed):
        Log(0, 1).write(tmp_path)
    assert read(tmp_path) == []


# ---------------------------------------------------------------- arguments


def given(call: Any) -> list[tuple[str, list[int], list[int], bool, Any]]:
    """The arguments of the calls of rank 1 of 3, by the sizes of what they write and read."""

    def run(rank: int) -> list[Any]:
        dist.init_process_group()
        found: list[Any] = []
        inside: list[str] = []
        group: Any = dist.group.WORLD
        kind = type(group)
        methods = {
            name: method
            for name in dir(kind)
            if hasattr(method := getattr(kind, name), "post") and not name.startswith("__")
        }
        for name, method in methods.items():

            def note(
                self: Any, *args: Any, name: str = name, method: Any = method, **named: Any
            ) -> Any:
                if inside:  # of a method that calls others
                    return method(self, *args, **named)
                one = given_of(self, name, method.post, args, named)
                sizes = [[x.numel() for x in each] for each in (one.written, one.only_read)]
                found.append([one.operation, *sizes, one.reads_written, one.root, one.peer, one.op])
                inside.append(name)
                try:
                    return method(self, *args, **named)
                finally:
                    inside.clear()

            group.__dict__[name] = note.__get__(group)
        call(rank)
        return found

    return launch(run, 3)[1]


def test_what_calls_read_and_write() -> None:
    def tensors(*sizes: int) -> list[Tensor]:
        return [torch.ones(each) for each in sizes]

    def call(rank: int) -> None:
        one, two = tensors(2, 6)
        dist.all_reduce(one, dist.ReduceOp.MAX)
        dist.broadcast(one, 1)
        dist.broadcast(one, 0)
        dist.reduce(one, 1)
        dist.reduce(one, 2)
        dist.all_gather(tensors(2, 2, 2), one)
        dist.all_gather_into_tensor(two, one)
        dist.reduce_scatter_tensor(one, two)
        dist.reduce_scatter(one, tensors(2, 2, 2))
        dist.all_to_all_single(two, two.clone(), [2, 2, 2], [2, 2, 2])
        dist.gather(one, tensors(2, 2, 2) if rank == 0 else None, 0)
        dist.scatter(one, tensors(2, 2, 2) if rank == 1 else None, 1)
        if rank == 1:
            dist.send(one, 2)
        elif rank == 2:
            dist.recv(one, 1)

    assert given(call) == [
        ["all_reduce", [2], [], True, None, None, "MAX"],
        ["broadcast", [], [2], False, 1, None, ""],
        ["broadcast", [2], [], False, 0, None, ""],
        ["reduce", [2], [], True, 1, None, "SUM"],
        ["reduce", [], [2], True, 2, None, "SUM"],
        ["all_gather", [2, 2, 2], [2], False, None, None, ""],
        ["all_gather_into_tensor", [6], [2], False, None, None, ""],
        ["reduce_scatter_tensor", [2], [6], False, None, None, "SUM"],
        ["reduce_scatter", [2], [2, 2, 2], False, None, None, "SUM"],
        ["all_to_all_single", [6], [6], False, None, None, ""],
        ["gather", [], [2], False, 0, None, ""],
        ["scatter", [2], [2, 2, 2], False, 1, None, ""],
        ["send", [], [2], False, None, 2, ""],
    ]


def test_tensors_are_replaced_in_lists() -> None:
    one, two, other = torch.ones(1), torch.ones(2), torch.ones(3)
    found = replaced([[one, two], one, 7, None], {id(one): other})
    assert found[0][0] is other and found[0][1] is two and found[1] is other
    assert found[2:] == [7, None]


# ---------------------------------------------------------------- orders


def test_completions_are_as_late_as_the_wait_or_as_early_as_the_call() -> None:
    late, early = completion_of(None, 0), completion_of(0, 0)
    assert [late() for _ in range(9)] == [False] * 9 and [early() for _ in range(9)] == [True] * 9


def test_a_number_repeats_its_order() -> None:
    def drawn_by(order: int, rank: int) -> list[bool]:
        completion = completion_of(order, rank)
        return [completion() for _ in range(64)]

    assert drawn_by(3, 1) == drawn_by(3, 1)
    assert len({tuple(drawn_by(order, rank)) for order in (1, 2) for rank in (0, 1)}) == 4
    assert turns_of(0) is None
    one, other = turns_of(4), turns_of(4)
    assert one is not None and other is not None
    numbers = [one(5) for _ in range(64)]
    assert numbers == [other(5) for _ in range(64)] and {*numbers} == {*range(5)}


def test_the_first_call_with_other_values() -> None:
    row = ["a.py:1", "all_reduce", "00"]
    assert first_difference({0: [row, row], 1: [row]}, {0: [row, row], 1: [row]}) == {}
    other = [*row[:2], "01"]
    assert first_difference({0: [row, row]}, {0: [row, other]}) == {0: (1, "a.py:1", "all_reduce")}
    assert first_difference({0: [row]}, {0: [["b.py:2", "send", "00"]]}) == {
        0: (0, "b.py:2", "send")
    }
    assert first_difference({0: [row, row]}, {0: [row]}) == {} == first_difference({0: [row]}, {})


@BOTH
def test_orders_change_turns_and_nothing_else(processes: bool) -> None:
    """Who comes first to a message from any rank is drawn; the rest has the same bits."""

    def run(rank: int) -> list[float]:
        dist.init_process_group()
        x = drawn(rank, 3)
        first = torch.tensor([float(rank)])
        if rank:
            dist.send(first, 0)
        else:
            came = []
            for _ in range(dist.get_world_size() - 1):
                dist.recv(first)
                came.append(first.item())
            first[0] = came[0]
        reduced(x).wait()
        return [float(x.sum()), first.item()]

    found = {}
    for order in (None, 0, 1, 2, 3, 4, 5):
        check = Check(order=order, keeps_values=True)
        found[order] = launch(run, 4, check=check, processes=processes)
        again = Check(order=order, keeps_values=True)
        assert launch(run, 4, check=again, processes=processes) == found[order]
        assert check.values == again.values and len(check.values) == 4
    assert len({repr([row[0] for row in each]) for each in found.values()}) == 1
    assert found[None] == found[0] and len({each[0][1] for each in found.values()}) > 1


@BOTH
def test_a_part_that_fails_leaves_the_program_alone(
    processes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is told, without a finding."""

    def fail(*args: Any) -> None:
        raise ZeroDivisionError("part")

    monkeypatch.setattr(Results, "see_operands", fail)
    check = Check()
    assert launch(right, 2, check=check, processes=processes) == launch(right, 2)
    assert not check.findings and len(check.gave_up) == 2
    assert "check: gave up a part: rank 0: " in str(check)
    assert "ZeroDivisionError: part (test_session.py:" in str(check)
