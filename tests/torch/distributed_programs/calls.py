"""Programs of calls: collectives, messages and groups, with all forms of tensors."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tests.torch.distributed_programs.base import Results, program, start

# Single collectives


@program
def collectives(sizes: list[int], dtypes: list[str], seed: int) -> Results:
    """Each collective that gloo has, on values whose sums are rounded."""
    rank, size = start()
    found = {}
    for count, name in itertools.product(sizes, dtypes):
        dtype = getattr(torch, name)
        generator = torch.Generator().manual_seed(seed * 100 + rank)
        x = torch.randn(count, generator=generator) * 3
        x = (x * 10).to(dtype) if not dtype.is_floating_point else x.to(dtype)
        key = f"{name} {count}"
        for op in ("SUM", "PRODUCT", "MIN", "MAX"):
            y = x.clone()
            dist.all_reduce(y, getattr(dist.ReduceOp, op))
            found[f"all_reduce {op} {key}"] = y
            y = x.clone()
            root = count % size
            dist.reduce(y, root, getattr(dist.ReduceOp, op))
            if rank == root:
                found[f"reduce {op} {key}"] = y
        wide = torch.cat([x.roll(r) for r in range(size)])
        out = torch.empty_like(x)
        dist.reduce_scatter_tensor(out, wide)
        found[f"reduce_scatter_tensor {key}"] = out
        out = torch.empty_like(x)
        dist.reduce_scatter(out, list(wide.chunk(size)))
        found[f"reduce_scatter {key}"] = out
        if dtype.is_floating_point:
            y = x.clone()
            dist.all_reduce(y, dist.ReduceOp.AVG)
            found[f"all_reduce AVG {key}"] = y
            out = torch.empty_like(x)
            dist.reduce_scatter_tensor(out, wide, dist.ReduceOp.AVG)
            found[f"reduce_scatter_tensor AVG {key}"] = out
        gathered = torch.empty(size * count, dtype=dtype)
        dist.all_gather_into_tensor(gathered, x)
        found[f"all_gather_into_tensor {key}"] = gathered
        out = torch.empty_like(wide)
        dist.all_to_all_single(out, wide)
        found[f"all_to_all_single {key}"] = out
        if not dtype.is_floating_point:
            for op in ("BAND", "BOR", "BXOR"):
                y = x.clone()
                dist.all_reduce(y, getattr(dist.ReduceOp, op))
                found[f"all_reduce {op} {key}"] = y
    return found


@program
def rearrangements(seed: int) -> Results:
    """The collectives that move data, in their forms."""
    rank, size = start()
    x = torch.arange(6.0).reshape(2, 3) + 100 * rank + seed
    found = {}
    y = x.clone()
    dist.broadcast(y, size - 1)
    found["broadcast"] = y
    row = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(row, x)
    found["all_gather"] = torch.stack(row)
    row = [torch.empty_like(x) for _ in range(size)] if rank == 0 else None
    dist.gather(x, row, 0)
    if row is not None:
        found["gather"] = torch.stack(row)
    y = torch.empty_like(x)
    dist.scatter(y, [x + r for r in range(size)] if rank == 1 else None, 1)
    found["scatter"] = y
    sends = [torch.full((2, 3), float(rank * 10 + r)) for r in range(size)]
    row = [torch.empty(2, 3) for _ in range(size)]
    dist.all_to_all(row, sends)
    found["all_to_all"] = torch.cat(row)
    rows = torch.arange(float(2 * sum(range(1, size + 1)))).reshape(-1, 2) + 1000 * rank
    out = torch.empty(size * (rank + 1), 2)
    dist.all_to_all_single(out, rows, [rank + 1] * size, [r + 1 for r in range(size)])
    found["all_to_all_single"] = out
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank})
    found["all_gather_object"] = torch.tensor(
        [each["rank"] + len(each["text"]) for each in objects]
    )
    shared = [{"seed": seed, "rank": rank}] if rank == 0 else [None]
    dist.broadcast_object_list(shared, 0)
    found["broadcast_object_list"] = torch.tensor(shared[0]["rank"])
    got: list[Any] = [None]
    dist.scatter_object_list(got, [[r, "a"] for r in range(size)] if rank == 0 else None, 0)
    found["scatter_object_list"] = torch.tensor(got[0][0])
    everyone: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object((rank, "b"), everyone, 0)
    if everyone is not None:
        found["gather_object"] = torch.tensor([each[0] for each in everyone])
    dist.barrier()
    dist.monitored_barrier()
    return found


@program
def messages(seed: int) -> Results:
    """Messages between ranks: blocking, asynchronous, in batches, tagged, of any rank."""
    rank, size = start()
    found = {}
    x = torch.arange(4.0) + 10 * rank + seed
    y = torch.empty(4)
    after, before = (rank + 1) % size, (rank - 1) % size
    if rank % 2 == 0 and rank + 1 < size:
        dist.send(x, rank + 1)
        dist.recv(y, rank + 1)
        found["send and recv"] = y.clone()
    elif rank % 2:
        dist.recv(y, rank - 1)
        dist.send(x, rank - 1)
        found["send and recv"] = y.clone()
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, y, before)]
    )
    for work in works:
        work.wait()
    found["ring"] = y.clone()
    one, two = torch.empty(4), torch.empty(4)
    works = [dist.isend(x, after, tag=1), dist.isend(x + 1, after, tag=2)]
    works += [dist.irecv(two, before, tag=2), dist.irecv(one, before, tag=1)]
    for work in works:
        work.wait()
    found["tags"] = torch.stack([one, two])
    if rank == 0:
        total = torch.zeros(4)
        senders = []
        for _ in range(size - 1):
            senders.append(dist.recv(y))
            total += y
        found["any"] = torch.cat([total, torch.tensor(sorted(senders)).float()])
    else:
        dist.send(x, 0)
    return found


@program
def groups(seed: int) -> Results:
    """Groups of some ranks, asynchronous calls and their futures, coalesced calls."""
    rank, size = start()
    found = {}
    x = torch.randn(33, generator=torch.Generator().manual_seed(seed + rank))
    outer = [0, size - 1] if rank in (0, size - 1) else [rank]
    mine = dist.new_group(outer, use_local_synchronization=True)  # one on each rank: names count
    y = x.clone()
    dist.all_reduce(y, group=mine)
    found["mine"] = y
    odd = dist.new_group(list(range(1, size, 2)))
    if rank % 2:
        y = x.clone()
        dist.all_reduce(y, group=odd)
        found["odd"] = y
    halves, _ = dist.new_subgroups_by_enumeration([[0], list(range(1, size))])
    y = x.clone()
    dist.all_reduce(y, group=halves)
    found["halves"] = y
    a, b = x.clone(), x.clone() * 2
    first = dist.all_reduce(a, async_op=True)
    second = dist.all_reduce(b, async_op=True)
    second.wait()
    first.wait()
    found["async"] = torch.stack([a, b])
    a = x.clone()
    future = dist.all_reduce(a, async_op=True).get_future().then(lambda f: f.value()[0] / size)
    found["future"] = future.wait()
    pair = [x.clone(), x.clone().neg()]
    with dist.distributed_c10d._coalescing_manager():
        for each in pair:
            dist.all_reduce(each)
    found["coalesced"] = torch.stack(pair)
    with dist.distributed_c10d._coalescing_manager():
        outs = [torch.empty(2), torch.empty(3)]
        for number, out in enumerate(outs):
            dist.reduce_scatter_tensor(out, x[number : number + size * len(out)].clone())
    found["coalesced scatter"] = torch.cat(outs)
    with dist.distributed_c10d._coalescing_manager():
        outs = [torch.empty(2 * size), torch.empty(3 * size)]
        for number, out in enumerate(outs):
            dist.all_gather_into_tensor(out, x[: 2 + number].clone())
    found["coalesced gather"] = torch.cat(outs)
    dist.destroy_process_group(halves)
    return found


@program
def functional(seed: int) -> Results:
    """Functional collectives, and collectives with gradients."""
    import torch.distributed._functional_collectives as functional
    import torch.distributed.nn.functional as differentiable

    rank, size = start()
    x = torch.randn(4 * size, 3, generator=torch.Generator().manual_seed(seed + rank))
    group = dist.group.WORLD
    assert group is not None
    found = {
        "all_reduce": functional.all_reduce(x, "sum", group) * 1,
        "all_gather": functional.all_gather_tensor(x, 0, group) * 1,
        "reduce_scatter": functional.reduce_scatter_tensor(x, "sum", 0, group) * 1,
        "all_to_all": functional.all_to_all_single(x, None, None, group) * 1,
    }
    for name, function in {
        "all_reduce": lambda x: differentiable.all_reduce(x),
        "all_gather": lambda x: torch.cat(differentiable.all_gather(x)),
        "broadcast": lambda x: differentiable.broadcast(x, 0),
        "functional": lambda x: functional.all_gather_tensor_autograd(x, 0, group),
        "scattered": lambda x: functional.reduce_scatter_tensor_autograd(x, "sum", 0, group),
    }.items():
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        (y * (rank + 1) * torch.arange(1.0, 1 + y.numel()).reshape(y.shape)).sum().backward()
        assert leaf.grad is not None
        found[f"gradient of {name}"] = leaf.grad
    return found


# The rest of torch.distributed's functions, and forms of tensors

DTYPES = (
    "bool int8 uint8 int32 int64 float16 bfloat16 float32 float64 complex64 complex128"
).split()


def forms(name: str, rank: int) -> dict[str, Tensor]:
    """Tensors of several forms."""
    x = torch.arange(1, 13).reshape(3, 4) * 3 + 5 * rank
    x = x % 2 == 0 if name == "bool" else x.float().to(getattr(torch, name))
    return {
        "plain": x,
        "scalar": x[0, 0].clone(),
        "empty": x[:0].clone(),
        "transposed": x.T,
        "strided": x[:, ::2],
    }


@program
def variants() -> Results:
    """Reductions and rearrangements of each dtype and form; 1 where one is refused."""
    rank, size = start()
    found: Results = {}

    def note(name: str, act: Callable[[Tensor], Tensor | None], x: Tensor) -> None:
        y = x.clone(memory_format=torch.preserve_format)
        try:
            made = act(y)
        except (RuntimeError, TypeError, ValueError):
            found[f"{name} refused"] = torch.ones(1)
        else:
            made = y if made is None else made  # gloo adds the bytes of bool
            found[name] = torch.where(made, 1, 0) if made.dtype == torch.bool else made

    def listed(act: Callable[[list[Tensor]], object], x: Tensor) -> Tensor:
        row = [torch.zeros_like(x) for _ in range(size)]
        act(row)
        return torch.cat([each.reshape(-1) for each in row])

    for name in DTYPES:
        for form, x in forms(name, rank).items():
            key = f"{name} {form}"
            for op in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG"):
                reduce_op = getattr(dist.ReduceOp, op)
                note(f"all_reduce {op} {key}", lambda y, op=reduce_op: dist.all_reduce(y, op), x)
            for root in range(size):
                note(
                    f"reduce {root} {key}",
                    lambda y, root=root: dist.reduce(y, root) or (None if rank == root else y * 0),
                    x,
                )
            note(f"reduce_scatter {key}", lambda y: dist.reduce_scatter(y, [y.clone()] * size), x)
            note(f"broadcast {key}", lambda y: dist.broadcast(y, size - 1), x)
            note(
                f"all_gather {key}",
                lambda y: listed(lambda row: dist.all_gather(row, y), y),
                x,
            )
            if not x.is_complex():  # which gloo does not gather
                note(
                    f"gather {key}",
                    lambda y: listed(lambda row: dist.gather(y, None if rank else row, 0), y),
                    x,
                )
            if form != "transposed":
                note(
                    f"all_to_all {key}",
                    lambda y: listed(lambda row: dist.all_to_all(row, [y] * size), y),
                    x,
                )
            note(
                f"scatter {key}",
                lambda y: dist.scatter(y, None if rank else [y.clone() for _ in range(size)], 0),
                x,
            )
    return found


@program
def splits() -> Results:
    """Sizes of a split in each kind of sequence; 1 where a kind is refused."""
    rank, size = start()
    sizes = [1 + (rank + other) % size for other in range(size)]  # to a rank as many as from it
    x = torch.arange(float(sum(sizes))) + 10 * rank
    kinds: dict[str, Callable[[list[int]], Any]] = {
        "list": list,
        "tuple": tuple,
        "size": torch.Size,
        "array": np.array,
        "small array": lambda values: np.array(values, np.int32),
        "NumPy's": lambda values: list(np.array(values)),
        "tensors": lambda values: list(torch.tensor(values)),
        "generator": lambda values: (value for value in values),
        "tensor": torch.tensor,
        "iterator": iter,
        "mapping": dict.fromkeys,
        "floats": lambda values: list(map(float, values)),
        "array of floats": lambda values: np.array(values, float),
        "text": lambda values: "".join(map(str, values)),
    }
    found: Results = {}
    for name, kind in kinds.items():
        out = torch.empty_like(x)
        try:
            dist.all_to_all_single(out, x, kind(sizes), kind(sizes))
        except TypeError:
            out = torch.ones(())
        found[name] = out
    return found


@program
def subgroups(seed: int) -> Results:
    """Groups made in each way, coalesced calls, and what is left of messages and objects."""
    rank, size = start()
    x = torch.randn(12, generator=torch.Generator().manual_seed(seed + rank))
    found = {}

    def total(name: str, group: Any) -> None:
        if group not in (None, dist.GroupMember.NON_GROUP_MEMBER):
            y = x.clone()
            dist.all_reduce(y, group=group)
            found[name] = y

    whole, groups = dist.new_subgroups(size)
    found["subgroups"] = torch.tensor(len(groups))
    total("subgroup", whole)
    single, _ = dist.new_subgroups(1)
    total("single", single)
    pairs = [[r, r + 1] for r in range(0, size - 1, 2)]
    mine, _ = dist.new_subgroups_by_enumeration(pairs)
    total("enumerated", mine)
    described = dist.new_group([0, 1], group_desc="first two")
    if rank < 2:
        total("described", described)
        assert described.group_desc == "first two"
        found["place"] = torch.tensor(dist.get_group_rank(described, rank))
        found["ranks"] = torch.tensor(dist.get_process_group_ranks(described))

    pair = [x.clone(), x[:5].clone()]
    dist.all_reduce_coalesced(pair)
    found["all_reduce_coalesced"] = torch.cat(pair)
    work = dist.all_reduce_coalesced([pair[0]], dist.ReduceOp.MAX, async_op=True)
    work.wait()
    found["all_reduce_coalesced MAX"] = pair[0]
    rows = [[torch.empty(12), torch.empty(5)] for _ in range(size)]
    dist.all_gather_coalesced(rows, [x.clone(), x[:5].clone()])
    found["all_gather_coalesced"] = torch.cat([each for row in rows for each in row])
    wide = torch.empty(12 * size)
    dist.distributed_c10d._all_gather_base(wide, x)
    found["_all_gather_base"] = wide.clone()
    out = torch.empty(12)
    dist.distributed_c10d._reduce_scatter_base(out, wide * (rank + 1))
    found["_reduce_scatter_base"] = out
    dist.barrier(async_op=True).wait()
    dist.monitored_barrier(wait_all_ranks=True)

    y = torch.empty(12)
    if rank == 0:
        received = []
        for _ in range(size - 1):
            work = dist.irecv(y)
            work.wait()
            received.append(y.clone())
        found["any"] = torch.stack(sorted(received, key=lambda each: float(each[0])))
    else:
        dist.send(x, 0)
    dist.barrier()
    if rank == 0:
        objects: list[Any] = [None, None]
        found["sender"] = torch.tensor(dist.recv_object_list(objects, src=1))
        found["object"] = torch.tensor(objects[0]["rank"] + len(objects[1]))
    elif rank == 1:
        dist.send_object_list([{"rank": 7}, "text"], dst=0)
    gathered: list[Any] | None = [None] * size if rank == size - 1 else None
    dist.gather_object({"rank": rank}, gathered, dst=size - 1)
    if gathered is not None:
        found["gather_object"] = torch.tensor([each["rank"] for each in gathered])
    got: list[Any] = [None]
    dist.scatter_object_list(got, list(range(10, 10 + size)) if rank == 1 else None, src=1)
    found["scatter_object_list"] = torch.tensor(got[0])
    return found


@program
def redistributed(seed: int, shape: list[int]) -> Results:
    """DTensors of uneven shards on a mesh of several dimensions, and what they are made into."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    start()
    names = ("a", "b", "c")[: len(shape)]
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=names)
    mesh[names[:2]]._flatten("ab")
    draw, found = random.Random(seed), {}
    for number in range(8):
        rows, columns = draw.randrange(1, 12), draw.randrange(1, 12)
        whole = torch.randn(rows, columns, generator=torch.Generator().manual_seed(number))
        x = distribute_tensor(
            whole, mesh, [draw.choice([Shard(0), Shard(1), Replicate()]) for _ in shape]
        )
        y = x.redistribute(placements=[draw.choice([Shard(0), Shard(1)]) for _ in shape])
        z = y @ y.T + (x * 2 + x.new_ones(rows, columns)).sum()
        found |= {f"y {number}": y.to_local(), f"z {number}": z.to_local()}
        found |= {f"{k} {number}": v.full_tensor() for k, v in {"Y": y, "Z": z}.items()}
    flat = distribute_tensor(torch.arange(11.0), mesh["ab"], [Shard(0)])
    return found | {"flat": flat.to_local(), "sum": flat.sum().full_tensor()}
