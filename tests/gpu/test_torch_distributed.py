"""torch.distributed's collectives on tensors of a GPU have the bits of those on the host.

On the fake CUDA, PyTorch has no GPU: tensors of the host lie in memory of CuPy's there, and gpusim
takes them for a GPU's. Their streams note which work is behind which.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gpusim import CollectiveMismatchError
from gpusim.torch.distributed import launch
from gpusim.torch.distributed.calls import streams
from tests.gpu import smoke
from tests.gpu.cupy_arrays import cupy

REAL = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not REAL, reason="needs a GPU and a PyTorch for it")
R = 3
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
DTYPES = [*FLOATS, torch.float64, torch.int32, torch.uint8, torch.bool, torch.complex128]
Move = Callable[[Tensor], Tensor]


class Ordered:
    """A stream that knows which work is behind which: a set of numbered pieces of work."""

    numbers = itertools.count()

    def __init__(self) -> None:
        self.behind: set[int] = set()

    def work(self) -> int:
        number = next(self.numbers)
        self.behind.add(number)
        return number

    def record_event(self) -> Any:
        self.work()
        return frozenset(self.behind)

    def wait_event(self, event: Any) -> None:
        self.behind |= event


class Memory:
    """CuPy's memory that tensors of the host lie in."""

    def __init__(self) -> None:
        self.arrays: list[Any] = []

    def move(self, tensor: Tensor) -> Tensor:
        size = tensor.nbytes
        array = cupy.empty(size, "u1")
        self.arrays.append(array)
        memory: Any = (ctypes.c_char * size).from_address(array.data.ptr)
        found = torch.frombuffer(memory, dtype=tensor.dtype).reshape(tensor.shape)
        return found.copy_(tensor)

    def holds(self, tensor: Tensor) -> bool:
        address = tensor.data_ptr()
        return any(x.data.ptr <= address < x.data.ptr + x.nbytes for x in self.arrays)


@pytest.fixture
def move(monkeypatch: pytest.MonkeyPatch) -> Move:
    """Copies a tensor to the GPU."""
    if REAL:
        return lambda tensor: tensor.cuda()
    memory, own = Memory(), Ordered()
    monkeypatch.setattr(streams, "is_on_gpu", memory.holds)
    monkeypatch.setattr(streams, "current_stream", lambda tensor: own)
    monkeypatch.setattr(streams, "on_stream_of", lambda tensors: nullcontext())
    monkeypatch.setattr(streams, "futures_on", lambda tensors: None)
    return memory.move


def collectives(rank: int, move: Move, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every call of torch.distributed that moves or folds tensors."""
    dist.init_process_group()
    generator = torch.Generator().manual_seed(rank)

    def draw(*shape: int) -> Tensor:
        return move((torch.randn(shape, generator=generator) * 8).to(dtype))

    def empty(*shape: int) -> Tensor:
        return move(torch.zeros(shape, dtype=dtype))

    found: dict[str, Tensor] = {}
    operators = [dist.ReduceOp.SUM]
    if dtype == torch.bool:
        operators = [dist.ReduceOp.MAX, dist.ReduceOp.BOR]
    elif not dtype.is_complex:
        operators += [dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT]
        operators += [dist.ReduceOp.AVG] if dtype.is_floating_point else [dist.ReduceOp.BXOR]
    first = operators[0]
    for op in operators:
        dist.all_reduce(found.setdefault(f"all_reduce {op}", draw(7)), op)
    dist.all_reduce(found.setdefault("all_reduce of a view", draw(4, 6)).t(), first)
    dist.reduce(found.setdefault("reduce", draw(5)), 1, first)
    dist.broadcast(found.setdefault("broadcast", draw(2, 3)), 2)
    found["coalesced 0"], found["coalesced 1"] = draw(5), draw(2, 2)
    dist.all_reduce_coalesced([found["coalesced 0"], found["coalesced 1"]], first)
    rows = [empty(4) for _ in range(R)]
    dist.all_gather(rows, draw(4))
    found["all_gather"] = torch.stack(rows)
    dist.all_gather_into_tensor(found.setdefault("into", empty(R * 4)), draw(4))
    rows = [empty(2) for _ in range(R)]
    dist.gather(draw(2), rows if rank == 1 else None, 1)
    found["gather"] = torch.stack(rows)
    sent = [draw(3) for _ in range(R)]
    dist.scatter(found.setdefault("scatter", empty(3)), sent if rank == 0 else None, 0)
    dist.reduce_scatter(found.setdefault("reduce_scatter", empty(3)), sent, first)
    scattered = found.setdefault("scattered", empty(2, 3))
    dist.reduce_scatter_tensor(scattered, draw(R * 2, 3), first)
    rows = [empty(3) for _ in range(R)]
    dist.all_to_all(rows, sent)
    found["all_to_all"] = torch.stack(rows)
    sizes = [[1, 0, 2], [2, 1, 0], [0, 3, 1]]
    mine = [sizes[source][rank] for source in range(R)]
    uneven = found.setdefault("uneven", empty(sum(mine), 2))
    dist.all_to_all_single(uneven, draw(sum(sizes[rank]), 2), mine, sizes[rank])
    message = found.setdefault("message", draw(3))
    work = dist.isend(message, (rank + 1) % R)
    dist.recv(found.setdefault("received", empty(3)), (rank - 1) % R)
    assert work is not None
    work.wait()
    waiting = dist.all_reduce(found.setdefault("future", draw(2)), first, async_op=True)
    assert waiting is not None
    waiting.get_future().wait()
    in_place = found.setdefault("in place", draw(R * 2))
    dist.all_gather_into_tensor(in_place, in_place[rank * 2 : rank * 2 + 2])
    return {name: tensor.cpu() for name, tensor in found.items()}


@pytest.mark.parametrize(
    ("dtype", "reduction"),
    [
        pytest.param(dtype, order, id=f"{dtype}-{order}")
        for dtype in DTYPES
        for order in ("ring", "gloo-ring", "tree")
        if not (dtype.is_complex and order == "gloo-ring")  # which gloo lacks
    ],
)
def test_bits_are_those_of_the_host(move: Move, dtype: torch.dtype, reduction: str) -> None:
    expected = launch(collectives, R, (lambda tensor: tensor, dtype), reduction=reduction)
    found = launch(collectives, R, (move, dtype), reduction=reduction)
    for mine, theirs in zip(found, expected, strict=True):
        for name, value in theirs.items():
            bits = [x.contiguous().reshape(-1).view(torch.uint8) for x in (mine[name], value)]
            assert torch.equal(*bits), name


def test_work_is_behind_that_of_all_ranks_and_before_what_follows(
    move: Move, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has a stream; whoever computes waits for all, and all wait for it."""
    own = [Ordered() for _ in range(R)]
    before: list[int] = [0] * R
    computed: list[int] = []
    rank_of: Any = dist.get_rank

    @contextmanager
    def computing(tensors: Any) -> Iterator[None]:
        stream = own[rank_of()]
        assert {*before} <= stream.behind
        computed.append(stream.work())
        yield

    monkeypatch.setattr(streams, "current_stream", lambda tensor: own[rank_of()])
    monkeypatch.setattr(streams, "on_stream_of", computing)

    def program(rank: int) -> None:
        dist.init_process_group()
        x = move(torch.ones(4))
        for call in (
            lambda: dist.all_reduce(x, async_op=True),
            lambda: dist.broadcast(x, 1, async_op=True),
            lambda: dist.isend(x, 1) if rank == 0 else dist.irecv(x, 0) if rank == 1 else None,
        ):
            before[rank] = own[rank].work()
            if rank == 2 and len(computed) == 2:  # not of the message
                before[rank] = before[0]
            work = call()
            if work is not None:
                work.wait()
                assert computed[-1] in own[rank].behind

    launch(program, R, schedule="turns")
    assert len(computed) == 3


def test_ranks_on_different_devices_are_named(move: Move) -> None:
    if not REAL:
        pytest.skip("needs a GPU and a PyTorch for it: tensors of the fake say that they are cpu")

    def program(rank: int) -> None:
        dist.init_process_group()
        dist.all_reduce(torch.ones(2, device="cuda" if rank else "cpu"))

    with pytest.raises(CollectiveMismatchError, match=r"on cuda:0.*differ in device"):
        launch(program, 2)


@needs_gpu
@pytest.mark.parametrize("schedule", ["turns", "free"])
def test_side_streams_are_in_order(schedule: str) -> None:
    """Long work on a stream of each rank, before and behind each call."""

    def program(rank: int) -> float:
        dist.init_process_group("nccl")
        with torch.cuda.stream(torch.cuda.Stream()):
            x = torch.zeros(1 << 22, device="cuda")
            for _ in range(5):
                for _ in range(20):
                    x = x * 1 + 0
                x += rank + 1
                work = dist.all_reduce(x, async_op=True)
                other = torch.empty_like(x).fill_(-1.0)  # memory that must not be x's
                assert work is not None
                work.wait()
                x = x / R
                del other
            return float(x.mean())

    total = 5 * (1 + 2 + 3) / R
    assert launch(program, R, schedule=schedule) == pytest.approx([total] * R)


def train(where: str, sharded: bool) -> list[Tensor]:
    dist.init_process_group()
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)).double().to(where)
    if sharded:
        mesh = dist.init_device_mesh(where, (dist.get_world_size(),))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        x = torch.randn(5, 4, generator=generator, dtype=torch.float64).to(where)
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()
    return [(p.full_tensor() if sharded else p.detach()).cpu() for p in model.parameters()]


@needs_gpu
@pytest.mark.parametrize("sharded", [False, True], ids=["ddp", "fsdp2"])
@pytest.mark.parametrize("schedule", ["turns", "free"])
def test_training_agrees_with_the_host(sharded: bool, schedule: str) -> None:
    """Matrix products differ in their last bits, sums of ranks do not."""
    found = launch(lambda rank: train("cuda", sharded), 4, schedule=schedule)
    expected = launch(lambda rank: train("cpu", sharded), 4)
    for mine, theirs in zip(found, expected, strict=True):
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other)
    assert all(map(torch.equal, found[0], found[-1]))


@needs_gpu
def test_each_rank_has_a_generator_of_the_gpu() -> None:
    def draw(rank: int) -> list[float]:
        dist.init_process_group()
        torch.manual_seed(rank % 2)
        first = torch.rand(2, device="cuda")
        dist.barrier()
        return [*first.tolist(), *torch.rand(2, device="cuda").tolist()]

    found = launch(draw, 4)
    assert found[0] == found[2] != found[1] == found[3]


def test_the_smoke_test_compares_sums_on_ranks() -> None:
    found = smoke.torch("cpu")  # as it does those of a GPU
    assert found == {"ok": True, "cases": 4, "wrong": []}
