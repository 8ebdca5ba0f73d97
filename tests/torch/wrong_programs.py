"""Programs of torch.distributed that go wrong, by hand and by a random mutation on one rank."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gpusim.torch.distributed import launch
from tests.oracles.machine_time import until
from tests.oracles.owned import busy_threads


def fails(
    program: Callable[[int], Any],
    ranks: int,
    error: type[BaseException],
    *said: str,
    **options: Any,
) -> str:
    """Assert that a program ends by itself, with an error that says all this."""
    threads = busy_threads()
    with pytest.raises(error) as caught:
        launch(program, ranks, **options)
    text = str(caught.value)
    for each in said:
        assert re.search(each, text), text
    assert until(lambda: busy_threads() <= threads)
    return text


HERE = re.escape(__file__)
X = torch.ones(4)


def other_operation(rank: int) -> None:
    dist.all_reduce(X.clone()) if rank != 2 else dist.broadcast(X.clone(), 0)


def other_shape(rank: int) -> None:
    dist.all_reduce(torch.ones(4 + (rank == 2)))


def other_dtype(rank: int) -> None:
    dist.all_reduce(torch.ones(4, dtype=torch.float64 if rank == 2 else torch.float32))


def other_root(rank: int) -> None:
    dist.broadcast(X.clone(), rank // 2)


def other_operator(rank: int) -> None:
    dist.all_reduce(X.clone(), dist.ReduceOp.MAX if rank == 2 else dist.ReduceOp.SUM)


def other_strides(rank: int) -> None:
    x = torch.ones(2, 3)
    dist.all_reduce(x.reshape(3, 2) if rank == 2 else x.T)


def other_groups(rank: int) -> None:
    group = dist.new_group([1, 2] if rank == 2 else [0, 1, 2])
    dist.barrier(group)


def other_message(rank: int) -> None:
    if rank == 1:
        dist.send(torch.ones(3), 2)
    if rank == 2:
        dist.recv(torch.ones(4), 1)


def returns_early(rank: int) -> None:
    if rank != 1:
        dist.all_reduce(X.clone())


def waits_for_no_one(rank: int) -> None:
    if rank == 1:
        dist.recv(X.clone(), 0)


def crossed(rank: int) -> None:
    a, b = dist.new_group([0, 1]), dist.new_group([0, 1])
    if rank < 2:
        dist.barrier(a if rank else b)
        dist.barrier(b if rank else a)


def crossed_messages(rank: int) -> None:
    if rank < 2:
        dist.send(X, 1 - rank)
        dist.recv(X.clone(), 1 - rank)


def never_stored(rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.get("nothing")


def asks_in_vain(rank: int) -> None:
    if rank == 1:
        work = dist.irecv(X.clone(), 0)
        while not work.is_completed():
            pass


# Random programs of which one rank runs a mutation

Step = tuple[str, int, int, str]
KINDS = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "barrier",
    "ring",
    "scatter",
    "all_to_all",
    "pair",
)


def random_step(draw: random.Random) -> Step:
    dtype = draw.choice(["float32", "float64"])
    return draw.choice(KINDS), draw.randrange(1, 5), draw.randrange(2), dtype


def mutated(draw: random.Random, steps: list[Step]) -> list[Step]:
    found, place = list(steps), draw.randrange(len(steps))
    kind, size, root, dtype = found[place]
    match draw.randrange(6):
        case 0:
            del found[place]
        case 1:
            found.insert(place, found[place])
        case 2:
            found.insert(draw.randrange(len(found)), found.pop(place))
        case 3:
            found[place] = (kind, size % 4 + 1, 1 - root, dtype)
        case 4:
            found[place] = (draw.choice(KINDS), size, root, dtype)
        case 5:
            found[place] = ("raise", size, root, dtype)
    return found


def take_step(step: Step, rank: int, size: int, pair: Any) -> None:
    kind, count, root, dtype = step
    x = torch.ones(count * size, dtype=getattr(torch, dtype))
    if kind == "raise":
        raise KeyError("mutation")
    if kind == "all_reduce":
        work = dist.all_reduce(x, async_op=True)
        dist.barrier()
        work.wait()
    elif kind == "broadcast":
        dist.broadcast(x, root)
    elif kind == "all_gather":
        dist.all_gather([torch.empty_like(x) for _ in range(size)], x)
    elif kind == "barrier":
        dist.barrier()
    elif kind == "ring":
        sent = dist.P2POp(dist.isend, x, (rank + 1) % size)
        received = dist.P2POp(dist.irecv, torch.empty_like(x), (rank - 1) % size)
        for work in dist.batch_isend_irecv([sent, received]):
            work.wait()
    elif kind == "scatter":
        dist.reduce_scatter_tensor(x[:count].clone(), x)
    elif kind == "all_to_all":
        dist.all_to_all_single(torch.empty_like(x), x)
    elif rank < 2:
        dist.all_reduce(x, group=pair)
