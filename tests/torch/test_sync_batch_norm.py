"""SyncBatchNorm on ranks whose GPUs the CPU plays, against BatchNorm of the whole batch."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gpusim.torch.distributed import Recorder, launch
from tests.oracles.budget import slow

#: The batches of ranks, and the values behind a channel.
SHAPES = [
    ([2, 1, 3], (4,)),
    ([1, 0, 2], (3, 3)),
    ([5], ()),
    ([1, 1], ()),
    ([0, 3, 1, 0, 2], (2, 2, 2)),
]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}


def batches(sizes: list[int], rest: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(sizes))
    return [
        torch.randn(n, 3, *rest, generator=generator, dtype=torch.float64).mul(3).add(1).to(dtype)
        for n in sizes
    ]


def step(norm: nn.Module, x: Tensor, steps: int) -> list[Tensor]:
    """Outputs, gradients and running statistics after some steps."""
    x = x.clone().requires_grad_()
    for number in range(steps):
        y = norm(x * (number + 1))
        weights = torch.arange(float(math.prod(x.shape[1:])), dtype=torch.float64, device=x.device)
        (y.double().square() * weights.view(x.shape[1:])).sum().backward()
    leaves = [x, *norm.parameters()]  # a rank with an empty batch has no gradients
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in leaves]
    return [each.cpu().double() for each in (y.detach(), *gradients, *norm.buffers())]


def model(options: dict[str, Any], dtype: torch.dtype) -> Any:
    kinds = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
    options = dict(options)
    norm = kinds[options.pop("rest")](3, **options).to(dtype)
    with torch.no_grad():
        for number, parameter in enumerate(norm.parameters()):
            parameter.copy_(torch.tensor([0.5, -1.0, 2.0]) + number)
    return norm


def check(
    sizes: list[int],
    rest: tuple[int, ...],
    dtype: torch.dtype,
    options: dict[str, Any],
    train: bool = True,
    processes: bool = False,
    channels_last: bool = False,
    reduction: str | None = None,
) -> None:
    options = {"rest": len(rest), **options}
    parts = batches(sizes, rest, dtype)

    def run(rank: int) -> list[Tensor]:
        local = int(os.environ["LOCAL_RANK"])
        dist.init_process_group("nccl")
        norm: Any = nn.SyncBatchNorm.convert_sync_batchnorm(model(options, dtype)).cuda(local)
        assert isinstance(norm, nn.SyncBatchNorm)
        norm.train(train)
        x = parts[rank].to(local)
        if channels_last:
            x = x.to(memory_format=torch.channels_last)
        return step(norm, x, 2)

    found = launch(run, len(sizes), device="cpu", processes=processes, reduction=reduction)
    whole = model(options, torch.float64).train(train)
    expected = step(whole, torch.cat(parts).double(), 2)

    def compare(mine: Tensor, theirs: Tensor) -> None:
        atol = TOLERANCE[dtype] * max(1.0, theirs.abs().max().item())
        torch.testing.assert_close(mine, theirs, rtol=TOLERANCE[dtype], atol=atol)

    for index in range(2):  # outputs and the gradients of inputs are each rank's
        joined = torch.cat([each[index] for each in found])
        compare(joined, expected[index])
    parameters = sum(1 for _ in whole.parameters())
    for index in range(2, 2 + parameters):  # those of weights add up over ranks
        total: Any = sum(each[index] for each in found)
        compare(total, expected[index])
    for each in found:
        for mine, theirs in zip(each[2 + parameters :], expected[2 + parameters :], strict=True):
            compare(mine, theirs)


@pytest.mark.parametrize("sizes, rest", SHAPES, ids=str)
def test_it_is_batch_norm_of_the_whole_batch(sizes: list[int], rest: tuple[int, ...]) -> None:
    check(sizes, rest, torch.float64, {})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    check([2, 3, 1], (4, 4), dtype, {})


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": None},
        {"affine": False},
        {"track_running_stats": False},
        {"eps": 0.1, "momentum": 0.7},
    ],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    check([2, 1, 3], (2,), torch.float64, options)


@pytest.mark.parametrize("options", [{}, {"track_running_stats": False}], ids=str)
def test_evaluation(options: dict[str, Any]) -> None:
    if options:  # each rank normalizes with its own batch, as torch's does
        with pytest.raises(AssertionError):
            check([2, 1, 3], (2,), torch.float64, options, train=False)
    else:
        check([2, 1, 3], (2,), torch.float64, options, train=False)


def test_channels_last() -> None:
    check([2, 1], (2, 3), torch.float64, {}, channels_last=True)


@pytest.mark.parametrize("order", ["gloo-ring", "nccl-ring", "tree"])
def test_sums_in_any_order(order: str) -> None:
    check([2, 1, 3], (2,), torch.float32, {}, reduction=order)


def test_ranks_that_are_processes() -> None:
    check([2, 1, 3], (2,), torch.float64, {}, processes=True)


@pytest.mark.parametrize("affine", [True, *slow(False)])
def test_gradients_are_those_of_the_formula(affine: bool) -> None:
    """gradcheck in double precision, on the sum over ranks of their outputs' functions."""

    def run(rank: int) -> bool:
        dist.init_process_group("nccl")
        norm = nn.SyncBatchNorm(2, affine=affine, momentum=0.0).double().cuda()

        def outputs(x: Tensor) -> Tensor:
            return norm(x).pow(3)

        x = torch.randn(2 + rank, 2, dtype=torch.float64, device="cuda")
        x = (x + rank).requires_grad_()
        y = outputs(x)
        weights = torch.arange(1.0, y.numel() + 1, dtype=y.dtype).view_as(y)
        (y * weights).sum().backward()
        step = 1e-6
        for owner in range(dist.get_world_size()):
            total = torch.zeros(2, dtype=torch.float64)
            for side, sign in enumerate((1, -1)):
                moved = x.detach().clone()
                if rank == owner:
                    moved[0, 1] += sign * step
                total[side] = (outputs(moved) * weights).sum()
            dist.all_reduce(total)
            slope = (total[0] - total[1]) / (2 * step)
            if rank == owner:
                assert x.grad is not None
                torch.testing.assert_close(x.grad[0, 1].cpu(), slope, rtol=1e-5, atol=1e-6)
        return True

    assert all(launch(run, 3, device="cpu"))


def test_the_collectives_are_those_of_torch() -> None:
    """One all_gather of mean, inverse deviation and count; one all_reduce backward."""
    recorder = Recorder()

    def run(rank: int) -> None:
        dist.init_process_group("nccl")
        norm = nn.SyncBatchNorm(3).cuda()
        x = torch.randn(rank + 1, 3, 2, device="cuda", requires_grad=True)
        norm(x).square().sum().backward()

    launch(run, 2, device="cpu", recorder=recorder)
    calls = [(each.operation, each.shapes) for each in recorder.calls if each.rank == 0]
    assert calls == [("all_gather", ((7,),)), ("all_reduce", ((6,),))]


def test_a_vision_model_trains_under_ddp() -> None:
    def run(rank: int) -> list[float]:
        dist.init_process_group("nccl")
        torch.cuda.set_device(rank)
        torch.manual_seed(0)
        net: Any = nn.Sequential(
            nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2)
        )
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net).cuda()
        net = DistributedDataParallel(net, device_ids=[rank])
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        x = torch.arange(2.0 * 2 * 25).reshape(2, 2, 5, 5).sin().add(rank).cuda()
        losses = []
        for _ in range(3):
            loss = net(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return [*losses, net.module[1].running_mean.sum().item()]

    first, *others = launch(run, 3, device="cpu")
    assert all(other[-1] == first[-1] for other in others)
    assert first[2] < first[0]


def test_tensors_on_the_cpu_are_refused() -> None:
    def run(rank: int) -> None:
        dist.init_process_group("nccl")
        norm = nn.SyncBatchNorm(3)
        with pytest.raises(ValueError, match="expected input tensor to be on GPU"):
            norm(torch.ones(2, 3))

    launch(run, 2, device="cpu")
