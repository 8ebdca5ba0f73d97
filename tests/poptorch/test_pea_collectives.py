"""poptorch_experimental_addons.collectives: values, gradients and updated weights are those of a
simulation in one process, written out by hand, for any number of replicas and in every map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import gpusim
import gpusim.poptorch_experimental_addons as pea
import gpusim.torch as gt
from gpusim.poptorch.axis import AXIS
from tests.poptorch.pea_simulated import SIMULATED, Operation, Simulated, inserted, own_parts

REPLICAS = (1, 2, 3, 4, 5, 7, 8)
RATE = 0.125


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def simulated(case: Simulated, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of each replica is the sum of (y - target)**2; then one step of SGD."""
    y = case.forward(x)
    gradient = case.backward(2 * (y - target))
    return y, gradient, x - RATE * gradient


# --- in maps -----------------------------------------------------------------------------------


def lockstep(operation: Operation, x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    def one(x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        def loss(x: Tensor) -> tuple[Tensor, Tensor]:
            y = operation(x, len(target_of_all))
            return (y - target).square().sum(), y

        gradient, y = torch.func.grad(loss, has_aux=True)(x)
        return y, gradient, x - RATE * gradient

    target_of_all = target
    return gt.vmap(one, axis_name=AXIS)(x, target)


def lockstep_outside(operation: Operation, x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    weights = torch.nn.Parameter(x.clone())
    optimizer = torch.optim.SGD([weights], lr=RATE)
    y = gt.vmap(lambda x: operation(x, len(target)), axis_name=AXIS)(weights)
    (y - target).square().sum().backward()
    optimizer.step()
    assert weights.grad is not None
    return y.detach(), weights.grad, weights.detach()


def threads(operation: Operation, x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    def one(x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        weights = torch.nn.Parameter(x.clone())
        optimizer = torch.optim.SGD([weights], lr=RATE)
        y = operation(weights, len(target_of_all))
        (y - target).square().sum().backward()
        optimizer.step()
        assert weights.grad is not None
        return y, weights.grad, weights

    target_of_all = target
    return gt.pmap(one, AXIS)(x, target)


def graph(operation: Operation, x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    with gt.trace_axes({AXIS: len(x)}):
        traced = make_fx(
            lambda x: operation(x, len(target)), pre_dispatch=True, tracing_mode="fake"
        )(x[0])
    return lockstep(lambda x, _: traced(x), x, target)


WAYS = {
    "vmap": lockstep,
    "autograd around vmap": lockstep_outside,
    "pmap": threads,
    "a graph in vmap": graph,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SIMULATED)
@pytest.mark.parametrize("replicas", REPLICAS)
def test_values_gradients_and_weights_are_those_of_one_process(
    replicas: int, name: str, way: str
) -> None:
    case = SIMULATED[name]
    x = random(replicas, 2 * replicas, 3)
    target = random(*case.forward(x).shape, seed=1)
    found = WAYS[way](case.operation, x, target)
    torch.testing.assert_close(found, simulated(case, x, target), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", ["vmap", "pmap"])
@pytest.mark.parametrize("name", SIMULATED)
def test_sums_have_the_bits_of_psum_under_any_reduction(name: str, way: str) -> None:
    """Forward and backward: in ring order, rounded to bfloat16 at each step, at random."""
    x = random(4, 8, 3, dtype=torch.bfloat16)
    target = random(*SIMULATED[name].forward(x).shape, seed=1, dtype=torch.bfloat16)
    how = gpusim.Reduction(order="ring", accumulate="bfloat16", rounding="stochastic", seed=3)

    def psum(ct: Tensor) -> Tensor:
        with gpusim.reduction(how):
            return gt.vmap(lambda x: gt.psum(x, AXIS), axis_name=AXIS)(ct)

    forward = psum if name == "all_reduce" else SIMULATED[name].forward
    backward: dict[str, Callable[[Tensor], Tensor]] = {
        "all_reduce in the backward pass": psum,
        "all_gather": lambda ct: own_parts(psum(ct)),
    }
    with gpusim.reduction(how):
        y, gradient, _ = WAYS[way](SIMULATED[name].operation, x, target)
    assert torch.equal(y, forward(x))
    expected = backward.get(name, SIMULATED[name].backward)(2 * (y - target))
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("name", SIMULATED)
def test_one_replica_needs_no_axis(name: str) -> None:
    operation = SIMULATED[name].operation
    x = random(4, 3).requires_grad_()
    y = operation(x, 1)
    inside = gt.vmap(lambda x: operation(x, 1), axis_name=AXIS)(x[None])[0]
    assert torch.equal(y, inside)
    y.square().sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, 2 * x.detach())
    assert y.untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int32, torch.bfloat16])
def test_dtypes_stay(dtype: torch.dtype) -> None:
    x = torch.arange(36).reshape(3, 3, 4).to(dtype)

    def one(x: Tensor) -> list[Tensor]:
        return [case.operation(x, 3) for case in SIMULATED.values()]

    for (name, case), y in zip(SIMULATED.items(), gt.vmap(one, axis_name=AXIS)(x), strict=True):
        assert y.dtype == dtype, name
        assert torch.equal(y, case.forward(x)), name


def test_a_shared_value_counts_once_for_each_replica() -> None:
    weights = random(3, 2).requires_grad_()
    scale = torch.tensor([1.0, 10.0, 100.0])

    def loss(scale: Tensor) -> Tensor:
        return (scale * inserted(weights, 3)).sum()

    gt.vmap(loss, axis_name=AXIS)(scale).sum().backward()
    assert weights.grad is not None  # each replica's gradient is the sum of all, and there are 3
    torch.testing.assert_close(weights.grad, torch.full((3, 2), 333.0))


def test_a_gathered_value_is_in_memory_once() -> None:
    x = random(8, 4)
    y = gt.vmap(lambda x: pea.collectives.all_gather_cross_replica(x, 8), axis_name=AXIS)(x)
    assert y.shape == (8, 8, 4) and y.untyped_storage().nbytes() == x.untyped_storage().nbytes()


def test_gradients_can_be_differentiated() -> None:
    """Of gradients again what is declared: sums of sums, and parts of parts."""
    gather = pea.collectives.all_gather_cross_replica_identical_grads_in

    def loss(x: Tensor) -> Tensor:
        return (gather(x, 3) ** 3).sum() / 6

    def one(x: Tensor) -> Tensor:
        return torch.func.grad(lambda x: torch.func.grad(loss)(x).sum())(x)

    x = random(3, 5, dtype=torch.float64)
    torch.testing.assert_close(gt.vmap(one, axis_name=AXIS)(x), x)
    torch.testing.assert_close(gt.pmap(one, AXIS)(x), x)


def test_own_parts_have_a_transpose() -> None:
    """<f(x), y> = <x, f^T(y)> for the backward pass of the gather and its own backward pass."""
    gather = pea.collectives.all_gather_cross_replica_identical_grads_in

    def one(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        _, parts = torch.func.vjp(lambda own: gather(own, 3), torch.zeros(2))
        found, back = torch.func.vjp(lambda ct: parts(ct)[0], x)
        return (found * y).sum(), (x * back(y)[0]).sum()

    for map_ in (gt.vmap, gt.pmap):
        left, right = map_(one, axis_name=AXIS)(random(3, 3, 2), random(3, 2, seed=1))
        torch.testing.assert_close(left.sum(), right.sum())


def test_other_axes_around_do_not_matter() -> None:
    x = random(2, 3, 6, 2)

    def one(x: Tensor) -> tuple[Tensor, ...]:
        def loss(x: Tensor) -> Tensor:
            parts = [case.operation(x, 3).square().sum() for case in SIMULATED.values()]
            return sum(parts, start=torch.zeros(()))

        return loss(x), torch.func.grad(loss)(x)

    each = [gt.vmap(one, axis_name=AXIS)(own) for own in x]
    expected = tuple(torch.stack(parts) for parts in zip(*each, strict=True))
    for around in (gt.vmap, torch.func.vmap):
        found = around(gt.vmap(one, axis_name=AXIS))(x)
        torch.testing.assert_close(found, expected)
    inner = gt.vmap(gt.vmap(one, axis_name="batch"), axis_name=AXIS)(x.transpose(0, 1))
    torch.testing.assert_close(tuple(y.transpose(0, 1) for y in inner), expected)


# --- errors ------------------------------------------------------------------------------------


def mapped(operation: Operation, x: Any, replication_factor: Any) -> Any:
    return gt.vmap(lambda x: operation(x, replication_factor), axis_name=AXIS)(x)


@pytest.mark.parametrize("name", SIMULATED)
def test_another_number_of_replicas_is_refused(name: str) -> None:
    operation = SIMULATED[name].operation
    with pytest.raises(
        ValueError, match="replication_factor is 2, but the number of replicas is 3"
    ):
        mapped(operation, torch.ones(3, 6), 2)
    with pytest.raises(
        ValueError, match="replication_factor is 0, but the number of replicas is 1"
    ):
        operation(torch.ones(3), 0)
    with pytest.raises(TypeError, match=r"replication_factor must be an integer, got 1.5"):
        operation(torch.ones(3), 1.5)


@pytest.mark.parametrize("name", SIMULATED)
def test_outside_of_replicas_it_is_said_where_to_call(name: str) -> None:
    with pytest.raises(
        gpusim.GpusimError, match=r"replication_factor=4\) was called outside of replicas"
    ):
        SIMULATED[name].operation(torch.ones(4), 4)


def test_rows_must_divide_among_the_replicas() -> None:
    operation = pea.collectives.all_to_all_single_cross_replica
    with pytest.raises(ValueError, match=r"multiple of the replication_factor 3, got shape \(4,\)"):
        mapped(operation, torch.ones(3, 4), 3)
    with pytest.raises(ValueError, match=r"leading axis of x .* got shape \(\)"):
        mapped(operation, torch.ones(3), 3)


def test_only_tensors_are_taken() -> None:
    with pytest.raises(TypeError, match=r"x must be a tensor, got 1\.0 of type float"):
        pea.collectives.all_reduce_cross_replica_sum(1.0, 1)


def test_replicas_that_disagree_are_named() -> None:
    def one(x: Tensor) -> Tensor:
        if x == 0:
            return gt.psum(x, AXIS)
        return SIMULATED["all_reduce"].operation(x, 2)

    with pytest.raises(gpusim.CollectiveMismatchError, match="all_reduce"):
        gt.pmap(one, AXIS)(torch.arange(2.0))
