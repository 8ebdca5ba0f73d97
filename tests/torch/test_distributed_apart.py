"""A rank that takes the wrong group, operation or order is named, in all kinds of ranks."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gpusim import CollectiveMismatchError, DeadlockError
from gpusim.torch.distributed import launch
from gpusim.torch.distributed.calls.apart import Open, explain
from tests.oracles.machine_time import PATIENCE

RANKS = 6
OWN = ((0, 1, 2), (3, 4, 5))
X = torch.ones(5)


def group_of(rank: int) -> dist.ProcessGroup:
    groups = [dist.new_group(list(ranks)) for ranks in OWN]
    return groups[rank // 3]


def reduce(group: dist.ProcessGroup | None) -> None:
    dist.all_reduce(X.clone(), group=group)


def world_in_place_of_a_group(rank: int, odd: int) -> None:
    own = group_of(rank)
    reduce(None if rank == odd else own)


def world_and_then_all_meet(rank: int, odd: int) -> None:
    own = group_of(rank)
    reduce(None if rank == odd else own)
    reduce(None)


def world_from_another_line(rank: int, odd: int) -> None:
    own = group_of(rank)
    if rank == odd:
        dist.all_reduce(X.clone())
    else:
        dist.all_reduce(X.clone(), group=own)
    reduce(None)


def group_in_place_of_world(rank: int, odd: int) -> None:
    own = group_of(rank)
    reduce(own if rank == odd else None)


def same_ranks_other_group(rank: int, odd: int) -> None:
    other = dist.new_group(list(range(RANKS)))
    reduce(other if rank == odd else None)


def other_order(rank: int, odd: int) -> None:
    other = dist.new_group(list(range(RANKS)))
    for group in (other, None) if rank == odd else (None, other):
        reduce(group)


def other_order_in_a_loop(rank: int, odd: int) -> None:
    other = dist.new_group(list(range(RANKS)))
    for step in range(3):
        if rank == odd and step == 2:
            reduce(other)
            dist.all_reduce(X.clone())
        else:
            dist.all_reduce(X.clone())
            reduce(other)


APART = [
    world_in_place_of_a_group,
    world_and_then_all_meet,
    world_from_another_line,
    group_in_place_of_world,
    same_ranks_other_group,
    other_order,
    other_order_in_a_loop,
]
KINDS = {"threads": {}, "free threads": {"schedule": "free"}, "processes": {"processes": True}}


def blamed(text: str) -> str:
    """The ranks that a message names as the odd ones."""
    return " and ".join(re.findall(r"[Rr]anks? ([\d, and]+) (?:is|are) the odd one", text))


@pytest.mark.parametrize("odd", [0, 1, 5])
@pytest.mark.parametrize("wrong", APART)
@pytest.mark.parametrize("kind", KINDS)
def test_the_odd_rank_is_named(kind: str, wrong: Callable[[int, int], None], odd: int) -> None:
    def program(rank: int) -> None:
        dist.init_process_group("gloo")
        wrong(rank, odd)

    with pytest.raises(DeadlockError) as caught:
        launch(program, RANKS, **KINDS[kind])
    text = str(caught.value)
    assert blamed(text) == str(odd), text
    assert "no rank can go on: " in text


def test_the_message_says_which_group_waits_where() -> None:
    def program(rank: int) -> None:
        dist.init_process_group("gloo")
        world_in_place_of_a_group(rank, 4)

    with pytest.raises(DeadlockError) as caught:
        launch(program, RANKS)
    line = f"{__file__}:{inspect.getsourcelines(reduce)[1] + 1}"
    assert str(caught.value).endswith(
        f"Rank 4 is the odd one: it called the group of all ranks at {line}, where ranks 3 and 5 "
        "wait for it in group '2' (ranks 3 to 5)"
    )


def test_two_ranks_that_wait_for_each_other_are_both_named() -> None:
    """Nothing tells which of two ranks is odd: none is blamed."""

    def program(rank: int) -> None:
        dist.init_process_group("gloo")
        a, b = dist.new_group([0, 1]), dist.new_group([0, 1])
        dist.barrier(a if rank else b)

    with pytest.raises(DeadlockError) as caught:
        launch(program, 2)
    text = str(caught.value)
    assert "odd" not in text
    assert text.count("each waits for the other") == 1
    assert "Rank 0 called group '2'" in text and "and rank 1 group '1'" in text


def test_a_rank_that_returned_is_not_said_to_call_another_group() -> None:
    def program(rank: int) -> None:
        dist.init_process_group("gloo")
        if rank != 2:
            reduce(None)

    with pytest.raises(DeadlockError, match=r"rank 2 has returned$"):
        launch(program, 4)


def test_a_call_that_is_not_waited_for_blames_none() -> None:
    """A rank whose asynchronous call is open, and that waits elsewhere, went no other way."""

    def program(rank: int) -> None:
        dist.init_process_group("gloo")
        other = dist.new_group([0, 1, 2])
        if rank == 0:
            dist.all_reduce(X.clone(), group=other, async_op=True)
            dist.recv(X.clone(), 1)
        else:
            dist.barrier()

    with pytest.raises(DeadlockError) as caught:
        launch(program, 3)
    assert "odd" not in str(caught.value) and "waits for the other" not in str(caught.value)


@pytest.mark.parametrize("kind", KINDS)
def test_another_operation_is_said_of_the_rank_that_makes_it(kind: str) -> None:
    def program(rank: int) -> None:
        dist.init_process_group("gloo")
        if rank == 5:
            dist.broadcast(X.clone(), 0)
        else:
            reduce(None)

    with pytest.raises(CollectiveMismatchError) as caught:
        launch(program, RANKS, **KINDS[kind])
    text = str(caught.value)
    assert "rank 5 calls broadcast" in text and "differ in operation" in text
    if kind != "free threads":  # the order in which ranks come is fixed
        assert re.search(r"ranks 0, 1, 2, 3 and 4 call all_reduce", text), text


SPAWNED = """
import sys
import torch, torch.distributed as dist, torch.multiprocessing as mp

def main(rank):
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29511", rank=rank, world_size=4)
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    dist.all_reduce(torch.ones(3), group=None if rank == 3 else groups[rank // 2])

if __name__ == "__main__":
    mp.spawn(main, nprocs=4)
"""


def test_the_processes_that_a_script_starts_hear_it_too(tmp_path: Path) -> None:
    (tmp_path / "spawned.py").write_text(SPAWNED)
    done = subprocess.run(
        [sys.executable, "-m", "gpusim", "run", "spawned.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode != 0
    assert re.search(
        r"Rank 3 is the odd one: it called the group of all ranks at \S+spawned.py:8, where rank 2 "
        r"waits for it in group '2' \(ranks 2 and 3\)",
        done.stderr,
    ), done.stderr


def test_several_ranks_may_be_odd() -> None:
    world, own = ("0", (0, 1, 2, 3, 4)), ("1", (0, 1, 2, 3, 4))
    here = Open(own, {1: "a.py:3", 4: "a.py:3"}, missing=[0, 2, 3])
    there = Open(world, {0: "a.py:5", 2: "a.py:5", 3: "a.py:5"}, missing=[1, 4])
    assert explain([here, there], {}) == (
        "ranks 1 and 4 are the odd ones: they called group '1' (ranks 0 to 4) at a.py:3, and at "
        "a.py:5 ranks 0, 2 and 3 wait for them in the group of all ranks"
    )
    assert explain([here], {}) == explain([], {}) == ""
