"""The order of calls: cycles, messages, calls that ranks do not make, groups that some make."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpusim.errors import GpusimError
from gpusim.torch.distributed import launch
from gpusim.torch.distributed.checks import Check
from gpusim.torch.distributed.checks.cycles import Leg, cycles
from gpusim.torch.distributed.checks.findings import Finding, merged
from gpusim.torch.distributed.checks.log import Log
from gpusim.torch.distributed.checks.order import analyse

OWN = (
    "communicator-order",
    "group-made-by-some",
    "host-sync-in-cycle",
    "send-order",
    "uneven-calls",
)
STALL = "no rank can go on: rank 0 waits"


class Logs:
    """Logs that are made by hand: `log(rank, "a0 b0 !a0")` posts calls, and completes one.

    A word is the label of a group and the number of its call, `a0~` one that is waited for at once;
    `!a0` says that it is complete, `s1` sends to rank 1, `r1` receives from it, and `host` waits.
    """

    def __init__(self, groups: dict[str, list[int]], size: int, engine: str = "nccl") -> None:
        self.groups, self.engine = groups, engine
        self.logs = [Log(rank, size, engine, groups={}) for rank in range(size)]

    def log(self, rank: int, text: str, ended: str = "", **about: Any) -> Logs:
        log = self.logs[rank]
        ids: dict[str, int] = {}
        for number, word in enumerate(text.split()):
            site = f"{word.strip('!~')}.py:{rank}"
            common = {"async": not word.endswith("~"), "engine": self.engine, **about}
            word = word.strip("~")
            if word == "host":
                log.events.append(["host", "torch.cuda.synchronize()", site])
            elif word[0] == "!":
                log.events.append(["done", ids[word[1:]]])
            elif word[0] in "sr" and word[1:].isdigit():
                log.groups["w"] = self.groups["w"]
                kind = "send" if word[0] == "s" else "recv"
                own = {**common, "peer": int(word[1:])}
                log.events.append(["post", number, "w", None, kind, site, own])
            else:
                log.groups[word[0]] = self.groups[word[0]]
                event = ["post", number, word[0], int(word[1:]), "all_reduce", site, common]
                log.events.append(event)
            ids[word] = number
        log.ended = ended
        return self

    def found(self, failure: str = "") -> list[Finding]:
        return merged(analyse(self.logs, failure))


TWO = {"a": [0, 1], "b": [0, 1], "w": [0, 1]}


def kinds(found: list[Finding]) -> list[str]:
    return [each.kind for each in found]


# Cycles


def test_a_cycle_is_found_with_as_few_legs_as_there_can_be() -> None:
    lines = ["axb", "bya"]
    assert list(cycles(lines, lines)) == [[Leg(0, 0, 2), Leg(1, 0, 2)]]


def test_orders_that_agree_have_no_cycle() -> None:
    assert not list(cycles(["abc", "ac", "bc", "ab"], ["abc", "ac", "bc", "ab"]))


def test_a_cycle_goes_through_three_lines() -> None:
    (first, *_) = cycles(["ab", "bc", "ca"], ["ab", "bc", "ca"])
    assert sorted(leg.line for leg in first) == [0, 1, 2]


def test_long_lines_take_linear_time() -> None:
    def steps(length: int) -> int:
        """How many lines of Python it takes; that of all pairs of a line's places is quadratic."""
        count = 0

        def traced(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal count
            count += event == "line"
            return traced

        lines = [[(name, n) for n in range(length) for name in names] for names in ("ab", "ba")]
        before = sys.gettrace()
        sys.settrace(traced)
        try:
            found = list(cycles(lines, [[name for name, _ in line] for line in lines]))
        finally:
            sys.settrace(before)
        assert found
        return count

    assert steps(4000) < 3 * steps(2000)


# Groups


def test_two_groups_in_two_orders() -> None:
    (found,) = Logs(TWO, 2).log(0, "a0 b0").log(1, "b0 a0").found()
    assert (found.kind, found.site, found.ranks) == ("communicator-order", "b0.py:1", [0, 1])
    assert "a0.py:0: all_reduce" in found.related and "a0.py:1: all_reduce" in found.related
    assert "rank 0 enqueues all_reduce of group 'a' (ranks 0, 1) at a0.py:0 before" in found.text


def test_the_rank_that_differs_from_the_others_has_the_site() -> None:
    groups = {"a": [0, 1, 2], "b": [0, 1, 2]}
    logs = Logs(groups, 3).log(0, "b0 a0").log(1, "a0 b0").log(2, "a0 b0")
    (found,) = logs.found()
    assert (found.site, found.ranks) == ("b0.py:0", [0, 1, 2])


def test_a_loop_is_one_finding() -> None:
    text = " ".join(f"a{n} b{n}" for n in range(20))
    turned = " ".join(f"b{n} a{n}" for n in range(20))
    logs = Logs(TWO, 2).log(0, text).log(1, turned)
    for log in logs.logs:
        for event in log.events:
            event[5] = f"{event[2]}.py:{log.rank}"
    assert len(logs.found()) == 1


def test_the_host_waits_within_the_cycle() -> None:
    (found,) = Logs(TWO, 2).log(0, "a0 host b0").log(1, "b0 a0").found()
    assert found.kind == "host-sync-in-cycle"
    assert "the host of rank 0 waits: torch.cuda.synchronize()" in found.text


@pytest.mark.parametrize("engine", ["gloo", ""])
def test_other_engines_have_no_order(engine: str) -> None:
    assert not Logs(TWO, 2, engine).log(0, "a0 b0").log(1, "b0 a0").found()


def test_a_group_of_one_rank_is_in_no_cycle() -> None:
    groups = {"a": [0, 1], "b": [0], "c": [1]}
    assert not Logs(groups, 2).log(0, "a0 b0").log(1, "c0 a0").found()


def test_ranks_that_wait_for_each_other_in_two_groups() -> None:
    logs = Logs(TWO, 2).log(0, "a0~", "ReplicaEnded").log(1, "b0~", "ReplicaEnded")
    (found,) = logs.found(STALL)
    assert (found.kind, found.ranks) == ("host-sync-in-cycle", [0, 1])
    assert not logs.found("rank 0 raised ValueError")


# Messages


def test_both_ends_send_first() -> None:
    (found,) = Logs(TWO, 2).log(0, "s1 r1").log(1, "s0 r0").found()
    assert (found.kind, found.ranks, found.call) == ("send-order", [0, 1], "send")


def test_one_end_receives_first() -> None:
    assert not Logs(TWO, 2).log(0, "s1 r1 s1").log(1, "r0 s0 r0").found()


def test_a_ring_of_sends_makes_its_communicators_in_a_circle() -> None:
    groups = {"w": [0, 1, 2]}
    logs = Logs(groups, 3).log(0, "s1 r2").log(1, "s2 r0").log(2, "s0 r1")
    (found,) = logs.found()
    assert (found.kind, found.ranks) == ("send-order", [0, 1, 2])


def test_a_ring_whose_last_rank_receives_first() -> None:
    groups = {"w": [0, 1, 2]}
    assert not Logs(groups, 3).log(0, "s1 r2").log(1, "s2 r0").log(2, "r1 s0").found()


def test_a_bound_group_has_one_sequence() -> None:
    groups = {"w": [0, 1]}
    logs = Logs(groups, 2).log(0, "s1 w0", bound=True).log(1, "w0 r0", bound=True)
    assert kinds(logs.found()) == ["send-order"]
    assert not Logs(groups, 2).log(0, "s1 w0").log(1, "w0 r0").found()


def test_a_batch_has_no_order() -> None:
    logs = Logs(TWO, 2).log(0, "s1 r1", batch=0).log(1, "s0 r0", batch=0)
    assert not logs.found()


def test_gloo_sends_in_any_order() -> None:
    assert not Logs(TWO, 2, "gloo").log(0, "s1 r1").log(1, "s0 r0").found()


def test_sends_that_wait_in_a_circle() -> None:
    groups = {"w": [0, 1, 2]}
    logs = Logs(groups, 3, "gloo")
    for rank in range(3):
        logs.log(rank, f"s{(rank + 1) % 3}", "ReplicaEnded")
    (found,) = logs.found(STALL)
    assert (found.kind, found.ranks) == ("send-order", [0, 1, 2])


# Uneven calls


def test_a_rank_makes_more_calls() -> None:
    (found,) = Logs(TWO, 2).log(0, "a0 a1").log(1, "a0").found()
    assert (found.kind, found.site, found.ranks) == ("uneven-calls", "a1.py:0", [0])
    assert "2 of rank 0, 1 of rank 1" in found.text


def test_a_rank_has_returned() -> None:
    logs = Logs(TWO, 2, "gloo").log(0, "a0 !a0 a1~", "ReplicaEnded").log(1, "a0 !a0")
    (found,) = logs.found(STALL)
    assert (found.kind, found.site, found.ranks) == ("uneven-calls", "a1.py:0", [0])
    assert not logs.found("rank 0 raised ValueError")


def test_a_rank_has_gone_on() -> None:
    logs = Logs(TWO, 2).log(0, "a0 !a0 a1~", "ReplicaEnded").log(1, "a0 !a0 b0~", "ReplicaEnded")
    for log in logs.logs:
        for event in log.events:
            if event[0] == "post":
                event[5] = f"{event[2]}.py:1"
    (found,) = logs.found(STALL)
    assert (found.kind, found.site) == ("uneven-calls", "a.py:1")


def test_a_message_without_a_receiver() -> None:
    (found,) = Logs(TWO, 2).log(0, "s1 s1").log(1, "r0").found()
    assert (found.kind, found.ranks) == ("uneven-calls", [0])


def test_a_run_that_an_error_ended_has_no_uneven_calls() -> None:
    assert not Logs(TWO, 2).log(0, "a0 a1").log(1, "a0", "ValueError").found("ValueError")


# Groups that are made


def made(*calls: tuple[list[int], bool]) -> list[list[Any]]:
    return [["made", ranks, local, f"made.py:{n}"] for n, (ranks, local) in enumerate(calls)]


def groups_found(*events: list[list[Any]], ended: str = "") -> list[Finding]:
    return analyse([Log(n, len(events), events=each, ended=ended) for n, each in enumerate(events)])


def test_members_alone_make_a_group() -> None:
    (found,) = groups_found(made(([0, 1], False)), made(([0, 1], False)), [])
    assert (found.kind, found.site, found.ranks) == ("group-made-by-some", "made.py:0", [0, 1])
    assert "rank 2 does not" in found.text


def test_members_alone_synchronize_locally() -> None:
    assert not groups_found(made(([0, 1], True)), made(([0, 1], True)), [])
    assert groups_found(made(([0, 1], True)), [], [])


def test_each_rank_makes_a_group_of_its_own() -> None:
    assert not groups_found(made(([0], False)), made(([1], False)))
    assert groups_found(*[made((each, False)) for each in ([0, 1], [0, 1], [2, 3], [2, 3])])


def test_ranks_make_groups_in_two_orders() -> None:
    one, other = ([0, 1], False), ([0], False)
    assert kinds(groups_found(made(one, other), made(other, one))) == ["group-made-by-some"]


def test_an_error_before_a_group_is_made() -> None:
    assert not groups_found(made(([0, 1], False)), [], ended="ValueError")


# Programs


def check(f: Callable[..., Any], ranks: int, engine: str = "nccl", **named: Any) -> list[Finding]:
    """What the check of a program finds, of the kinds that are tested here."""
    own = Check(engine)
    try:
        launch(f, ranks, named.pop("args", ()), check=own, **named)
    except GpusimError:
        pass
    return [each for each in own.findings if each.kind in OWN]


def two_groups(rank: int, turned: bool) -> None:
    dist.init_process_group("nccl")
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    values = [torch.ones(2), torch.ones(3)]
    order = [1, 0] if turned and rank else [0, 1]
    works = [dist.all_reduce(values[n], group=groups[n], async_op=True) for n in order]
    for work in works:
        work.wait()


@pytest.mark.parametrize("processes", [False, True])
def test_a_program_with_two_orders(processes: bool) -> None:
    (found,) = check(two_groups, 2, args=(True,), processes=processes)
    assert (found.kind, found.ranks) == ("communicator-order", [0, 1])
    assert found.site.startswith(__file__)
    assert not check(two_groups, 2, args=(False,), processes=processes)


def test_a_group_of_gloo_beside_nccl_has_no_order() -> None:
    def program(rank: int) -> None:
        dist.init_process_group("nccl")
        host = dist.new_group(backend="gloo")
        calls = [dist.group.WORLD, host]
        values = [torch.ones(1), torch.ones(1)]
        works = [
            dist.all_reduce(value, group=group, async_op=True)
            for group, value in zip(calls[:: 1 - 2 * rank], values, strict=True)
        ]
        for work in works:
            work.wait()

    assert not check(program, 2)


def exchange(rank: int, way: str) -> float:
    dist.init_process_group("nccl")
    mine, theirs = torch.ones(1), torch.zeros(1)
    works: list[Any]
    if way == "batch":
        ops = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, theirs, 1 - rank)]
        works = dist.batch_isend_irecv(ops)
    elif way == "turned" and rank:
        works = [dist.irecv(theirs, 1 - rank), dist.isend(mine, 1 - rank)]
    else:
        works = [dist.isend(mine, 1 - rank), dist.irecv(theirs, 1 - rank)]
    for work in works:
        work.wait()
    return float(theirs)


def test_a_program_that_exchanges_messages() -> None:
    assert kinds(check(exchange, 2, args=("plain",))) == ["send-order"]
    assert not check(exchange, 2, args=("batch",))
    assert not check(exchange, 2, args=("turned",))
    assert not check(exchange, 2, "gloo", args=("plain",))


def test_a_program_whose_sends_wait() -> None:
    def program(rank: int) -> None:
        dist.init_process_group("gloo")
        dist.send(torch.ones(1), (rank + 1) % 3)
        dist.recv(torch.ones(1), (rank - 1) % 3)

    assert kinds(check(program, 3, "gloo")) == ["send-order"]


def test_a_program_with_uneven_batches() -> None:
    def program(rank: int) -> None:
        dist.init_process_group("gloo")
        for _ in range(2 + rank):
            dist.all_reduce(torch.ones(1))

    (found,) = check(program, 2, "")
    assert (found.kind, found.ranks) == ("uneven-calls", [1])


def test_a_program_whose_members_make_a_group() -> None:
    def program(rank: int, local: bool) -> None:
        dist.init_process_group("gloo")
        if rank < 2:
            dist.new_group([0, 1], use_local_synchronization=local)

    assert kinds(check(program, 3, "", args=(False,))) == ["group-made-by-some"]
    assert not check(program, 3, "", args=(True,))


def test_meshes_of_torch_make_groups_as_they_need() -> None:
    def program(rank: int) -> None:
        dist.init_process_group("gloo")
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        dist.all_reduce(torch.ones(1), group=mesh["a"].get_group())
        dist.new_subgroups(2)

    assert not check(program, 4, "")
