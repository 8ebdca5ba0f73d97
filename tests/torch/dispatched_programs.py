"""Programs that look at calls: what modes, subclasses, the profiler and works say of them.

Real gloo processes run them too. A result that is no tensor is the bytes of its JSON.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from tests.torch.distributed_programs import Results, program, start

Calls = dict[str, Callable[[], Any]]


def told(value: Any) -> Tensor:
    """A value as a tensor."""
    return torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)


def outcome(function: Callable[[], Any]) -> str:
    """What a call returns, or its error."""
    try:
        return repr(function())
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"


def all_calls(rank: int, size: int) -> Calls:
    """A call of each kind, on tensors that it makes; asynchronous where there is a choice."""
    ones = torch.ones

    def row(count: int = 1) -> list[Tensor]:
        return [ones(count) for _ in range(size)]

    def root_row() -> list[Tensor] | None:
        return row() if rank == 0 else None

    def coalesced(call: Callable[..., Any], *shapes: tuple[int, ...]) -> None:
        with dist._coalescing_manager():
            for shape in shapes:
                call(*map(ones, shape))

    def swap() -> None:
        there, back = (rank + 1) % size, (rank - 1) % size
        ends = [dist.P2POp(dist.isend, ones(1), there), dist.P2POp(dist.irecv, ones(1), back)]
        for work in dist.batch_isend_irecv(ends):
            work.wait()

    def message(source: int | None) -> Any:
        if rank == 0:
            return dist.isend(ones(2), 1, tag=3)
        return dist.irecv(ones(2), source, tag=3) if rank == 1 else None

    world: Any = dist.group.WORLD
    return {
        "all_reduce": lambda: dist.all_reduce(ones(2, 3), async_op=True),
        "all_reduce max": lambda: dist.all_reduce(ones(2), dist.ReduceOp.MAX),
        "all_reduce coalesced": lambda: dist.all_reduce_coalesced([ones(2), ones(1)]),
        "broadcast": lambda: dist.broadcast(ones(2), 0, async_op=True),
        "reduce": lambda: dist.reduce(ones(2), 0, async_op=True),
        "all_gather": lambda: dist.all_gather(row(), ones(1), async_op=True),
        "all_gather into": lambda: dist.all_gather_into_tensor(ones(size), ones(1), async_op=True),
        "all_gather coalesced": lambda: (
            dist.all_gather_coalesced([row()] * 1 * size, row())
            if size == 1
            else dist.all_gather_coalesced([[each] for each in row()], [ones(1)])
        ),
        "gather": lambda: dist.gather(ones(1), root_row(), async_op=True),
        "scatter": lambda: dist.scatter(ones(1), root_row(), async_op=True),
        "reduce_scatter": lambda: dist.reduce_scatter(ones(1), row(), async_op=True),
        "reduce_scatter tensor": lambda: dist.reduce_scatter_tensor(
            ones(1), ones(size), async_op=True
        ),
        "all_to_all": lambda: dist.all_to_all(row(), row(), async_op=True),
        "all_to_all single": lambda: dist.all_to_all_single(ones(size), ones(size), async_op=True),
        "barrier": lambda: dist.barrier(async_op=True),
        "barrier waits": dist.barrier,
        "monitored_barrier": lambda: dist.monitored_barrier(timeout=timedelta(minutes=9)),
        "message": lambda: message(0),
        "message of any": lambda: message(None),
        "swap": swap,
        "objects gathered": lambda: dist.all_gather_object([None] * size, {"a": rank}),
        "objects sent": lambda: dist.broadcast_object_list([rank, "b"]),
        "sums in one": lambda: coalesced(dist.all_reduce, (2,), (3,)),
        "gathers in one": lambda: coalesced(dist.all_gather_into_tensor, (size, 1), (2 * size, 2)),
        "scattered sums in one": lambda: coalesced(
            dist.reduce_scatter_tensor, (1, size), (2, 2 * size)
        ),
        "functional sum": lambda: funcol.all_reduce(ones(2), "sum", world) + 0,
        "functional gather": lambda: funcol.all_gather_tensor(ones(2), 0, world) + 0,
        "functional scatter": lambda: funcol.reduce_scatter_tensor(ones(size), "sum", 0, world) + 0,
    }


def waited(result: Any) -> None:
    if isinstance(result, dist.Work):
        result.wait()


class Seen(TorchDispatchMode):
    """A mode that notes the calls of torch.distributed and the shapes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in str(func):
            self.calls.append([str(func), [self._shown(each) for each in args]])
        return func(*args, **(kwargs or {}))

    def _shown(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return list(map(self._shown, value))
        if isinstance(value, Tensor):
            return list(value.shape)
        kind: Any = value._type() if isinstance(value, torch.ScriptObject) else None
        return str(value) if kind is None else kind.name()


@program
def modes() -> Results:
    """What a dispatch mode sees of each call."""
    found: Results = {}
    for name, call in all_calls(*start()).items():
        with Seen() as mode:
            waited(call())
        found[name] = told(mode.calls)
    return found


@program
def events(profiles: str = "autograd") -> Results:
    """The profiler's events of each call, without those of tensors."""
    found: Results = {}
    for name, call in all_calls(*start()).items():
        kind: Any = torch.autograd.profiler.profile
        with (kind if profiles == "autograd" else torch.profiler.profile)(record_shapes=True) as p:
            waited(call())
        seen = p.function_events if profiles == "autograd" else p.events()
        shown = [
            [each.name, each.is_async, each.input_shapes, each.count, each.scope]
            for each in seen
            if "c10d" in each.name or each.name.startswith("gloo:")
        ]
        found[name] = told(sorted(shown))  # gloo's threads race
    return found


class Wrapped(Tensor):
    """A tensor without memory of its own."""

    inner: Any

    @staticmethod
    def __new__(cls, inner: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrapped(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapped) else value

        return func(*tree_map(unwrapped, args), **tree_map(unwrapped, kwargs or {}))


@program
def subclasses() -> Results:
    """Calls on tensors that wrap others, wait for others, or are on no device."""
    rank, size = start()
    world: Any = dist.group.WORLD
    x = torch.arange(3.0) + rank
    found: Results = {}

    wrapped = Wrapped(x.clone())
    dist.all_reduce(wrapped)
    found["wrapped"] = wrapped.inner
    wrapped = Wrapped(x.clone())
    dist.broadcast(wrapped, size - 1)
    found["wrapped broadcast"] = wrapped.inner
    gathered = Wrapped(torch.zeros(3 * size))
    dist.all_gather_into_tensor(gathered, Wrapped(x.clone()))
    found["wrapped gather"] = gathered.inner

    both = TwoTensor(x.clone(), -x)
    dist.all_reduce(both)
    found["two"], found["two b"] = both.a, both.b

    late = funcol.all_reduce(x, "sum", world)
    dist.all_reduce(late)
    found["late"] = late + 0
    rows = [torch.zeros(3) for _ in range(size)]
    dist.all_gather(rows, funcol.all_reduce(x, "sum", world))
    found["late gather"] = torch.stack(rows)
    target = torch.zeros(3)
    dist.reduce_scatter_tensor(target, funcol.all_gather_tensor(x, 0, world))
    found["late scatter"] = target
    late = funcol.all_reduce(x, "sum", world)
    if rank == 0:
        for other in range(1, size):
            dist.send(late, other)
    else:
        dist.recv(target, 0)
    found["late message"] = target

    mesh = init_device_mesh("cpu", (size,))
    placed = DTensor.from_local(x.clone(), mesh, [Shard(0)])
    found["dtensor"] = told(outcome(lambda: dist.all_reduce(placed)))
    found["dtensor after"] = placed.to_local()

    meta = torch.ones(3, device="meta")
    dist.all_reduce(meta)
    found["meta"] = told(str(meta.device))
    for name, call in {
        "sparse broadcast": lambda: dist.broadcast(x.to_sparse(), 0),
        "vmap": lambda: torch.vmap(lambda row: dist.all_reduce(row))(torch.ones(2, 3)),
    }.items():
        found[name] = told(outcome(call).split(":")[0])
    return found


@program
def gradients_warn() -> Results:
    """Autograd warns of a call on a tensor that needs a gradient, as it knows none of the call."""
    _, size = start()
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.all_reduce(y)
        y.sum().backward()
    said = ["autograd kernel was not registered" in str(each.message) for each in caught]
    return {"value": y.detach(), "warned": told(any(said)), "size": told(size)}


@program
def fake() -> Results:
    """FSDP2, and all calls, of tensors that have no memory."""
    _, size = start()
    mesh = init_device_mesh("cpu", (size,))
    found: Results = {}
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        shapes = [list(each.grad.to_local().shape) for each in model.parameters()]
        x = torch.ones(3)
        dist.all_reduce(x)
    found["type"], found["shapes"] = told(type(x).__name__), told(shapes)
    x = torch.ones(3)  # and real ones go on
    dist.all_reduce(x)
    found["sum"] = x
    return found


@program
def counted() -> Results:
    """What CommDebugMode counts in a step of DDP and of FSDP2."""
    start()
    found: Results = {}
    for name in ("ddp", "fsdp2"):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
        if name == "ddp":
            model = DDP(model)
        else:
            fully_shard(model)
        with CommDebugMode() as mode:
            model(torch.ones(2, 3)).sum().backward()
            dist.all_reduce(torch.ones(1))
        counts = {str(key): count for key, count in mode.get_comm_counts().items()}
        found[name] = told(dict(sorted(counts.items())))
    return found


@program
def works() -> Results:
    """What works of asynchronous calls answer, before and after they are waited for."""
    rank, size = start()
    found: Results = {}
    for name, call in all_calls(rank, size).items():
        work: Any = call()
        if not hasattr(work, "_get_op_type"):  # synchronous
            continue
        work.wait()
        answers = [work._get_op_type(), outcome(work.is_success), outcome(work.exception)]
        answers.append(outcome(work._get_duration))
        answers.append(outcome(work.get_future_result))
        answers.append(outcome(work._source_rank))
        if "message" not in name and "reduce_scatter" not in name:  # which have none in gloo
            if name != "reduce" or rank == 0:  # what others have there is gloo's own
                answers.append(outcome(work.result))
                answers.append(outcome(work.get_future().value))
            then = work.get_future().then(lambda future: len(future.value()))
            answers.append(then.wait())
        found[name] = told(answers)
    whole: Any = dist.group.WORLD
    given = [torch.full((1,), 1.0 + rank), torch.full((2, 3), 2.0 + rank)]
    several = dist.all_gather_coalesced(
        [[torch.zeros(1), torch.zeros(2, 3)] for _ in range(size)], given, async_op=True
    )
    one = dist.all_gather_coalesced(
        [[torch.zeros(1)] for _ in range(size)], given[:1], async_op=True
    )
    work = whole.allgather_into_tensor_coalesced(
        [torch.zeros(size), torch.zeros(2 * size, 3)], given
    )
    for name, future in {"several": several, "one": one, "into": work.get_future()}.items():
        rows = future.wait()  # a list for each rank
        found[f"gathered at once, {name}"] = told([[each.tolist() for each in r] for r in rows])
    return found


def model_of(rank: int, **options: Any) -> DDP:
    torch.manual_seed(0)
    return DDP(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)), **options)


def trained(model: DDP, rank: int, steps: int, optimizer: Any = None) -> Tensor:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.linspace(-1, 1, 12).reshape(4, 3) * (1 + rank) + step
        model(x).square().mean().backward()
        optimizer.step()
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])


@program
def builtin_hooks(hook: str) -> Results:
    """DDP with a hook in C++."""
    rank, _ = start()
    model = model_of(rank)
    model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, hook))
    return {"weights": trained(model, rank, 3)}


@program
def uneven(initial: bool, zero: bool = False, **options: Any) -> Results:
    """DDP's join of ranks that have different numbers of batches."""
    rank, _ = start()
    model = model_of(rank, **options)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    if zero:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.5)
    with Join([model, optimizer] if zero else [model], divide_by_initial_world_size=initial):
        trained(model, rank, 2 + rank, optimizer)
    return {"weights": torch.cat([each.detach().reshape(-1) for each in model.parameters()])}


@program
def names() -> Results:
    """What groups and DDP say of the backend."""
    rank, _ = start()
    world: Any = dist.group.WORLD
    backend = world._get_backend(torch.device("cpu"))
    logged = model_of(rank)._get_ddp_logging_data()
    kept = ("backend_name", "gloo_socket_ifname", "gloo_device_transport", "gloo_num_threads")
    module: Any = dist.distributed_c10d
    return {
        "group": told([world.name(), world._get_backend_name(), backend.name()]),
        "configuration": told([str(dist.get_backend_config()), module._world.pg_config_info]),
        "logged": told({key: logged.get(key) for key in kept}),
        "hooks": told(world._has_hooks()),
        "store": told(world.get_group_store() is not None),
        "debug": told(dist.get_debug_level().name),
    }
