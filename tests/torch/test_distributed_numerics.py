"""Reductions of torch.distributed: gpusim's orders, functions, and the twins of gloo and NCCL."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gpusim
from gpusim import Reduction, ReplicaError
from gpusim.torch.distributed import FoldCall, launch
from tests.torch.distributed_programs import start
from tests.torch.wrong_programs import X, fails


def total(reduction: Any, values: list[Tensor], op: Any = dist.ReduceOp.SUM) -> Tensor:
    def program(rank: int) -> Tensor:
        start()
        x = values[rank].clone()
        dist.all_reduce(x, op)
        return x

    found = launch(program, len(values), reduction=reduction)
    assert all(torch.equal(found[0], each) for each in found)
    return found[0]


@pytest.mark.parametrize(
    "order",
    ["linear", "reverse", "tree", "ring", "exact", "kahan", "neumaier", "mpich", "nccl-ring"],
)
def test_sums_are_gpusims(order: str) -> None:
    values = [torch.randn(50, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    arrays = [value.numpy() for value in values]
    reduction = Reduction(order=order)
    expected = gpusim.collectives.psum(arrays, reduction=reduction).value
    assert np.array_equal(total(reduction, values).numpy(), expected)
    assert np.array_equal(total(order, values).numpy(), expected)
    with gpusim.reduction(order=order):
        assert np.array_equal(total(None, values).numpy(), expected)


def test_a_function_chooses_the_reduction() -> None:
    told: list[FoldCall] = []

    def choose(call: FoldCall) -> str:
        told.append(call)
        return "tree" if call.group == (0, 1, 2) else "reverse"

    values = np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32)

    def program(rank: int) -> list[Tensor]:
        start()
        pair = dist.new_group([1, 2])
        other = dist.new_group(None, pg_options=Reduction(order="ring"))
        found = []
        for group in (dist.group.WORLD, other, pair if rank else None):
            x = torch.from_numpy(values[rank].copy())
            if group is not None:
                dist.all_reduce(x, group=group)
            found.append(x)
        return found

    found = launch(program, 3, reduction=choose)[1]
    for x, order, members in zip(found, ("tree", "ring", "reverse"), (3, 3, 2), strict=True):
        rows = values if members == 3 else values[1:]
        expected = gpusim.collectives.psum(rows, reduction=Reduction(order=order)).value
        assert np.array_equal(x.numpy(), expected)
    assert FoldCall("all_reduce", (0, 1, 2), "float32", 160) in told


def test_stochastic_rounding_draws_anew_at_each_call() -> None:
    def program(rank: int) -> tuple[Tensor, Tensor]:
        start()
        x, y = (torch.full((1000,), 1 + 2**-9, dtype=torch.bfloat16) for _ in range(2))
        dist.all_reduce(x)
        dist.all_reduce(y)
        return x, y

    reduction = Reduction(accumulate="bfloat16", rounding="stochastic", seed=3)
    (x, y), (x2, y2) = launch(program, 2, reduction=reduction)
    assert torch.equal(x, x2) and torch.equal(y, y2) and len(x.unique()) == 1
    half = [torch.full((1000,), 1.0078125 * (1 + i), dtype=torch.bfloat16) for i in range(2)]
    assert len(total(reduction, half).unique()) <= 2


def test_a_twin_refuses_what_it_does_not_know() -> None:
    def program(rank: int) -> None:
        start()
        dist.reduce_scatter_tensor(torch.empty(2), torch.ones(4))

    message = "order of mpich's reduce_scatter is not known; it is for gloo-ring, nccl-ring"
    with pytest.raises(ReplicaError, match=message):
        launch(program, 2, reduction="mpich")
    with pytest.raises(ReplicaError, match="float8_e5m2"):
        total("nccl-ring", [torch.ones(3).to(torch.float8_e5m2)] * 2)


def test_nccl_scatters_by_the_ranks_slices() -> None:
    values = np.random.default_rng(1).standard_normal((4, 4, 30)).astype(np.float32)

    def program(rank: int) -> Tensor:
        start()
        out = torch.empty(30)
        dist.reduce_scatter_tensor(out, torch.from_numpy(values[rank].copy()).reshape(-1))
        return out

    for rank, found in enumerate(launch(program, 4, reduction="nccl-ring")):
        expected = values[(rank + 1) % 4, rank]
        for number in range(2, 5):
            expected = expected + values[(rank + number) % 4, rank]
        assert np.array_equal(found.numpy(), expected)


@pytest.mark.parametrize("order", ["nccl-ring", "nccl-tree"])
def test_nccl_reduces_by_a_chain_that_ends_at_the_root(order: str) -> None:
    values = torch.from_numpy(np.random.default_rng(2).standard_normal((4, 30)).astype("f4"))

    def program(rank: int) -> Tensor:
        start()
        x = values[rank].clone()
        dist.reduce(x, 1)
        return x

    found = launch(program, 4, reduction=order)[1]
    assert torch.equal(found, ((values[2] + values[3]) + values[0]) + values[1])


@pytest.mark.parametrize("order", ["nccl-ring", "nccl-tree"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_nccl_multiplies_before_it_adds_a_mean(order: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(50, generator=generator).to(dtype) for _ in range(3)]
    third = torch.tensor(1 / 3, dtype=dtype)
    mean = total(order, values, dist.ReduceOp.AVG)
    assert torch.equal(mean, total(order, [value * third for value in values]))
    assert not torch.equal(mean, total(order, values) / 3)


FACTORS = [0.3, *(torch.tensor(x, dtype=torch.float64) for x in (0.3, [0.3]))]


@pytest.mark.parametrize("order", ["linear", "ring", "nccl-ring", "nccl-tree"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_premul_sum_multiplies_each_ranks_input(order: str, dtype: torch.dtype) -> None:
    def program(rank: int, factor: Any) -> list[Tensor]:
        start()
        if isinstance(factor, Tensor):
            factor = factor.to(dtype)
        x = torch.randn(6, generator=torch.Generator().manual_seed(rank)).to(dtype)
        op = dist.ReduceOp.SUM
        if factor is None:  # by hand
            x *= torch.tensor(0.3, dtype=dtype)
        else:
            op = dist._make_nccl_premul_sum(factor)
        before = x.clone()
        all_reduced, reduced, coalesced = x.clone(), x.clone(), x.clone()
        outs = [torch.empty(2, dtype=dtype) for _ in range(3)]
        dist.all_reduce(all_reduced, op)
        dist.reduce(reduced, 2, op)
        dist.reduce_scatter_tensor(outs[0], x, op)
        dist.reduce_scatter(outs[1], list(x.chunk(3)), op)
        with dist.distributed_c10d._coalescing_manager():
            dist.all_reduce(coalesced, op)
        with dist.distributed_c10d._coalescing_manager():
            dist.reduce_scatter_tensor(outs[2], x, op)
        assert torch.equal(x, before)
        return [all_reduced, coalesced, *outs] + [reduced] * (rank == 2)

    expected = launch(program, 3, (None,), reduction=order)
    for factor in FACTORS:
        for ours, theirs in zip(
            launch(program, 3, (factor,), reduction=order), expected, strict=True
        ):
            assert all(map(torch.equal, ours, theirs))


def test_premul_sum_is_refused_where_nccl_or_the_twin_has_none() -> None:
    def program(rank: int, x: Tensor, factor: Any) -> None:
        start()
        dist.all_reduce(x.clone(), dist.ReduceOp.PREMUL_SUM(factor))

    for x, factor, said in (
        (torch.ones(2, dtype=torch.int64), 0.5, "PREMUL_SUM is for float16.*got torch.int64"),
        (X, torch.tensor(0.5, dtype=torch.float64), "one element of torch.float32; got float64"),
    ):
        fails(program, 2, ReplicaError, said, args=(x, factor))
    fails(program, 2, ReplicaError, "gloo has no PREMUL_SUM", args=(X, 0.5), reduction="gloo-ring")


def test_fsdp2_divides_gradients_by_a_factor() -> None:
    """torch asks NCCL for a PREMUL_SUM; by a power of two no bit is lost on either way."""
    from torch.distributed.fsdp import fully_shard

    def program(rank: int, summed: bool) -> list[Tensor]:
        start()
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 5)
        fully_shard(model)
        model.set_gradient_divide_factor(8.0)
        model.set_force_sum_reduction_for_comms(summed)
        model(torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))).sum().backward()
        return [parameter.grad.full_tensor() for parameter in model.parameters()]

    both = [launch(program, 3, (summed,), reduction="nccl-ring") for summed in (False, True)]
    for ours, theirs in zip(*both, strict=True):
        assert all(map(torch.equal, ours, theirs))
