"""Programs of training: data, sharded, tensor, expert, pipeline and context parallel."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.torch.distributed_programs.base import (
    Network,
    Results,
    batches,
    drawn,
    legacy,
    program,
    start,
    step,
    weights,
)

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
    # powerSGD's callbacks send, in an order of each rank's own: over gloo several buckets may hang
    size = 25 if hook == "powerSGD_hook" else 0.003
    model = nn.parallel.DistributedDataParallel(drawn(Network(width), seed), bucket_cap_mb=size)
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
