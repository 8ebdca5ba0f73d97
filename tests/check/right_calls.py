"""Programs that wait for their calls as they should, in all the ways that there are."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from gpusim.torch.distributed.checks import flights
from tests.check.small import Program

__all__ = ["IN_PROCESSES", "PROGRAMS", "drawn", "reduced"]

PROGRAMS: dict[str, Program] = {}
IN_PROCESSES = {"operators_of_the_program"}
"""Those that register operators, which ranks that are threads would share."""


def program(function: Program) -> Program:
    PROGRAMS[function.__name__] = function
    return function


def drawn(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(rank)) * 4
    return values.to(dtype)


def reduced(tensor: Tensor) -> Any:
    return dist.all_reduce(tensor, async_op=True)


# ---------------------------------------------------------------- layouts, dtypes, calls

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8]


@program
def layouts(rank: int) -> list[Tensor]:
    """Empty tensors, 0-d, channels_last, transposed, with gaps, a part, all of one memory."""
    found = []
    for make in (
        lambda: drawn(rank, 0),
        lambda: drawn(rank, 2, 0, 3),
        lambda: drawn(rank, 1)[0].clone(),
        lambda: drawn(rank, 2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: drawn(rank, 3, 4).t(),
        lambda: drawn(rank, 9)[3:7],
        lambda: nn.Parameter(drawn(rank, 3)),
        lambda: drawn(rank, 3, dtype=torch.complex64),
    ):
        x: Tensor = make()
        with torch.no_grad():
            work = reduced(x)
            other = drawn(rank + 9, 5) * 2
            work.wait()
        found += [x, other]
    return found


@program
def dtypes(rank: int) -> list[Tensor]:
    found = []
    for dtype in [*DTYPES, torch.float16, torch.int8, torch.int32]:
        x, y = drawn(rank, 5, dtype=dtype), drawn(rank, 5, dtype=dtype)
        parts = [torch.empty(5, dtype=dtype) for _ in range(dist.get_world_size())]
        works = [reduced(x), dist.all_gather(parts, y, async_op=True)]
        for work in works:
            work.wait()
        found += [x, *parts]
    flags = drawn(rank, 7) > 0
    dist.all_reduce(flags, dist.ReduceOp.MAX, async_op=True).wait()
    return [*found, flags]


@program
def all_calls(rank: int) -> list[Any]:
    size = dist.get_world_size()
    found: list[Any] = []
    for dtype in DTYPES:
        x = drawn(rank, 2 * size, dtype=dtype)
        whole, part = torch.zeros(2 * size * size, dtype=dtype), torch.zeros(2, dtype=dtype)
        lists = [[torch.zeros(2, dtype=dtype) for _ in range(size)] for _ in range(3)]
        chunks = [each.contiguous() for each in x.clone().chunk(size)]
        copies = [x.clone() for _ in range(3)]
        targets = [torch.zeros_like(x) for _ in range(size)]
        works = [
            dist.broadcast(copies[0], 0, async_op=True),
            dist.reduce(copies[1], size - 1, async_op=True),
            dist.all_gather_into_tensor(whole, x, async_op=True),
            dist.reduce_scatter_tensor(part, x, async_op=True),
            dist.all_to_all_single(copies[2], x, async_op=True),
            dist.all_to_all(lists[0], chunks, async_op=True),
            dist.gather(x, targets if rank == 0 else None, 0, async_op=True),
            dist.scatter(lists[1][0], chunks if rank == 0 else None, 0, async_op=True),
            dist.reduce_scatter(lists[2][0], chunks, async_op=True),
            dist.barrier(async_op=True),
        ]
        for work in works:
            work.wait()
        found += [copies[0], whole, part, copies[2], lists, targets]
        found += [copies[1]] if rank == size - 1 else []
    return found


@program
def forms_in_place(rank: int) -> list[Any]:
    size = dist.get_world_size()
    own = slice(3 * rank, 3 * rank + 3)
    whole = torch.zeros(3 * size)
    whole[own] = drawn(rank, 3)
    dist.all_gather_into_tensor(whole, whole[own], async_op=True).wait()
    parts = drawn(rank, 3 * size)
    dist.reduce_scatter_tensor(parts[own], parts, async_op=True).wait()
    into = [torch.zeros(2) for _ in range(size)]
    into[rank] = drawn(rank, 2)
    dist.all_gather(into, into[rank], async_op=True).wait()
    return [whole, parts[own].clone(), into]


# ---------------------------------------------------------------- ways to wait


@program
def polls(rank: int) -> Tensor:
    x = drawn(rank, 8)
    work = reduced(x)
    while not work.is_completed():
        pass
    return x * 2


@program
def futures(rank: int) -> list[Tensor]:
    x = drawn(rank, 8)
    future = reduced(x).get_future().then(lambda done: done.value()[0] * 2)
    y = drawn(rank, 3)
    values = reduced(y).get_future().wait()
    return [x, future.wait(), y, values[0]]


@program
def results_of_works(rank: int) -> list[Any]:
    """They are the program's own tensors."""
    x = drawn(rank, 8)
    work = reduced(x)
    work.wait()
    return [work.result()[0].data_ptr() == x.data_ptr(), work.result()[0] is x, x.tolist()]


@program
def many_in_flight(rank: int) -> list[Tensor]:
    """More than are followed."""
    tensors = [torch.full((2,), float(rank + i)) for i in range(flights.MANY + flights.MANY // 4)]
    for work in [*map(reduced, tensors)]:
        work.wait()
    return tensors


@program
def coalesced(rank: int) -> list[Tensor]:
    size = dist.get_world_size()
    x, y = drawn(rank, 8), drawn(rank, 3)
    with dist._coalescing_manager(async_ops=True) as works:
        dist.all_reduce(x)
        dist.all_reduce(y)
    works.wait()
    more, less = torch.zeros(8 * size), torch.zeros(3 * size)
    with dist._coalescing_manager(async_ops=True) as works:
        dist.all_gather_into_tensor(more, x)
        dist.all_gather_into_tensor(less, y)
    works.wait()
    return [x, y, more, less]


@program
def messages(rank: int) -> list[Tensor]:
    size = dist.get_world_size()
    if size == 1:
        return []
    x, y = drawn(rank, 8), torch.zeros(8)
    after, before = (rank + 1) % size, (rank - 1) % size
    batch = [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, y, before)]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    z = torch.zeros(8)
    if rank == 0:
        dist.isend(x, 1).wait()
    elif rank == 1:
        dist.irecv(z, 0).wait()
    return [x, y, z]


# ---------------------------------------------------------------- memory


@program
def storages_resized(rank: int) -> Tensor:
    x = drawn(rank, 8)
    reduced(x).wait()
    kept, storage = x.clone(), x.untyped_storage()
    storage.resize_(0)
    storage.resize_(32)
    x.copy_(kept)
    reduced(x).wait()
    return x


@program
def memory_swapped(rank: int) -> list[Tensor]:
    """The result comes to where the tensor was."""
    found = []
    for swap in (Tensor.set_, lambda x, new: setattr(x, "data", new)):
        x = drawn(rank, 8)
        work, old = reduced(x), x.detach()
        swap(x, torch.zeros(8))
        x += 1
        work.wait()
        found += [old, x]
    return found


@program
def inputs_swapped(rank: int) -> list[Tensor]:
    x = drawn(rank, 8)
    whole = torch.zeros(8 * dist.get_world_size())
    work = dist.all_gather_into_tensor(whole, x, async_op=True)
    x.data = drawn(rank + 1, 8)
    work.wait()
    return [whole, x]


@program
def memory_of_numpy(rank: int) -> list[Any]:
    array = np.arange(4.0) + rank
    x = torch.from_numpy(array)
    reduced(x).wait()
    view = x.numpy()
    reduced(x).wait()
    return [array.tolist(), view.tolist(), x]


@program
def neighbours_used(rank: int) -> list[Tensor]:
    """A part of a tensor is in flight, and the rest is read and written."""
    x = drawn(rank, 4, 6)
    work = dist.all_reduce(x[1], async_op=True)
    x[0] += 1
    x[2:] *= x[0]
    total = x[2:].sum() + x[0].norm()
    work.wait()
    return [x, total]


@program
def inputs_read(rank: int) -> list[Tensor]:
    """What a call only reads, the program may read too."""
    size = dist.get_world_size()
    x = drawn(rank, 3)
    whole = torch.zeros(3 * size)
    works = [dist.all_gather_into_tensor(whole, x, async_op=True)]
    works += [dist.broadcast(x, 0, async_op=True)] if rank == 0 else []
    works += [dist.broadcast(other := torch.zeros(3), 0, async_op=True)] if rank else []
    total = x.sum() + x @ x
    for work in works:
        work.wait()
    return [whole, total, other if rank else x]


@program
def shapes_asked(rank: int) -> list[Any]:
    """And views made, and new tensors like it: no value is read."""
    x = drawn(rank, 4, 2)
    work = reduced(x)
    views = [x.t(), x[1:], x.view(-1), x.detach()]
    made = [torch.zeros_like(x), x.new_ones(3), torch.empty_like(x).fill_(2)]
    asked = [x.shape, x.stride(), x.is_contiguous(), x.numel(), x.dtype, x.data_ptr() > 0]
    work.wait()
    return [x, views, made, [str(each) for each in asked]]


# ---------------------------------------------------------------- modes and transforms


class Doubling(TorchDispatchMode):
    """A program's own mode."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(str(operator))
        return operator(*args, **(kwargs or {}))


@program
def modes_of_the_program(rank: int) -> list[Any]:
    """Begun before a call and left behind it, and the other way round; they see the same."""
    x, y = drawn(rank, 3), drawn(rank, 3)
    mode = Doubling()
    with mode:
        first = reduced(x)
        z = drawn(rank, 4) + 1
    second = reduced(y)
    with mode:
        z = z * 2
        first.wait()
        with Doubling() as inner:
            second.wait()
            z += x.sum() + y.sum()
    return [x, y, z, mode.names, inner.names]


@program
def transforms(rank: int) -> list[Any]:
    x = drawn(rank, 3)
    work = reduced(x)
    rows = torch.func.vmap(lambda row: row * row.sum())(torch.arange(12.0).reshape(3, 4))
    slope = torch.func.grad(lambda row: (row * row).sum())(torch.arange(4.0))
    table = torch.func.jacrev(lambda row: row * row.sum())(torch.arange(4.0))
    work.wait()
    return [x, rows, slope, table, torch.func.vmap(lambda value: value * 2)(x)]


@program
def fake_tensors(rank: int) -> list[Any]:
    x = drawn(rank, 3)
    work = reduced(x)
    with FakeTensorMode() as mode:
        fake = torch.ones(3) * 2 + mode.from_tensor(torch.zeros(3))
        reduced(fake).wait()
        dist.all_reduce(fake)
        shape = tuple((fake + 1).shape)
    work.wait()
    return [x, shape, tuple(torch.empty(3, device="meta").add(1).shape)]


@program
def inference(rank: int) -> list[Tensor]:
    """Calls in such blocks, waits in others, and results that are read in either."""
    x, y, z = (drawn(rank + i, 3) for i in range(3))
    with torch.inference_mode():
        before = reduced(x)
        dist.all_reduce(z)
    after = reduced(y)
    with torch.inference_mode():
        total = z * 2
        after.wait()
        total += y
        dist.barrier()
    before.wait()
    return [x * 1, y * 1, z * 1, total * 1, drawn(rank, 3) + 1]


@program
def compiled(rank: int) -> list[Tensor]:
    found = []
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()

        @torch.compile(backend=backend)
        def function(value: Tensor) -> Tensor:
            return (value * 2).sin() + value.sum()

        x = drawn(rank, 3)
        work = reduced(x)
        leaf = drawn(rank, 4).requires_grad_()
        value = function(leaf)
        value.sum().backward()
        work.wait()
        assert leaf.grad is not None
        found += [x, value.detach(), leaf.grad, function(x)]
    return found


@program
def operators_of_higher_order(rank: int) -> list[Tensor]:
    x, rows = drawn(rank, 3), drawn(rank, 1, 1, 16, 16)
    dist.all_reduce(x)
    attention = flex_attention(rows, rows, rows)
    work = reduced(y := drawn(rank, 3))
    branch = torch.cond(torch.tensor(True), lambda a: a + x, lambda a: a - x, (drawn(rank, 3),))
    work.wait()
    assert isinstance(attention, Tensor)
    return [attention, branch, y * 1]


@program
def operators_of_the_program(rank: int) -> list[Tensor]:
    @torch.library.custom_op("gpusim_checks::reduced", mutates_args=())
    def own(given: Tensor) -> Tensor:
        result = given.clone()
        reduced(result).wait()
        return result

    work = reduced(z := drawn(rank, 3))
    y = own(drawn(rank, 3))
    work.wait()
    return [y + 0, z + 0]


@program
def checkpoints(rank: int) -> list[Tensor]:
    x, leaf = drawn(rank, 3), drawn(rank, 4).requires_grad_()
    work = reduced(x)

    def function(value: Tensor) -> Tensor:
        return (value.sin() * 2).cos()

    kept = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.sin.default])
    first: Any = checkpoint(function, leaf, use_reentrant=False)
    second: Any = checkpoint(function, leaf, use_reentrant=False, context_fn=kept)
    (first + second).sum().backward()
    work.wait()
    assert leaf.grad is not None
    return [x, leaf.grad]


@program
def other_layouts(rank: int) -> list[Tensor]:
    """Operators on tensors that have no addresses, or no strides."""
    work = reduced(x := drawn(rank, 3))
    rows = [torch.ones(2, 3), torch.ones(4, 3)]
    nested = torch.nested.nested_tensor(rows)
    swapped = nested.transpose(1, 2) * 2
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged) * 2
    sparse, compressed = torch.eye(3).to_sparse() * 2, torch.eye(3).to_sparse_csr() * 2
    small = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8).dequantize()
    conjugate = torch.view_as_complex(torch.ones(3, 2)).conj() * 2
    work.wait()
    kept = [*swapped.unbind(), *jagged.unbind()]
    return [x, *kept, sparse.to_dense(), compressed.to_dense(), small, conjugate]


# ---------------------------------------------------------------- derivatives and modules


@program
def outputs_with_derivatives(rank: int) -> list[Any]:
    leaf = drawn(rank, 3).requires_grad_()
    y = leaf * leaf
    before = y._version
    reduced(y).wait()
    y.sum().backward()
    reduced(leaf).wait()
    assert leaf.grad is not None
    return [y, y._version - before, leaf, leaf.grad]


class Backwards(torch.autograd.Function):
    """Its gradient is summed over the ranks: at once, or with other work meanwhile."""

    @staticmethod
    def forward(context: Any, value: Tensor, is_async: bool) -> Tensor:
        context.is_async = is_async
        return value.clone()

    @staticmethod
    def backward(context: Any, *given: Tensor) -> Any:
        gradient = given[0].clone()
        work = dist.all_reduce(gradient, async_op=context.is_async)
        other = given[0] * 2
        if context.is_async:
            work.wait()
            return gradient + other, None
        return gradient, None


@program
def functions_with_calls(rank: int) -> Any:
    found = []
    for is_async in (False, True):
        leaf = drawn(rank, 4).requires_grad_()
        inside = Backwards.apply(leaf.sin(), is_async)
        value = Backwards.apply(inside * 2, is_async) * torch.arange(4.0)
        value.sum().backward()
        other = drawn(rank, 4).requires_grad_()
        loss = (Backwards.apply(other.exp(), is_async) * torch.arange(4.0)).sum()
        found += [leaf.grad, *torch.autograd.grad(loss, other)]
    return found


@program
def hooks(rank: int) -> list[Tensor]:
    """Gradients are reduced as they come, and waited for at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    works: list[Any] = []
    for each in model.parameters():
        each.register_post_accumulate_grad_hook(lambda p: works.append(reduced(p.grad)))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        model(drawn(rank + step, 3, 4)).square().mean().backward()
        while works:
            works.pop().wait()
        for each in model.parameters():
            assert each.grad is not None
            each.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach() for each in model.parameters()]


@program
def hooks_of_ddp(rank: int) -> list[Tensor]:
    def hook(state, bucket):  # torch reads annotations
        buffer = bucket.buffer().div_(dist.get_world_size())
        return reduced(buffer).get_future().then(lambda done: done.value()[0] * 1)

    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        model(drawn(rank + step, 3, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach() for each in model.parameters()]


@program
def calls_beside_modules(rank: int) -> list[Any]:
    """DDP's own calls while the program has one in flight."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 2))
    work = reduced(x := drawn(rank, 3))
    model(drawn(rank, 3, 4)).square().mean().backward()
    work.wait()
    return [x, [each.grad for each in model.parameters()]]


@program
def functional_calls(rank: int) -> list[Tensor]:
    """Each waits as it is used; the next call uses it too."""
    group = dist.group.WORLD
    assert group is not None
    x = functional.all_reduce(drawn(rank, 3), "sum", group)
    x = functional.all_reduce(x, "max", group)
    whole = functional.all_gather_tensor(x + 1, 0, group)
    part = functional.reduce_scatter_tensor(whole * 1, "sum", 0, group)
    raw = torch.ops._c10d_functional.all_reduce(drawn(rank, 3), "sum", group.group_name)
    raw = torch.ops._c10d_functional.wait_tensor(raw)
    return [part * 2, raw * 2]


@program
def distributed_tensors(rank: int) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    work = reduced(z := drawn(rank, 3))
    whole = drawn(0, 4, 6)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = distribute_tensor(whole.t().contiguous(), mesh, [Shard(1)])
    product = (rows @ columns).redistribute(mesh, [Replicate()])
    total: Any = rows.sum()
    work.wait()
    return [z, product.to_local(), total.full_tensor()]


# ---------------------------------------------------------------- ways to read


@program
def reads(rank: int) -> list[str]:
    """Each reads a result, past torch's operators too."""
    ways: list[Callable[[Tensor], Any]] = [
        lambda x: pickle.loads(pickle.dumps(x)),
        copy.deepcopy,
        copy.copy,
        lambda x: x.untyped_storage()[0],
        lambda x: x.numpy().tobytes(),
        lambda x: bytes(memoryview(x.numpy())),
        repr,
        lambda x: x.sum().item(),
        list,
        lambda x: [float(each) for each in x],
        torch.utils.dlpack.from_dlpack,
        np.from_dlpack,
        np.asarray,
        lambda x: bool(x[0] > 0),
        lambda x: torch.save(x, io.BytesIO()),
        lambda x: x.tolist(),
        lambda x: f"{x[0]:.2f}",
        lambda x: TwoTensor(x, x.clone()) + 1,
        torch.jit.script(_doubled),
        lambda x: nn.Linear(3, 1)(x).sum().item(),
    ]
    found = []
    for way in ways:
        torch.manual_seed(0)
        x = drawn(rank, 3)
        dist.all_reduce(x)
        found.append(str(way(x)))
        del x
        dist.barrier()
    return found


def _doubled(value: Tensor) -> Tensor:
    return value * 2 + 1


@program
def reads_of_threads(rank: int) -> list[Tensor]:
    x = drawn(rank, 3)
    dist.all_reduce(x)
    found: list[Tensor] = []
    thread = threading.Thread(target=lambda given: found.append(given + 1), args=(x,))
    thread.start()
    thread.join()
    del x, thread
    dist.barrier()
    return found


@program
def results_for_one(rank: int) -> float:
    """One rank reads what all have."""
    x = drawn(rank, 3)
    dist.all_reduce(x)
    with contextlib.suppress(ZeroDivisionError):
        return x.sum().item() if rank == 0 else 1 / 0
    return 0.0
