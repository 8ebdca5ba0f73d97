"""Results that nobody reads are named, and those that somebody reads are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

from gpusim.torch.distributed import launch
from gpusim.torch.distributed.checks import Check
from gpusim.torch.distributed.checks.log import Log
from gpusim.torch.distributed.checks.results import MOST, PART, Place, analyse
from tests.check.cases import run
from tests.check.right_calls import drawn
from tests.check.small import BOTH, Program, assert_named, checked, needs_linux

pytestmark = needs_linux

WRONG: dict[str, Program] = {}


def wrong(function: Program) -> Program:
    WRONG[function.__name__] = function
    return function


@wrong
def reduces_a_clone(rank: int) -> Any:
    x = drawn(rank, 3)
    dist.all_reduce(x.clone())  # finds: result-unread on all
    dist.barrier()
    return x


@wrong
def reduces_a_conversion(rank: int) -> Any:
    x = drawn(rank, 3).bfloat16()
    for _ in range(3):
        dist.all_reduce(x.float())  # finds: result-unread on all
    return x


@wrong
def writes_over_a_result(rank: int) -> Any:
    x = drawn(rank, 3)
    dist.all_reduce(x)  # finds: result-unread on all
    x.zero_()
    return x + 1


@wrong
def copies_over_a_result(rank: int) -> Any:
    x = drawn(rank, 3)
    dist.all_reduce(x)  # finds: result-unread on all
    x.copy_(drawn(rank, 3))
    return x + 1


@wrong
def asks_for_the_shape_alone(rank: int) -> Any:
    x = drawn(rank, 3)
    dist.all_reduce(x)  # finds: result-unread on all
    count, like = x.numel(), torch.zeros_like(x)
    del x
    dist.barrier()
    return count, like


@wrong
def forgets_what_it_gathers(rank: int) -> Any:
    parts = [torch.zeros(3) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, drawn(rank, 3))  # finds: result-unread on all
    return len(parts)


@wrong
def forgets_on_the_rank_that_has_it(rank: int) -> Any:
    """Others write nothing in a reduction to rank 0."""
    x = drawn(rank, 3)
    y = x.clone()
    dist.reduce(y, 0)  # finds: result-unread on 0
    del y
    return x


@wrong
def forgets_an_async_result(rank: int) -> Any:
    x = drawn(rank, 3)
    dist.all_reduce(x.clone(), async_op=True).wait()  # finds: result-unread on all
    return x


@wrong
def forgets_a_functional_result(rank: int) -> Any:
    group = dist.group.WORLD
    assert group is not None
    x = drawn(rank, 3)
    functional.all_reduce(x, "sum", group)  # finds: result-unread on all
    return x


@BOTH
@pytest.mark.parametrize("name", list(WRONG))
def test_a_result_that_is_not_read_is_named(name: str, processes: bool) -> None:
    for ranks in (2, 3):
        assert_named(WRONG[name], ranks, processes=processes)


def test_text_says_how_often() -> None:
    [finding] = assert_named(WRONG["reduces_a_conversion"])
    assert finding.text.endswith("is read by no rank, in 3 calls")


def test_a_place_that_is_read_once_is_right() -> None:
    """By any rank, in any of its calls."""

    def call(rank: int) -> float:
        total = 0.0
        for step in range(5):
            x = drawn(rank, 3)
            dist.all_reduce(x)
            if rank == 1 and step == 3:
                total += float(x.sum())
        return total

    assert not checked(call, 3)[0]


def test_a_place_with_more_calls_than_are_watched_is_not_named() -> None:
    def call(rank: int, count: int = MOST + 1) -> None:
        for _ in range(count):
            dist.all_reduce(drawn(rank, 3))

    assert not checked(call)[0]
    findings, _ = checked(lambda rank: call(rank, MOST))
    assert [each.kind for each in findings] == ["result-unread"]


def test_a_sum_of_ones_is_a_barrier() -> None:
    """Zeros and ones that few tensors have: ranks wait for each other."""

    def call(rank: int) -> None:
        for x in (torch.zeros(1), torch.ones(1), torch.tensor(1), torch.ones(4, dtype=torch.bool)):
            dist.broadcast(x, 0)
            dist.all_reduce(x.clone().float())

    assert not checked(call, 3)[0]


def test_calls_of_torchs_modules_are_not_followed() -> None:
    def call(rank: int) -> None:
        torch.manual_seed(0)
        nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
        nn.SyncBatchNorm(3)
        dist.all_gather_object([None] * dist.get_world_size(), {"rank": rank})

    assert not checked(call)[0]


def test_what_a_function_returns_is_its_callers() -> None:
    def call(rank: int) -> torch.Tensor:
        dist.init_process_group()
        x = drawn(rank, 3)
        dist.all_reduce(x)
        return x

    check = Check()
    one, other = launch(call, 2, check=check)
    assert not check.findings and torch.equal(one, other)


SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group()
{lines}
dist.destroy_process_group()
"""


def script(folder: Path, lines: str) -> list[tuple[str, int]]:
    path = folder / "train.py"
    path.write_text(SCRIPT.format(lines=lines))
    said = run(["--ranks", "2", "--check"], path)
    return [(each["kind"], int(each["site"].rpartition(":")[2])) for each in said.findings]


def test_what_a_script_has_at_its_end_is_read_by_none(tmp_path: Path) -> None:
    lines = "x = torch.arange(3.0)\ndist.all_reduce(x)"
    assert script(tmp_path, lines) == [("result-unread", 5)]
    assert script(tmp_path, f"{lines}\nprint(x)") == []


def test_weights_at_the_end_of_a_script_are_its_result(tmp_path: Path) -> None:
    lines = """\
model = torch.nn.Linear(3, 2)
for each in model.parameters():
    dist.broadcast(each.data, 0)"""
    assert script(tmp_path, lines) == []


# ---------------------------------------------------------------- from logs


def log(rank: int, ended: str = "", **more: Any) -> Log:
    place = Place(calls=2, watched=2, unread=2, words="all_reduce(float32[3])")
    for name, value in more.items():
        setattr(place, name, value)
    return Log(rank, 2, rows={PART: [["a.py:1", "all_reduce", *vars(place).values()]]}, ended=ended)


def test_logs_of_ranks_are_compared() -> None:
    [finding] = analyse([log(0), log(1)])
    assert (finding.kind, finding.site, finding.ranks) == ("result-unread", "a.py:1", [0, 1])
    assert not analyse([log(0), log(1, read=True)])
    assert not analyse([log(0), log(1, unread=1)])
    assert not analyse([log(0), log(1, calls=3)])
    assert not analyse([log(0, waits=True), log(1, waits=True)])
    assert analyse([log(0), log(1, waits=True)])
    assert analyse([log(0), log(1, calls=0, watched=0, unread=0)])[0].ranks == [0]


def test_a_program_that_fails_may_have_been_about_to_read_them() -> None:
    assert not analyse([log(0), log(1, ended="ValueError")])


def test_ranks_without_a_log_are_left_out() -> None:
    assert analyse([]) == [] and analyse([Log(0, 2)]) == []
    assert [each.ranks for each in analyse([log(1)])] == [[1]]
