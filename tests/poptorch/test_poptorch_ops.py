"""PopTorch's operations in models: values and gradients are those of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpusim.poptorch import MatMulSerializationMode, OverlapMode, ops
from gpusim.poptorch.losses import identity_loss
from tests.poptorch.poptorch_models import EXECUTIONS, REPLICAS, Calling, run

SIZE = 4
DTYPES = [torch.float32, torch.float16]

Function = Callable[[Tensor, Tensor], Tensor]


class Weighted(nn.Module):
    """Functions of the product of inputs and weights, each with its own, and of a number.

    The loss is that of all results; each weight's gradient is that of one of them.
    """

    def __init__(self, functions: list[Function], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        start = torch.randn(SIZE, SIZE, generator=generator).to(dtype)
        self.weights = nn.ParameterList(nn.Parameter(start.clone()) for _ in functions)
        self.functions = functions

    def forward(self, x: Tensor, number: Tensor) -> tuple[list[Tensor], Tensor]:
        pairs = zip(self.functions, self.weights, strict=True)
        results = [function(weight * x, number) for function, weight in pairs]
        losses = [(y * y.detach()).mean() for y in results]
        return results, identity_loss(torch.stack(losses), "sum")


def given(replicas: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(replicas, SIZE, SIZE, generator=generator).to(dtype)
    return [x, torch.arange(replicas) % 2]


class Case(NamedTuple):
    """An operation, and what it is in plain PyTorch."""

    name: str
    ours: Function
    plain: Function


def convolved(x: Tensor, number: Tensor) -> Tensor:
    return F.conv2d(x[None, None], x[None, None, :2, :2])


def in_multi_conv(x: Tensor, number: Tensor) -> Tensor:
    with ops.MultiConv().partialsTypes([torch.half]).perConvReservedTiles(2):
        return convolved(x, number)


def in_name_scope(x: Tensor, number: Tensor) -> Tensor:
    with ops.NameScope("there"):
        return x * 2


def sliced(x: Tensor, number: Tensor) -> Tensor:
    return x[:, int(number) : int(number) + 2]


def updated(x: Tensor, number: Tensor) -> Tensor:
    before, after = x[: int(number)], x[int(number) + 2 :]
    return torch.cat([before, 3 * x[:2], after])


@ops.register_custom_op("Scaled", "gpusim.tests", 1)
def scaled(x: Tensor, y: Tensor, alpha: float, powers: list[int]) -> list[Tensor]:
    return [alpha * x ** powers[0] * y, x - y]


def by_custom_op(x: Tensor, number: Tensor) -> Tensor:
    attributes = {"alpha": 0.5, "powers": [2, 1]}
    y, z = ops.custom_op([x, x + 1], "Scaled", "gpusim.tests", 1, [x, x], attributes)
    return y + z


def plain_custom_op(x: Tensor, number: Tensor) -> Tensor:
    y, z = scaled(x, x + 1, alpha=0.5, powers=[2])
    return y + z


CASES = [
    Case("nop", lambda x, n: ops.nop(x), lambda x, n: x),
    Case("checkpoint", lambda x, n: ops.recomputationCheckpoint([x, 2 * x])[1], lambda x, n: 2 * x),
    Case("memory", lambda x, n: ops.set_available_memory(x @ x, 0.3), lambda x, n: x @ x),
    Case("dynamic_slice", lambda x, n: ops.dynamic_slice(x, 1, n, 2, 1), sliced),
    Case(
        "dynamic_update", lambda x, n: ops.dynamic_update(x, 3 * x[:2], 0, n.reshape(1), 2), updated
    ),
    Case("multi_conv", in_multi_conv, convolved),
    Case("name_scope", in_name_scope, lambda x, n: x * 2),
    Case("custom_op", by_custom_op, plain_custom_op),
    *(
        Case(
            f"serialized_{mode.value}",
            lambda x, n, mode=mode: ops.serializedMatMul(x, x.T, mode, 2, True),
            lambda x, n: x @ x.T,
        )
        for mode in MatMulSerializationMode
    ),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float16"])
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("replicas", REPLICAS)
def test_values_and_gradients_are_those_of_plain_pytorch(
    replicas: int, execution: str, dtype: torch.dtype
) -> None:
    model = Weighted([case.ours for case in CASES], dtype)
    inputs = given(replicas, dtype)
    _, step = run(model, inputs, execution, training=True)
    for replica in range(replicas):
        alone = Weighted([case.plain for case in CASES], dtype)
        expected, loss = alone(*(x[replica] for x in inputs))
        loss.backward()
        for place, case in enumerate(CASES):
            gradient = step.gradients[f"weights.{place}"][replica]
            same = f"{case.name}, replica {replica}"
            assert_same(step.outputs[0][place][replica], expected[place].detach(), same)
            assert_same(gradient, alone.weights[place].grad, f"gradient of {same}")


def assert_same(found: Tensor, expected: Tensor | None, what: str) -> None:
    torch.testing.assert_close(found, expected, msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float16"])
@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("replicas", REPLICAS)
def test_overlap_leaves_values_and_gradients(
    replicas: int, execution: str, dtype: torch.dtype
) -> None:
    x = given(replicas, dtype)[0]
    _, step = run(Overlapped(dtype), [x], execution, training=True)
    assert step.outputs[0].equal(2 * x)
    assert step.gradients["w"].equal(x)


class Overlapped(nn.Module):
    """A weighted input, on its way in and out."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((SIZE, SIZE), 2, dtype=dtype))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = ops.set_overlap_for_input(x, OverlapMode.OverlapAccumulationLoop)
        y = ops.set_overlap_for_output(self.w * x, OverlapMode.OverlapDeviceIterationLoop)
        return y, identity_loss(y, "sum")


def test_outside_of_models_they_are_plain_pytorch() -> None:
    x, number = given(2)[0][1], torch.tensor(1)
    for case in CASES:
        assert_same(case.ours(x, number), case.plain(x, number), case.name)


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_slices_that_leave_their_tensor_are_errors(execution: str) -> None:
    x, start = torch.zeros(2, 4), torch.tensor([0, 3])
    for function in (
        lambda x, start: ops.dynamic_slice(x, 0, start, 2, 1),
        lambda x, start: ops.dynamic_update(x, x[:2], 0, start, 2),
    ):
        model = Calling(function)
        with pytest.raises(Exception, match="index") as raised:
            run(model, [x, start], execution)
        assert isinstance(raised.value.__cause__ or raised.value, (IndexError, RuntimeError))
