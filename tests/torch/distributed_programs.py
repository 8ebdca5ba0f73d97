"""Programs of torch.distributed: what real gloo processes and simulated ranks both run.

Each takes its own arguments by name and returns the calling rank's tensors by name. They call
init_process_group() as any script does.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

Results = dict[str, Tensor]
legacy: Any = np.random  # the global generator
PROGRAMS: dict[str, Callable[..., Results]] = {}


def program(function: Callable[..., Results]) -> Callable[..., Results]:
    """Give a program its name."""
    PROGRAMS[function.__name__] = function
    return function


def start() -> tuple[int, int]:
    """Join the group of all ranks; this rank and their number."""
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def weights(model: nn.Module) -> Results:
    """The parameters and buffers of a model, gathered where they are sharded."""
    found = {}
    for name, value in itertools.chain(model.named_parameters(), model.named_buffers()):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        found[name] = whole.detach().clone()
    return found


def batches(rank: int, steps: int, width: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Each rank's own data."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    for _ in range(steps):
        x = torch.randn(6, width, generator=generator)
        yield x, x.roll(1, 1) + 0.1 * torch.randn(6, width, generator=generator)


class Network(nn.Module):
    """Layers of the same width, with normalisation and, if asked for, dropout."""

    def __init__(self, width: int, layers: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.dropout(F.gelu(layer(x)))
        return self.norm(x)


def drawn(model: nn.Module, seed: int) -> nn.Module:
    """The model with weights from a generator of its own, which free threads do not share."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    F.mse_loss(model(x).float(), y).backward()
    optimizer.step()


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


# Data-parallel training


@program
def ddp(
    seed: int, width: int = 24, static: bool = False, accumulate: bool = False, dropout: float = 0
) -> Results:
    """DDP with several buckets and momentum."""
    rank, _ = start()
    torch.manual_seed(seed + (rank if dropout else 0))
    if dropout:  # other weights on each rank: DDP broadcasts those of rank 0
        random.seed(rank)
        legacy.seed(rank)
    model = nn.parallel.DistributedDataParallel(
        drawn(Network(width, dropout=dropout), seed + (rank if dropout else 0)),
        bucket_cap_mb=0.003,
        static_graph=static,
        gradient_as_bucket_view=static,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, (x, y) in enumerate(batches(rank, 4, width, seed)):
        if dropout:
            x = x * (1 + 0.1 * random.random()) + float(legacy.randn())
        if accumulate and number % 2 == 0:
            with model.no_sync():
                F.mse_loss(model(x), y).backward()
            continue
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@program
def ddp_hook(seed: int, hook: str, width: int = 24) -> Results:
    """DDP whose buckets PyTorch's communication hook of that name sends."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    rank, _ = start()
    model = nn.parallel.DistributedDataParallel(drawn(Network(width), seed), bucket_cap_mb=0.003)
    if hook == "powerSGD_hook":
        state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=0.5
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        function = getattr(default_hooks, hook)
        if hook.endswith("wrapper"):
            function = function(default_hooks.allreduce_hook)
        if hook.startswith("bf16"):  # DDP refuses these names without NCCL
            model.register_comm_hook(None, lambda state, bucket: function(state, bucket))
        else:
            model.register_comm_hook(None, function)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = {}
    for number, (x, y) in enumerate(batches(rank, 4, width, seed)):
        step(model, optimizer, x, y)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            found[f"{number} {name}"] = parameter.grad.clone()
    return found | weights(model)


class Gradient(nn.Module):
    """A parameter whose gradient is the input."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def spread(seed: int, rank: int, *shape: int) -> Tensor:
    """Numbers of many sizes, down to float16's subnormal ones, of a rank's own."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    exponents = torch.randint(-24, 12, shape, generator=generator)
    return torch.ldexp(torch.randn(shape, generator=generator), exponents)


@program
def hooked_means(seed: int, hook: str, sizes: list[int]) -> Results:
    """What a communication hook of DDP makes of gradients, and the rank's own ones."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    rank, _ = start()
    function, found = getattr(default_hooks, hook), {}
    for size in sizes:
        model = nn.parallel.DistributedDataParallel(Gradient(size))
        model.register_comm_hook(None, lambda state, bucket: function(state, bucket))
        found[f"own {size}"] = spread(seed + size, rank, size)
        model(found[f"own {size}"]).backward()
        found[f"mean {size}"] = model.module.weight.grad.clone()
    return found


@program
def hybrid_means(seed: int, replicas: int, sizes: list[int]) -> Results:
    """What fully_shard on a mesh of replicas and shards makes of gradients; the rank's own ones."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank, ranks = start()
    mesh = init_device_mesh(
        "cpu", (replicas, ranks // replicas), mesh_dim_names=("replicate", "shard")
    )
    found = {}
    for size in sizes:  # even shards of so many rows of two elements
        model: Any = Gradient(ranks // replicas * size, 2)
        fully_shard(model, mesh=mesh)
        found[f"own {size}"] = spread(seed + size, rank, ranks // replicas * size, 2)
        model(found[f"own {size}"]).backward()
        found[f"mean {size}"] = model.weight.grad.full_tensor()
    return found


@program
def ddp_join(seed: int) -> Results:
    """DDP with uneven inputs."""
    rank, _ = start()
    model = nn.parallel.DistributedDataParallel(drawn(Network(16), seed))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for x, y in batches(rank, 2 + rank, 16, seed):
            step(model, optimizer, x, y)
    return weights(model)


@program
def zero(seed: int) -> Results:
    """ZeroRedundancyOptimizer under DDP."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    rank, _ = start()
    model = nn.parallel.DistributedDataParallel(drawn(Network(20), seed))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    for x, y in batches(rank, 3, 20, seed):
        step(model, optimizer, x, y)
    return weights(model)


@program
def local_sgd(seed: int) -> Results:
    """Steps of each rank's own, then the mean of the weights."""
    rank, size = start()
    model = drawn(Network(16), seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number, (x, y) in enumerate(batches(rank, 6, 16, seed)):
        step(model, optimizer, x, y)
        if number % 3 == 2:
            with torch.no_grad():
                for parameter in model.parameters():
                    dist.all_reduce(parameter)
                    parameter /= size
    return weights(model)


@program
def normalised(seed: int) -> Results:
    """Batch normalisation over all ranks, which CPUs do by differentiable all-reduces."""
    from torch.distributed.nn.functional import all_reduce

    rank, size = start()
    layer = drawn(nn.Linear(8, 8), seed)
    for x, y in batches(rank, 2, 8, seed):
        z = layer(x)
        total = all_reduce(torch.stack([z.sum(0), (z * z).sum(0)]))
        mean, square = total / (len(z) * size)
        z = (z - mean) * torch.rsqrt(square - mean * mean + 1e-5)
        layer.zero_grad()
        F.mse_loss(z, y).backward()
        with torch.no_grad():
            for parameter in layer.parameters():
                dist.all_reduce(parameter.grad)
                parameter -= 0.1 * parameter.grad / size
    return weights(layer)


# Sharded training


@program
def fsdp1(seed: int) -> Results:
    """FullyShardedDataParallel."""
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    rank, _ = start()
    model = FullyShardedDataParallel(
        drawn(Network(16), seed),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for x, y in batches(rank, 3, 16, seed):
        step(model, optimizer, x, y)
    with FullyShardedDataParallel.summon_full_params(model):
        return weights(model)


@program
def fsdp2(
    seed: int, low: str = "", replicas: int = 1, width: int = 20, checkpoint: str = ""
) -> Results:
    """fully_shard, if asked for with a policy of low precision, or replicas of shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    rank, size = start()
    if replicas > 1:
        mesh = init_device_mesh(
            "cpu", (replicas, size // replicas), mesh_dim_names=("replicate", "shard")
        )
    else:
        mesh = init_device_mesh("cpu", (size,))
    dtype = getattr(torch, low) if low else None
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    model = drawn(Network(width), seed)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for number, (x, y) in enumerate(batches(rank, 3, width, seed)):
        step(model, optimizer, x, y)
        if checkpoint and number == 1:
            _save_and_load(model, optimizer, Path(checkpoint))
    return weights(model)


def _save_and_load(model: nn.Module, optimizer: Any, folder: Path) -> None:
    """Save, spoil the weights, and load."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0)
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


@program
def tensor_parallel(seed: int, sequence: bool = False, sharded: int = 1) -> Results:
    """A column-wise and a row-wise layer, if asked for sequence-parallel between, or sharded."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    rank, size = start()
    mesh = init_device_mesh("cpu", (sharded, size // sharded), mesh_dim_names=("data", "model"))
    wide = 4 * size
    layers = nn.LayerNorm(12), nn.Linear(12, wide), nn.GELU(), nn.Linear(wide, 12)
    model = drawn(nn.Sequential(*layers), seed)
    plan: dict[str, Any] = {"1": ColwiseParallel(), "3": RowwiseParallel()}
    if sequence:
        plan = {
            "0": SequenceParallel(),
            "1": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            "3": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(model, mesh["model"], {"1": ColwiseParallel()})
    parallelize_module(model, mesh["model"], plan)
    if sharded > 1:
        fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    data = rank // (size // sharded)
    for x, _ in batches(data, 2, 12, seed):
        if sequence:
            x = x.repeat(size, 1)[: 2 * size].reshape(1, 2 * size, 12)
            from torch.distributed.tensor import distribute_tensor

            given = distribute_tensor(x, mesh["model"], [Shard(1)]).to_local()
        else:
            given = x
        optimizer.zero_grad()
        y = model(given)
        (y * y).mean().backward()
        optimizer.step()
    return weights(model)


# Programs of their own


@program
def experts(seed: int) -> Results:
    """A mixture of experts, one for each rank, by uneven all_to_all in both directions."""
    from torch.distributed.nn.functional import all_to_all_single

    rank, size = start()
    router = drawn(nn.Linear(8, size), seed)
    expert = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    expert = drawn(expert, seed + 1 + rank)
    parameters = [*router.parameters(), *expert.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    for x, y in batches(rank, 3, 8, seed):
        scores = router(x).softmax(-1)
        score, chosen = scores.max(-1)
        order = chosen.argsort(stable=True)
        sent = torch.bincount(chosen, minlength=size)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        there, here = sent.tolist(), received.tolist()
        inputs = all_to_all_single(x.new_empty(sum(here), 8), x[order], here, there)
        outputs = expert(inputs)
        back = all_to_all_single(x.new_empty(len(x), 8), outputs, there, here)
        result = torch.zeros_like(x).index_put((order,), back) * score[:, None]
        optimizer.zero_grad()
        F.mse_loss(result, y).backward()
        for parameter in router.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= size
        optimizer.step()
    found = {f"router {name}": value for name, value in weights(router).items()}
    return found | {f"expert {name}": value for name, value in weights(expert).items()}


@program
def pipeline(seed: int) -> Results:
    """A pipeline stage on each rank, by torch's 1F1B schedule."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, size = start()
    stage = drawn(nn.Sequential(nn.Linear(8, 8), nn.GELU()), seed + rank)
    device = torch.device("cpu")
    made = PipelineStage(stage, rank, size, device, input_args=torch.empty(3, 8))
    schedule = Schedule1F1B(made, n_microbatches=2 * size, loss_fn=F.mse_loss)
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        x, y = torch.randn(2, 6 * size, 8, generator=generator)
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
        elif rank == size - 1:
            schedule.step(target=y, losses=[])
        else:
            schedule.step()
        optimizer.step()
    return weights(stage)


@program
def ring_attention(seed: int) -> Results:
    """Attention over a sequence that the ranks share: keys and values go around."""
    rank, size = start()
    generator = torch.Generator().manual_seed(seed + rank)
    q, k, v = torch.randn(3, 2, 5, 8, generator=generator)
    best = torch.full((2, 5, 1), -math.inf)
    total, weight = torch.zeros(2, 5, 8), torch.zeros(2, 5, 1)
    for number in range(size):
        if number:
            incoming = torch.empty(2, *k.shape)
            outgoing = torch.stack([k, v])
            for work in dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, outgoing, (rank + 1) % size),
                    dist.P2POp(dist.irecv, incoming, (rank - 1) % size),
                ]
            ):
                work.wait()
            k, v = incoming
        scores = q @ k.mT / math.sqrt(8)
        higher = torch.maximum(best, scores.amax(-1, keepdim=True))
        scale, part = torch.exp(best - higher), torch.exp(scores - higher)
        total, weight = total * scale + part @ v, weight * scale + part.sum(-1, keepdim=True)
        best = higher
    return {"attention": total / weight}


@program
def autocast(seed: int, meet: bool = False) -> Results:
    """DDP under automatic mixed precision: each rank has its own cache of cast weights."""
    rank, _ = start()
    shared = drawn(nn.Linear(16, 16), seed)
    model: nn.Module = nn.Sequential(shared, nn.GELU(), shared)
    if not meet:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(rank, 3, 16, seed):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            z = model(x)
            if meet:
                dist.barrier()
                z = z + model(x)
            loss = F.mse_loss(z, y)
        loss.backward()
        optimizer.step()
    return weights(model)


# What ranks must not share


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


calls: list[int] = []  # of hooks; of all ranks, where hooks are


def _contexts() -> dict[str, tuple[Callable[[], Any], Callable[[], Any]]]:
    """Contexts that set what a process has once, and what shows it inside."""
    import builtins
    import contextlib
    import gc
    import io
    import logging
    import sys
    import warnings

    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental import implicit_replication
    from torch.distributed.tensor.parallel import loss_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.modules.module import register_module_forward_hook
    from torch.nn.utils import parametrize
    from torch.optim.optimizer import register_optimizer_step_pre_hook
    from torch.utils import checkpoint
    from torch.utils.flop_counter import FlopCounterMode

    private: Any = torch._C
    dispatcher: Any = DTensor._op_dispatcher

    @contextlib.contextmanager
    def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
        before = getattr(owner, name)
        setattr(owner, name, value)
        yield
        setattr(owner, name, before)

    @contextlib.contextmanager
    def hooked(register: Callable[[Any], Any]) -> Iterator[None]:
        handle = register(lambda *given: calls.append(1))
        yield
        handle.remove()

    @contextlib.contextmanager
    def collecting(on: bool) -> Iterator[None]:
        before = gc.isenabled()
        (gc.enable if on else gc.disable)()
        yield
        (gc.enable if before else gc.disable)()

    @contextlib.contextmanager
    def logged() -> Iterator[None]:
        level = root.level
        root.addHandler(quiet)
        root.setLevel(logging.ERROR)
        logging.disable(logging.CRITICAL)
        yield
        logging.disable(logging.NOTSET)
        root.setLevel(level)
        root.removeHandler(quiet)

    @contextlib.contextmanager
    def raising() -> Iterator[None]:
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)
            yield

    def warns() -> bool:
        try:
            with open("/dev/null", "w") as nowhere, contextlib.redirect_stderr(nowhere):
                warnings.warn("old", DeprecationWarning, stacklevel=1)
        except DeprecationWarning:
            return True
        return False

    def counted(act: Callable[[], Any]) -> int:
        calls.clear()
        act()
        return len(calls)

    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    attention = F.scaled_dot_product_attention
    other = lambda *given, **named: attention(*given, **named)  # noqa: E731
    text = io.StringIO()
    root, quiet = logging.getLogger(), logging.NullHandler()
    return {
        "anomaly": (torch.autograd.detect_anomaly, torch.is_anomaly_enabled),
        "attention": (
            lambda: sdpa_kernel(SDPBackend.MATH),
            lambda: private._get_flash_sdp_enabled() + 2 * private._get_math_sdp_enabled(),
        ),
        "replaced attention": (
            lambda: replaced(F, "scaled_dot_product_attention", other),
            lambda: F.scaled_dot_product_attention is attention,
        ),
        "mkldnn": (
            lambda: torch.backends.mkldnn.flags(enabled=False),
            lambda: torch.backends.mkldnn.enabled,
        ),
        "cudnn": (
            lambda: torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=True),
            lambda: private._get_cudnn_benchmark() + 2 * private._get_cudnn_deterministic(),
        ),
        "parametrize": (parametrize.cached, lambda: parametrize._cache_enabled),
        "early stop": (
            lambda: checkpoint.set_checkpoint_early_stop(False),
            lambda: checkpoint._enable_checkpoint_early_stop is None,
        ),
        "loss parallel": (loss_parallel, lambda: len(dispatcher._custom_op_handlers)),
        "implicit replication": (
            implicit_replication,
            lambda: dispatcher._allow_implicit_replication,
        ),
        "module hook": (
            lambda: hooked(register_module_forward_hook),
            lambda: counted(lambda: layer(torch.ones(2))),
        ),
        "optimizer hook": (
            lambda: hooked(register_optimizer_step_pre_hook),
            lambda: counted(optimizer.step),
        ),
        "dispatch mode": (
            lambda: FlopCounterMode(display=False),
            lambda: torch.utils._python_dispatch._is_in_torch_dispatch_mode,
        ),
        "mutation": (
            torch.autograd.graph.allow_mutation_on_saved_tensors,
            lambda: torch.autograd.graph._allow_mutation_on_saved_tensors_enabled,
        ),
        "print": (
            lambda: replaced(builtins, "print", counted),
            lambda: builtins.print is counted,
        ),
        "standard output": (
            lambda: contextlib.redirect_stdout(text),
            lambda: sys.stdout is text,
        ),
        "warnings": (raising, warns),
        "logging": (
            logged,
            lambda: (quiet in root.handlers) + 2 * (root.level == 40) + 4 * root.isEnabledFor(50),
        ),
        "garbage": (lambda: collecting(False), gc.isenabled),
        "default dtype": (
            lambda: _dtype(torch.float64),
            lambda: torch.ones(1).dtype == torch.float64,
        ),
        "grad mode": (torch.no_grad, torch.is_grad_enabled),
        "inference mode": (torch.inference_mode, torch.is_inference_mode_enabled),
        "device": (lambda: torch.device("meta"), lambda: torch.ones(1).is_meta),
        "saved tensors": (
            lambda: torch.autograd.graph.saved_tensors_hooks(
                lambda x: calls.append(1) or x, lambda x: x
            ),
            lambda: counted(lambda: layer(torch.ones(2, 2)).square()),
        ),
        "errstate": (lambda: np.errstate(all="raise"), lambda: np.geterr()["over"] == "raise"),
        "autocast": (
            lambda: torch.autocast("cpu", torch.bfloat16),
            lambda: layer(torch.ones(2, 2)).dtype == torch.bfloat16,
        ),
    }


def _dtype(dtype: torch.dtype) -> Any:
    import contextlib

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        yield
        torch.set_default_dtype(before)

    return context()


@program
def contexts() -> Results:
    """Contexts in which ranks wait, each from its own step to two steps later."""
    rank, size = start()
    found = {}
    for name, (context, observe) in _contexts().items():
        seen, entered = [], None
        for number in range(size + 3):
            if number == rank:
                entered = context()
                entered.__enter__()
            if number == rank + 2 and entered is not None:
                entered.__exit__(None, None, None)
            seen.append(int(observe()))
            dist.barrier()
        found[name] = torch.tensor(seen)
    return found


@program
def planned(seed: int, checkpoint: str) -> Results:
    """Checkpoints with plans that each process keeps, of the steps of a sharded network."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.fsdp import fully_shard

    rank, _ = start()
    model = drawn(Network(12), seed)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = {}
    for number, (x, y) in enumerate(batches(rank, 3, 12, seed)):
        step(model, optimizer, x, y)
        where = Path(checkpoint) / str(number)
        dcp.save(
            model.state_dict(),
            checkpoint_id=where,
            planner=DefaultSavePlanner(enable_plan_caching=True),
        )
        state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
        dcp.load(state, checkpoint_id=where)
        found |= {f"{name} {number}": v.full_tensor() for name, v in state.items()}
    return found


@program
def parallel_loss(seed: int) -> Results:
    """Tensor parallelism with logits that stay sharded, and a weight that is computed once."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )
    from torch.nn.utils import parametrizations, parametrize

    _, size = start()
    mesh = init_device_mesh("cpu", (size,))
    model = drawn(
        nn.Sequential(nn.Embedding(4 * size, 8), nn.Linear(8, 4 * size), nn.Linear(4 * size, 12)),
        seed,
    )
    parallelize_module(
        model,
        mesh,
        {
            "0": RowwiseParallel(input_layouts=Replicate()),
            "1": ColwiseParallel(),
            "2": RowwiseParallel(output_layouts=Replicate()),
        },
    )
    head = drawn(nn.Linear(12, 4 * size), seed + 1)
    parallelize_module(
        head, mesh, ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    )
    bent = parametrizations.weight_norm(drawn(nn.Linear(12, 12), seed + 2))
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters(), *bent.parameters()], 0.1)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        tokens = torch.randint(4 * size, (10,), generator=generator)
        optimizer.zero_grad()
        with loss_parallel(), parametrize.cached():
            hidden = bent(model(tokens))
            dist.barrier()
            loss = F.cross_entropy(head(bent(hidden)), tokens.roll(-1))
            loss.backward()
        optimizer.step()
    return weights(model) | {f"head {n}": v for n, v in weights(head).items()} | weights(bent)


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


# Random programs


@program
def mixture(seed: int) -> Results:
    """Blocks of training in a random order, of models that are sharded in each way."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.utils import parametrizations, parametrize
    from torch.utils.checkpoint import checkpoint

    rank, size = start()
    draw = random.Random(seed)  # the same on all ranks
    torch.manual_seed(seed)  # dropout, and rank's own
    random.seed(rank)
    legacy.seed(rank)
    mesh = init_device_mesh("cpu", (size,))
    width = 6 * size

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.out = nn.Linear(width, width), nn.Linear(width, width)
            self.again = draw.random() < 0.5
            self.drop = draw.choice([0.0, 0.3])

        def forward(self, x: Tensor) -> Tensor:
            y = F.dropout(F.gelu(self.into(x)), self.drop)
            if draw_in.random() < 0.3:
                dist.barrier()
            return x + self.out(y)

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if block.again else block(x)
            return x

    draw_in = random.Random(seed + 1)

    def replicated() -> nn.Module:
        return nn.parallel.DistributedDataParallel(
            drawn(Stack(), seed),
            bucket_cap_mb=draw.choice([0.002, 25]),
            find_unused_parameters=draw.random() < 0.3,
        )

    def sharded() -> nn.Module:
        low = draw.choice([None, torch.bfloat16])
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=low)
        model = drawn(Stack(), seed)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)

    def parallel() -> nn.Module:
        model = drawn(Stack(), seed)
        for block in model.blocks:
            block.drop = 0.0  # each rank has a part of it
            parallelize_module(block, mesh, {"into": ColwiseParallel(), "out": RowwiseParallel()})
        return model

    def bent() -> nn.Module:
        model = drawn(Stack(), seed)
        for block in model.blocks:
            block.again = False  # torch refuses a weight that is cached in one of two passes
            parametrizations.weight_norm(block.into)
        return nn.parallel.DistributedDataParallel(model)

    makers = {"ddp": replicated, "fsdp2": sharded, "tp": parallel, "bent": bent}
    models = {name: makers[name]() for name in draw.sample(sorted(makers), 2)}
    optimizers = {
        name: draw.choice([torch.optim.SGD, torch.optim.AdamW])(model.parameters(), lr=0.01)
        for name, model in models.items()
    }
    data = batches(rank, 100, width, seed)
    common = batches(0, 100, width, seed)
    found: Results = {}
    for number in range(draw.randrange(3, 7)):
        name = draw.choice(sorted(models))
        model, optimizer = models[name], optimizers[name]
        x, y = next(common if name == "tp" else data)
        kind = draw.choice(["plain", "autocast", "cached", "attention", "accumulate", "noise"])
        if name != "ddp" and kind == "autocast":
            kind = "plain"
        if kind == "noise":
            found[f"noise {number}"] = torch.tensor(
                [torch.rand(1).item(), random.random(), legacy.randn()], dtype=torch.float64
            )
            dist.barrier()
        optimizer.zero_grad()
        if kind == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(model(x).float(), y)
        elif kind == "cached":
            with parametrize.cached():
                z = model(x)
                dist.barrier()
                loss = F.mse_loss(model(z).float() if name == "bent" else z.float(), y)
        elif kind == "attention":
            with sdpa_kernel(SDPBackend.MATH):
                z = model(x).float().reshape(1, 2, 3, width)
                loss = F.scaled_dot_product_attention(z, z, z).square().mean()
        else:
            loss = F.mse_loss(model(x).float(), y)
        loss.backward()
        if kind == "accumulate" and name != "tp":
            x, y = next(data)
            F.mse_loss(model(x).float(), y).backward()
        optimizer.step()
        found[f"loss {number}"] = loss.detach()
    for name, model in models.items():
        found |= {f"{name} {key}": value for key, value in weights(model).items()}
    return found
