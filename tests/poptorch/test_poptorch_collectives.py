"""Collectives in a model's forward and backward run over its replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import gpusim
import gpusim.torch as gt
from gpusim.poptorch.replicas import AXIS
from tests.poptorch.poptorch_models import spread
from tests.poptorch.replica_models import (
    Model,
    alone,
    assert_as_alone,
    assert_same,
    inputs,
    mean,
    run,
)


def test_collectives_in_forward_run_over_the_replicas(execution: str) -> None:
    def forward(self: Model, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = x @ self.w
        total = gt.psum(y, AXIS)
        return total, gt.axis_index(AXIS), mean(total * y + gt.pmean(self.w, AXIS).sum())

    model, given = Model(forward), inputs(3)
    _, step = run(model, given, execution)
    copies = model.w.detach().repeat(3, 1, 1).requires_grad_()
    y = given[0] @ copies
    loss = (y.sum(0) * y + copies.mean(0).sum()).mean((1, 2)).sum()
    (expected,) = torch.autograd.grad(loss, copies)
    torch.testing.assert_close(step.gradients["w"], expected)
    torch.testing.assert_close(step.outputs[0], y.sum(0).expand(3, -1, -1).detach())
    assert step.outputs[1].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "reduction",
    [
        {"order": "ring"},
        {"accumulate": "float16"},
        {"accumulate": "bfloat16", "rounding": "stochastic", "seed": 3},
    ],
)
def test_reductions_in_forward_and_backward_have_the_same_bits(reduction: dict[str, Any]) -> None:
    model = Model(lambda self, x: (gt.psum(x, AXIS), mean(gt.psum(self.w * self.w, AXIS))))
    given, steps = inputs(5), []
    for execution in ("lockstep", "threads"):
        program, _ = run(model, given, execution)
        with gpusim.reduction(**reduction):
            steps.append(
                program.run(spread(model.named_parameters(), 5), {}, given, counter=0, seed=0)
            )
    assert_same(*steps)
    with gpusim.reduction(**reduction):
        expected = gpusim.collectives.psum(given[0].numpy()).value
    assert np.array_equal(steps[0].outputs[0][0].numpy(), expected)
    program, plain = run(model, given, "lockstep")
    assert not torch.equal(plain.outputs[0], steps[0].outputs[0])


@pytest.mark.parametrize("names", [AXIS, "row", (AXIS, "row")])
def test_collectives_inside_a_vmap_of_the_model_run_in_threads(names: Any) -> None:
    def forward(self: Model, x: Tensor) -> tuple[Tensor, Tensor]:
        total = gt.vmap(lambda row: gt.psum(row, names), axis_name="row")(x @ self.w)
        return total, mean(total * x)

    model, given = Model(forward), inputs(3)
    program, step = run(model, given, None)
    assert program.execution == "threads"
    y = given[0] @ model.w.detach()
    over = tuple(place for place, name in enumerate((AXIS, "row")) if name in names)
    torch.testing.assert_close(step.outputs[0], y.sum(over, keepdim=True).expand(y.shape))


TRANSFORMED: dict[str, Callable[[Tensor], Tensor]] = {
    "vmap": torch.func.vmap(lambda row: row.softmax(-1) * row),
    "grad": torch.func.vmap(torch.func.grad(lambda row: row.pow(3).sum())),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformed_functions_in_a_model_run_as_in_pytorch(name: str) -> None:
    model = Model(lambda self, x: mean(TRANSFORMED[name](x @ self.w)))
    given = inputs(3)
    _, step = run(model, given, None)
    assert_as_alone(step, alone(model, given, lambda loss: loss))


def test_replicas_with_a_branch_meet_in_their_collectives() -> None:
    def forward(self: Model, x: Tensor) -> tuple[Tensor, Tensor]:
        y = gt.psum(x, AXIS) @ self.w
        return y, mean(y if gt.axis_index(AXIS) % 2 else 3 * y)

    model, given = Model(forward), inputs(3)
    program, step = run(model, given, None)
    assert program.execution == "threads"
    ratio = step.gradients["w"][0] / step.gradients["w"][1]
    torch.testing.assert_close(ratio, torch.full_like(ratio, 3.0))


AFTER_COLLECTIVES: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "of tensors": lambda self, x: (gt.psum(x @ self.w, AXIS) @ self.w) * self.w.sum(),
    "of numbers": lambda self, x: gt.psum(2, AXIS) * (x @ self.w) + self.inner[0](self.w).sum(),
}


@pytest.mark.parametrize("case", AFTER_COLLECTIVES)
def test_each_replica_has_its_own_parameters_after_a_collective(case: str) -> None:
    model = Model(lambda self, x: mean(AFTER_COLLECTIVES[case](self, x)), nn.Identity())
    given = inputs(3)
    own = {"w": torch.stack([model.w.detach() * (1 + r) for r in range(3)])}
    steps = []
    for execution in ("lockstep", "threads"):
        program, _ = run(model, given, execution)
        steps.append(program.run(own, {}, given, counter=0, seed=0))
    assert_same(*steps, bits=False)
