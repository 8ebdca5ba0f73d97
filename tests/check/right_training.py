"""Training programs that are right, though their ranks differ at times: the check is silent."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["PROGRAMS"]

PROGRAMS: dict[str, Callable[[int], Any]] = {}


def program(function: Callable[[int], Any]) -> Callable[[int], Any]:
    PROGRAMS[function.__name__] = function
    return function


def begin(seed: int | None = 0) -> tuple[int, int]:
    dist.init_process_group("gloo")
    if seed is not None:
        torch.manual_seed(seed)
    return dist.get_rank(), dist.get_world_size()


def model_of(width: int = 6, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width, 2 * width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(2 * width, 3)
    )


def batch(rank: int, step: int, rows: int = 8, width: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(rows, width, generator=generator)
    return x, torch.randint(3, (rows,), generator=generator)


def train(model: Any, optimizer: Any, rank: int, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def average(model: nn.Module) -> None:
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


@program
def hand_made(rank: int) -> None:
    rank, _ = begin()
    model = model_of(dropout=0.2)
    optimizer = torch.optim.Adam(model.parameters())
    torch.manual_seed(rank)
    for step in range(3):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        average(model)
        optimizer.step()


@program
def local_sgd(rank: int) -> None:
    rank, world = begin()
    model = model_of()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for part in range(2):
        train(model, optimizer, rank, 2, 2 * part)
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= world


@program
def one_average_of_copies(rank: int) -> None:
    rank, world = begin()
    model = model_of()
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    train(model, torch.optim.SGD(model.parameters(), 0.1), rank, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parts = [torch.empty_like(parameter) for _ in range(world)]
            dist.all_gather(parts, parameter.data)
            parameter.copy_(torch.stack(parts).mean(0))


@program
def federated(rank: int) -> None:
    rank, world = begin(None)
    model = model_of()
    for part in range(2):
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)
        train(model, torch.optim.SGD(model.parameters(), 0.1), rank, 2, 2 * part)
        states = [None] * world if rank == 0 else None
        dist.gather_object(model.state_dict(), states)
        if rank == 0:
            mean = {
                name: sum(state[name] for state in states) / world for name in model.state_dict()
            }
            model.load_state_dict(mean)


@program
def diloco(rank: int) -> None:
    rank, world = begin()
    model = model_of()
    outer = torch.optim.SGD(model.parameters(), 0.7, momentum=0.9, nesterov=True)
    for part in range(2):
        start = [each.detach().clone() for each in model.parameters()]
        train(model, torch.optim.AdamW(model.parameters(), 1e-2), rank, 2, 2 * part)
        for parameter, before in zip(model.parameters(), start, strict=True):
            delta = before - parameter.detach()
            dist.all_reduce(delta)
            parameter.data.copy_(before)
            parameter.grad = delta / world
        outer.step()


@program
def folds(rank: int) -> None:
    """Cross-validation: each rank trains a model of its own, and the scores are averaged."""
    rank, world = begin()
    model = model_of()
    train(model, torch.optim.SGD(model.parameters(), 0.1), rank, 3)
    x, y = batch(rank, 99)
    score = (model(x).argmax(-1) == y).float().mean()
    dist.all_reduce(score)
    assert 0 <= score / world <= 1


@program
def zero_redundancy(rank: int) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    rank, _ = begin()
    model = DistributedDataParallel(model_of())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    train(model, optimizer, rank, 3)


@program
def sharded_by_hand(rank: int) -> None:
    """ZeRO by hand: each rank steps its own parameters, with gradients reduced to it alone."""
    rank, world = begin()
    model = model_of()
    own = list(model.parameters())[rank % 4 :: 4]
    optimizer = torch.optim.SGD(own, 0.1)
    for step in range(2):
        x, y = batch(rank, step)
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for place, parameter in enumerate(model.parameters()):
            dist.reduce(parameter.grad, place % 4 if world > place % 4 else 0)
        optimizer.step()
        for place, parameter in enumerate(model.parameters()):
            dist.broadcast(parameter.data, place % 4 if world > place % 4 else 0)


@program
def post_local_sgd(rank: int) -> None:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    rank, _ = begin()
    model = model_of()
    averager = PeriodicModelAverager(period=2, warmup_steps=0)
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), 0.1), averager)
    train(model, optimizer, rank, 4)


@program
def gan(rank: int) -> None:
    rank, _ = begin()
    maker, judge = nn.Linear(4, 6), nn.Linear(6, 1)
    making, judging = DistributedDataParallel(maker), DistributedDataParallel(judge)
    first = torch.optim.Adam(making.parameters(), 1e-2)
    second = torch.optim.Adam(judging.parameters(), 1e-2)
    torch.manual_seed(rank)
    for step in range(2):
        x, _ = batch(rank, step)
        fake = making(torch.randn(8, 4))
        second.zero_grad()
        (F.softplus(-judging(x)).mean() + F.softplus(judging(fake.detach())).mean()).backward()
        second.step()
        first.zero_grad()
        F.softplus(-judging(fake)).mean().backward()
        first.step()


@program
def pipeline(rank: int) -> None:
    rank, world = begin()
    stage = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(stage.parameters(), 0.1)
    for step in range(2):
        x, _ = batch(0, step)
        if rank:
            dist.recv(x, rank - 1)
        x.requires_grad_()
        y = stage(x)
        if rank + 1 < world:
            dist.send(y.detach(), rank + 1)
            gradient = torch.empty_like(y)
            dist.recv(gradient, rank + 1)
        else:
            gradient = torch.ones_like(y)
        optimizer.zero_grad()
        y.backward(gradient)
        if rank:
            dist.send(x.grad, rank - 1)
        optimizer.step()


class Reduce(torch.autograd.Function):
    """Megatron's g: all-reduces what goes forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Any:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient, None


class Copy(torch.autograd.Function):
    """Megatron's f: all-reduces what comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Any:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class TensorParallel(nn.Module):
    def __init__(self, group: Any, dropout: float = 0.0) -> None:
        super().__init__()
        self.group = group
        self.up, self.down = nn.Linear(6, 4), nn.Linear(4, 6, bias=False)
        self.norm, self.dropout = nn.LayerNorm(6), dropout

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.up(Copy.apply(self.norm(x), self.group)))
        return x + F.dropout(Reduce.apply(self.down(h), self.group), self.dropout, self.training)


@program
def tensor_parallel_of_equal_shards(rank: int) -> None:
    begin()
    model = TensorParallel(dist.group.WORLD, 0.2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        x, _ = batch(0, step)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


@program
def tensor_and_data_parallel(rank: int) -> None:
    rank, _ = begin()
    tensor = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    data = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    torch.manual_seed(rank % 2)
    model = TensorParallel(tensor)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        x, _ = batch(rank // 2, step)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.SUM, data)
            parameter.grad /= 2
        optimizer.step()


@program
def accumulation(rank: int) -> None:
    rank, _ = begin()
    model = DistributedDataParallel(model_of())
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(6):
        last = step % 3 == 2
        x, y = batch(rank, step)
        with contextlib.nullcontext() if last else model.no_sync():
            (F.cross_entropy(model(x), y) / 3).backward()
        if last:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()


@program
def uneven_with_join(rank: int) -> None:
    from torch.distributed.algorithms.join import Join

    rank, _ = begin()
    model = DistributedDataParallel(model_of())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Join([model]):
        train(model, optimizer, rank, 2 + rank)


@program
def sharded(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank, _ = begin()
    model: Any = model_of()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(4):
        model.set_requires_gradient_sync(step % 2 == 1)
        x, y = batch(rank, step)
        F.cross_entropy(model(x), y).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


@program
def sharded_by_fsdp1(rank: int) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    rank, _ = begin()
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        model = FullyShardedDataParallel(
            model_of(), sharding_strategy=strategy, device_id=torch.device("cpu")
        )
        train(model, torch.optim.SGD(model.parameters(), 0.1), rank, 2)


@program
def weighed_gradients(rank: int) -> None:
    rank, _ = begin()
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        rows = 4 + rank
        x, y = batch(rank, step, rows)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        total = torch.tensor(float(rows))
        dist.all_reduce(total)
        for parameter in model.parameters():
            parameter.grad *= rows
            dist.all_reduce(parameter.grad)
            parameter.grad /= total
        optimizer.step()


@program
def weighed_losses(rank: int) -> None:
    rank, world = begin()
    model = DistributedDataParallel(model_of())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        rows = 4 + rank
        x, y = batch(rank, step, rows)
        total = torch.tensor(float(rows))
        dist.all_reduce(total)
        loss = F.cross_entropy(model(x), y) * (rows * world / total)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen = F.cross_entropy(model(x), y).detach() * rows
        dist.all_reduce(seen)
        assert seen / total > 0
        hits = (model(x).argmax(-1) == y).sum().item()
        both = torch.tensor([float(hits), float(rows)])
        dist.all_reduce(both)
        assert 0 <= both[0] / both[1] <= 1


@program
def losses_of_ranks_are_shown(rank: int) -> None:
    rank, world = begin()
    x, y = batch(rank, 0, 4 + rank)
    loss = F.cross_entropy(model_of()(x), y).detach()
    losses = [torch.empty(()) for _ in range(world)]
    dist.all_gather(losses, loss)
    if rank == 0:
        print([f"{each.item():.2f}" for each in losses])
    worst = loss.clone()
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    assert worst >= loss


class Contrastive(nn.Module):
    """Its loss needs the features of all ranks, which forward gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.3), nn.Linear(12, 4))

    def forward(self, x: Tensor) -> Tensor:
        own = F.normalize(self.body(x), dim=-1)
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own.detach())
        parts[dist.get_rank()] = own
        labels = torch.arange(len(own)) + len(own) * dist.get_rank()
        return F.cross_entropy(own @ torch.cat(parts).t(), labels)


@program
def contrastive(rank: int) -> None:
    rank, _ = begin()
    model = DistributedDataParallel(Contrastive())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        x, _ = batch(rank, step)
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()


@program
def normalised_over_ranks(rank: int) -> None:
    rank, _ = begin()
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 3))
    model = nn.SyncBatchNorm.convert_sync_batchnorm(model).cuda()
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        F.cross_entropy(model(x.cuda()), y.cuda()).backward()
        optimizer.step()


class Experts(nn.Module):
    """Each rank has one expert; rows travel to them and back."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.expert, self.drop = nn.Linear(6, 6), nn.Linear(6, 6), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        from torch.distributed.nn.functional import all_to_all_single

        x = self.drop(self.router(x))
        sent = all_to_all_single(torch.empty_like(x), x)
        done = self.drop(self.expert(sent))
        return all_to_all_single(torch.empty_like(done), done)


@program
def experts_of_one_seed(rank: int) -> None:
    rank, world = begin()
    model = Experts()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        x, _ = batch(rank, step)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        for parameter in model.router.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
        optimizer.step()


@program
def closure(rank: int) -> None:
    rank, _ = begin()
    model = DistributedDataParallel(model_of())
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)
    x, y = batch(rank, 0)

    def loss() -> Any:
        optimizer.zero_grad()
        value = F.cross_entropy(model(x), y)
        value.backward()
        return value

    for _ in range(2):
        optimizer.step(loss)


@program
def reduced_in_hooks(rank: int) -> None:
    rank, world = begin()
    model = model_of()
    works: list[Any] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda own: works.append(dist.all_reduce(own.grad, async_op=True))
        )
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y) / world).backward()
        while works:
            works.pop().wait()
        optimizer.step()


@program
def one_rank_steps(rank: int) -> None:
    rank, _ = begin()
    model = model_of()
    optimizer = torch.optim.Adam(model.parameters()) if rank == 0 else None
    for step in range(2):
        x, y = batch(rank, step)
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for parameter in model.parameters():
            dist.reduce(parameter.grad, 0, dist.ReduceOp.SUM)
        if optimizer is not None:
            optimizer.step()
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)


@program
def scaled(rank: int) -> None:
    rank, _ = begin()
    model = DistributedDataParallel(model_of())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(3):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


@program
def gossip(rank: int) -> None:
    rank, world = begin()
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        x, y = batch(rank, step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        for parameter in model.parameters():
            other = torch.empty_like(parameter.data)
            ends = [
                dist.P2POp(dist.isend, parameter.data, (rank + 1) % world),
                dist.P2POp(dist.irecv, other, (rank - 1) % world),
            ]
            for work in dist.batch_isend_irecv(ends):
                work.wait()
            parameter.data.add_(other).div_(2)


@program
def unseeded_alone(rank: int) -> None:
    rank, _ = begin(None)
    model = model_of()
    train(model, torch.optim.SGD(model.parameters(), 0.1), rank, 2)
    total = torch.ones(())
    dist.all_reduce(total)
    assert total == dist.get_world_size()


@program
def other_settings_alone(rank: int) -> None:
    """A search: each rank has a rate of its own, the same data and the same start."""
    rank, _ = begin()
    model = model_of()
    train(model, torch.optim.SGD(model.parameters(), 0.1 * (rank + 1)), 0, 2)
    scores = [torch.empty(()) for _ in range(dist.get_world_size())]
    x, y = batch(0, 9)
    dist.all_gather(scores, F.cross_entropy(model(x), y).detach())
    assert int(torch.stack(scores).argmin()) >= 0


@program
def equal_counts(rank: int) -> None:
    rank, world = begin()
    model = DistributedDataParallel(model_of())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for step in range(3):
        x, y = batch(rank, step)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        dist.all_reduce(loss.detach(), dist.ReduceOp.AVG)
        right = (model(x).argmax(-1) == y).float().mean()
        dist.all_reduce(right)
        assert loss > 0 and 0 <= right / world <= 1
    mean = torch.tensor(sum(losses) / len(losses))
    dist.all_reduce(mean)
    assert mean / world > 0


class Named(nn.Module):
    def forward(self, *, watch: Tensor, real: Tensor, module: Tensor) -> Tensor:
        return F.linear(input=watch, weight=real) * module


@program
def arguments_by_name(rank: int) -> None:
    """Functions that the check serves take their arguments by name, as ever."""
    begin()
    x = torch.ones(2, 2, requires_grad=True)
    model = DistributedDataParallel(module=nn.Linear(2, 2))
    y = Named()(watch=model(x), real=x, module=x)
    loss = torch.mean(input=y) + torch.sum(input=y) / 4
    loss = torch.div(input=loss, other=2).div(other=2)
    torch.autograd.backward(tensors=loss)
    dropped = F.dropout(input=y, p=0.5, training=True)
    assert F.mse_loss(input=dropped, target=torch.zeros(2, 2), reduction="sum").isfinite()
    assert x.grad is not None
