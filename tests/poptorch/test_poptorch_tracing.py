"""What is traced once, what runs in threads instead, and what a trace leaves behind."""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gpusim import poptorch
from gpusim.poptorch.replicas.passes import call_directly
from tests.poptorch.poptorch_models import infer, spread
from tests.poptorch.replica_models import (
    BATCH,
    MLP,
    WIDTH,
    Model,
    alone,
    assert_as_alone,
    assert_same,
    classes,
    inputs,
    mean,
    run,
)


def test_python_runs_once_in_lockstep() -> None:
    ran: list[int] = []

    def forward(self: Model, x: Tensor) -> Tensor:
        ran.append(len(ran))
        return mean(x @ self.w)

    model, given = Model(forward), inputs(5)
    program, _ = run(model, given, None)
    program.run(spread(model.named_parameters(), 5), {}, given, counter=1, seed=0)
    assert program.execution == "lockstep" and ran == [0]


def by_value(self: Model, x: Tensor) -> Tensor:
    y = x @ self.w
    return mean(y if x.sum() > 0 else y * y)


class Doubled(torch.autograd.Function):
    """Twice the value; seven times the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent * 7


UNTRACEABLE: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "a branch": by_value,
    "a selection": lambda self, x: mean((x @ self.w)[x[:, 0] > 0]),
    "NumPy": lambda self, x: mean(x @ self.w * torch.from_numpy(np.abs(x.detach().numpy()))),
    "an item": lambda self, x: mean(x @ self.w * x.max().item()),
    "a Function": lambda self, x: mean(Doubled.apply(x @ self.w)),
}


@pytest.mark.parametrize("name", UNTRACEABLE)
def test_what_cannot_be_traced_runs_in_threads(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model, given = Model(UNTRACEABLE[name]), inputs(5)
    with caplog.at_level(logging.INFO, logger="poptorch::python"):
        program, step = run(model, given, None)
    assert program.execution == "threads"
    (record,) = caplog.records
    assert record.levelname == "INFO" and "cannot be traced" in record.getMessage()
    assert_as_alone(step, alone(model, given, lambda loss: loss))


def test_without_a_backward_pass_a_function_can_be_traced() -> None:
    model, given = Model(lambda self, x: Doubled.apply(x @ self.w)), inputs(2)
    program, step = run(model, given, None, training=False)
    assert program.execution == "lockstep"
    torch.testing.assert_close(step.outputs, 2 * given[0] @ model.w.detach())


def test_an_error_of_the_model_is_raised_as_it_is() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        raise LookupError("mine")

    model = Model(forward)
    w = model.w
    with pytest.raises(LookupError, match=r"^mine$"):
        run(model, inputs(3), None)
    assert model.w is w and not model._forward_hooks and not model._forward_pre_hooks


OWN_ERRORS: dict[str, Callable[[], None]] = {
    "raise": lambda: _raise(LookupError("mine")),
    "assert": lambda: _assert(False),
}


def _raise(error: Exception) -> None:
    raise error


def _assert(value: bool) -> None:
    assert value, "mine"


@pytest.mark.parametrize("how", OWN_ERRORS)
def test_a_model_that_raises_an_error_runs_once(how: str, caplog: pytest.LogCaptureFixture) -> None:
    ran: list[int] = []
    model = Model(lambda self, x: (ran.append(1), OWN_ERRORS[how](), x)[2])
    with (
        caplog.at_level(logging.INFO, logger="poptorch::python"),
        pytest.raises((LookupError, AssertionError), match="mine"),
    ):
        run(model, inputs(3), None)
    assert ran == [1] and not caplog.records


def test_an_error_about_what_tracing_refused_is_none_of_the_models() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        try:
            scale = x.max().item()
        except Exception as error:
            raise ValueError("no maximum") from error
        return mean(x @ self.w * scale)

    program, _ = run(Model(forward), inputs(2), None)
    assert program.execution == "threads"


def test_the_model_is_left_as_it_was(execution: str) -> None:
    model, given = MLP(normalized=True), inputs(3, classes)
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    values = {name: x.clone() for name, x in held.items()}
    run(model, given, execution)
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert all(after[name] is x and torch.equal(x, values[name]) for name, x in held.items())
    assert all(p.grad is None for p in model.parameters())


def test_parameters_that_are_also_in_a_list_are_the_replicas_own(execution: str) -> None:
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.a, self.b = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))
            self.all = [self.a, self.b]

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            for matrix in self.all:
                x = x @ matrix
            return self.all[0], mean(x)

    model, given = Listed(), inputs(3)
    program, step = run(model, given, execution)
    assert program.trained == ("a", "b")
    assert_as_alone(step, alone(model, given, lambda result: result[1]))


def test_nothing_of_a_trace_stays_in_the_model() -> None:
    torch.manual_seed(1)
    model = Model(lambda self, x: mean(self.inner[0](x)[0] @ self.w), nn.LSTM(WIDTH, WIDTH))
    program, _ = run(model, inputs(2), None)
    assert program.execution == "lockstep"
    copied = copy.deepcopy(model)  # which tensors without values refuse
    x = torch.ones(BATCH, WIDTH)
    assert torch.equal(copied.inner[0](x)[0], model.inner[0](x)[0])


class Keeping(nn.Module):
    """Keeps what it computes, in every way that there is."""

    scale: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.cache: Tensor | None = None
        self.register_buffer("scale", None)
        self.states: list[Any] = ["first"]
        self.table: dict[str, Any] = {"kept": 1}
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.cache is None:
            self.cache = torch.arange(4.0)
        if self.scale is None:
            self.scale = torch.ones(4)
        self.last = x * self.cache * self.scale
        self.mapped = torch.func.vmap(lambda row: setattr(self, "row", row) or row)(x)
        self.states.append((x, [x]))
        self.table["inner"] = {"x": x}
        self.calls += 1
        return self.last


def test_what_finalizers_call_is_not_in_the_trace() -> None:
    running = True

    class Garbage:
        """A cycle whose finalizer calls torch, and leaves another."""

        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            with torch.no_grad():
                torch.zeros(())
            if running:
                Garbage()

    thresholds = gc.get_threshold()
    gc.set_threshold(20)
    Garbage()
    try:
        for _ in range(5):
            doubled = infer(lambda x: x * 2, [torch.ones(2, 3)], "lockstep")
            assert torch.equal(doubled, torch.full((2, 3), 2.0))
    finally:
        running = False
        gc.set_threshold(*thresholds)


def test_a_trace_leaves_no_tensors_without_values_in_the_model() -> None:
    model = Model(lambda self, x: mean(self.inner[0](x) @ self.w), Keeping())
    keeping: Any = model.inner[0]
    before = {*vars(keeping)}
    program, step = run(model, inputs(2), None)
    assert program.execution == "lockstep"
    assert {*vars(keeping)} == before and keeping.cache is None and keeping.scale is None
    assert keeping.states == ["first"] and keeping.table == {"kept": 1} and keeping.calls == 1
    _, again = run(model, inputs(2), None)
    assert_same(step, again)
    expected = [copy.deepcopy(model)(x) for x in inputs(2)[0]]
    torch.testing.assert_close(step.outputs, torch.stack(expected).detach())


def test_calls_after_the_first_and_other_executors_have_values_of_what_a_model_keeps() -> None:
    model, x = Keeping(), torch.ones(2, 4)
    for _ in range(2):
        executor = poptorch.inferenceModel(model)
        for _ in range(2):
            assert executor(x).tolist() == [[0, 1, 2, 3]] * 2
        executor.destroy()
    assert model(x).tolist() == [[0, 1, 2, 3]] * 2


def checkpointed(self: Model, x: Tensor) -> Tensor:
    def dropped(x: Tensor) -> Tensor:
        return F.dropout(x @ self.w, 0.5)

    return mean(checkpoint(dropped, x, use_reentrant=False))


def test_a_checkpoint_has_one_dropout_or_is_refused() -> None:
    given = inputs(2)
    _, plain = run(Model(lambda self, x: mean(F.dropout(x @ self.w, 0.5))), given, "lockstep")
    _, again = run(Model(checkpointed), given, "lockstep")
    assert torch.equal(plain.gradients["w"], again.gradients["w"])
    with pytest.raises(RuntimeError, match="drawn in the backward pass"):
        run(Model(checkpointed), given, "threads")


def test_graphs_reshape_by_methods_which_read_no_lists() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x.view(2, -1), torch.mm(x.view(2, 2), x.view(2, 2)).view(1, 4), y.view(())

    given = torch.arange(4.0), torch.ones(1)
    graph = make_fx(function)(*given)
    call_directly(graph)
    assert graph.code.count(".view(") == 4 and ", [])" in graph.code
    assert all(map(torch.equal, graph(*given), function(*given)))
