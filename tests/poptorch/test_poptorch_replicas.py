"""Replicas of a model: traced once and run in lockstep, or in threads, as a loop over PyTorch."""

from __future__ import annotations

import copy
import gc
import logging
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gpusim
import gpusim.torch as gt
from gpusim import poptorch
from gpusim.poptorch.losses import identity_loss
from gpusim.poptorch.replicas import AXIS, Program, Step, compile_model, flatten
from gpusim.poptorch.replicas.passes import call_directly

from .poptorch_models import infer

BATCH, WIDTH = 6, 4


class Model(nn.Module):
    """A matrix, other modules and buffers, and what a test does with them."""

    pos: Tensor
    mask: Tensor
    average: Tensor
    count: Tensor

    def __init__(
        self, f: Callable[..., Any], *modules: nn.Module, buffers: dict[str, Tensor] | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.inner = nn.ModuleList(modules)
        for name, value in (buffers or {}).items():
            self.register_buffer(name, value)
        self.f = f

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.f(self, *args, **kwargs)


def inputs(replicas: int, *more: Callable[[int], Tensor]) -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randn(replicas, BATCH, WIDTH), *(make(replicas) for make in more)]


def classes(replicas: int) -> Tensor:
    return torch.randint(0, WIDTH, (replicas, BATCH))


def spread(named: Any, replicas: int) -> dict[str, Tensor]:
    """The same on all replicas."""
    return {name: x.detach().expand(replicas, *x.shape) for name, x in named}


def run(
    model: nn.Module,
    given: list[Tensor],
    execution: str | None,
    *,
    training: bool = True,
    counter: int = 0,
    seed: int = 7,
    loss_scale: Any = 1.0,
    options: Any = None,
    offset: int = 0,
) -> tuple[Program, Step]:
    replicas = len(given[0])
    program = compile_model(
        model,
        [x[0] for x in given],
        training=training,
        replicas=replicas,
        replica_offset=offset,
        options=options,
        execution=execution,
    )
    step = program.run(
        spread(model.named_parameters(), replicas),
        spread(model.named_buffers(), replicas),
        given,
        counter=counter,
        seed=seed,
        loss_scale=loss_scale,
    )
    return program, step


@dataclass
class Alone:
    """What PyTorch makes of one replica's micro-batch."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    buffers: dict[str, Tensor]


def alone(model: nn.Module, given: list[Tensor], loss: Callable[[Any], Tensor]) -> list[Alone]:
    """A loop over replicas, written out by hand; the model is left as it was."""
    before = {name: x.clone() for name, x in model.named_buffers()}
    found = []
    for replica in range(len(given[0])):
        with torch.no_grad():
            for name, x in model.named_buffers():
                x.copy_(before[name])
        model.zero_grad(set_to_none=True)
        result = model(*(x[replica].clone() for x in given))
        loss(result).backward()
        gradients = {
            name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
        }
        buffers = {name: x.clone() for name, x in model.named_buffers()}
        found.append(Alone([x.detach() for x in flatten(result)[0]], gradients, buffers))
    with torch.no_grad():
        for name, x in model.named_buffers():
            x.copy_(before[name])
    return found


def assert_as_alone(step: Step, expected: list[Alone]) -> None:
    assert {*step.gradients} == {*expected[0].gradients}
    outputs = flatten(step.outputs)[0]
    for replica, one in enumerate(expected):
        for got, wanted in zip(outputs, one.outputs, strict=True):
            torch.testing.assert_close(got[replica], wanted)
        for name, wanted in one.gradients.items():
            torch.testing.assert_close(step.gradients[name][replica], wanted)
        for name, wanted in one.buffers.items():
            torch.testing.assert_close(step.buffers[name][replica], wanted)


def assert_same(a: Step, b: Step, *, bits: bool = True) -> None:
    assert {*a.gradients} == {*b.gradients}
    parts = [
        flatten((s.outputs, s.gradients, s.buffers, s.changed_inputs, s.anchors, s.loss))[0]
        for s in (a, b)
    ]
    for x, y in zip(*parts, strict=True):
        assert x.dtype == y.dtype
        if bits:
            assert torch.equal(x, y)
        else:
            torch.testing.assert_close(x, y)


@pytest.fixture(params=["lockstep", "threads"])
def execution(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


def mean(y: Tensor) -> Tensor:
    return identity_loss(y, "mean")


class MLP(nn.Module):
    def __init__(self, normalized: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Linear(WIDTH, 8)
        self.norm = nn.BatchNorm1d(8) if normalized else nn.Identity()
        self.out = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        y = self.out(self.norm(self.hidden(x)).relu())
        return y, F.cross_entropy(y, t)


# Gradients, buffers and outputs.


@pytest.mark.parametrize("replicas", [1, 2, 3, 5, 7])
def test_each_replica_has_the_outputs_and_gradients_of_pytorch(
    replicas: int, execution: str
) -> None:
    model, given = MLP(), inputs(replicas, classes)
    program, step = run(model, given, execution)
    assert program.execution == execution
    assert_as_alone(step, alone(model, given, lambda result: result[1]))
    assert step.loss is not None and step.loss.shape == (replicas,)


@pytest.mark.parametrize("replicas", [1, 3])
def test_batch_norm_has_statistics_of_each_replica(replicas: int, execution: str) -> None:
    model, given = MLP(normalized=True), inputs(replicas, classes)
    before = {name: x.clone() for name, x in model.named_buffers()}
    program, step = run(model, given, execution)
    assert program.changed_buffers == (
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    )
    assert all(torch.equal(x, before[name]) for name, x in model.named_buffers())
    assert_as_alone(step, alone(model, given, lambda result: result[1]))


def test_batch_norm_goes_on_from_the_buffers_that_it_left(execution: str) -> None:
    model, given = MLP(normalized=True), inputs(3, classes)
    program, first = run(model, given, execution)
    parameters = spread(model.named_parameters(), 3)
    second = program.run(parameters, first.buffers, given, counter=1, seed=0)
    assert second.buffers["norm.num_batches_tracked"].tolist() == [2, 2, 2]
    moved = first.buffers["norm.running_mean"], second.buffers["norm.running_mean"]
    torch.testing.assert_close(moved[1], 1.9 * moved[0])
    assert first.buffers["norm.num_batches_tracked"].tolist() == [1, 1, 1]


def test_batch_norm_in_eval_changes_nothing(execution: str) -> None:
    model, given = MLP(normalized=True).eval(), inputs(3, classes)
    program, step = run(model, given, execution, training=False)
    assert program.changed_buffers == () and step.gradients == {} and step.loss is None
    for replica in range(3):
        expected = model(given[0][replica], given[1][replica])[0]
        torch.testing.assert_close(step.outputs[0][replica], expected)


def test_parameters_may_differ_between_replicas(execution: str) -> None:
    model, given = MLP(), inputs(3, classes)
    program, _ = run(model, given, execution)
    parameters = {
        name: torch.stack([p.detach() * (1 + r) for r in range(3)])
        for name, p in model.named_parameters()
    }
    step = program.run(parameters, {}, given, counter=0, seed=0)
    for replica in range(3):
        own = MLP()
        with torch.no_grad():
            for name, p in own.named_parameters():
                p.copy_(parameters[name][replica])
        (expected,) = alone(own, [x[replica : replica + 1] for x in given], lambda r: r[1])
        for name, gradient in expected.gradients.items():
            torch.testing.assert_close(step.gradients[name][replica], gradient)


def test_tensors_returned_are_no_views_of_what_was_given(execution: str) -> None:
    model = Model(lambda self, x: (x, self.w, self.pos, mean(x @ self.w)), buffers=_position())
    given = inputs(2)
    _, step = run(model, given, execution)
    taken = {x.untyped_storage().data_ptr() for x in (*given, model.w, model.pos)}
    assert all(x.untyped_storage().data_ptr() not in taken for x in step.outputs)
    assert torch.equal(step.outputs[1][1], model.w)


def _position() -> dict[str, Tensor]:
    return {"pos": torch.arange(4.0)}


class Case(NamedTuple):
    """A model that PyTorch has to agree on with all replicas.

    Attributes:
        f: its forward pass; what it returns is the loss, as its mean.
        modules: made anew, as torch's seed says.
        bits: whether threads have the same bits as lockstep.
    """

    f: Callable[..., Tensor]
    modules: Callable[[], list[nn.Module]] = list
    bits: bool = False


def with_zeros(self: Model, x: Tensor) -> Tensor:
    return zeros_filled(x, x * self.w.diagonal())


def with_zeros_and_a_product(self: Model, x: Tensor) -> Tensor:
    return zeros_filled(x, x @ self.w)


def zeros_filled(x: Tensor, y: Tensor) -> Tensor:
    filled = torch.zeros(BATCH, WIDTH)
    filled[1:3] = y[:2]
    filled[0].add_(x[0])
    return filled * x


def changed_in_place(self: Model, x: Tensor) -> Tensor:
    y = (x @ self.w).add_(1).mul_(2)
    y.relu_()
    return y[:, 1:] * self.inner[0](x)[:, :1]


def scattered(self: Model, x: Tensor, t: Tensor) -> Tensor:
    return added_by_class(x, x @ self.w, t)


def scattered_without_a_product(self: Model, x: Tensor, t: Tensor) -> Tensor:
    return added_by_class(x, x * self.w.diagonal(), t)


def added_by_class(x: Tensor, y: Tensor, t: Tensor) -> Tensor:
    one_hot = F.one_hot(t, WIDTH)
    index = t[:, None].expand(-1, WIDTH)
    return (one_hot * x).scatter_add(1, index, y).gather(1, index)


def without_gradients(self: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = (x @ self.w).abs().max()
    return x @ self.w / scale


def in_half(self: Model, x: Tensor) -> Tensor:
    return x.half() @ self.w.half()


CASES: dict[str, Case] = {
    "zeros that are filled": Case(with_zeros, bits=True),
    # Some BLAS add the terms of a batched product in another order than those of a single one.
    "zeros that are filled by a product": Case(with_zeros_and_a_product),
    "changes in place": Case(changed_in_place, lambda: [nn.Linear(WIDTH, 2)]),
    "scatter and gather": Case(scattered_without_a_product, bits=True),
    "scatter and gather of a product": Case(scattered),
    "no_grad": Case(without_gradients),
    "float16": Case(in_half),
    "constants": Case(lambda self, x: x @ self.w * torch.tensor(3.0) + torch.arange(WIDTH)),
    "sorting": Case(lambda self, x: (x @ self.w).cumsum(0).sort(-1)[0].topk(2)[0]),
    "the parameter alone": Case(lambda self, x: self.w @ self.w.T, bits=True),
    "embedding": Case(lambda self, x, t: F.embedding(t.int(), self.w) * x, bits=True),
    "convolutions": Case(
        lambda self, x: self.inner[0](x[None]),
        lambda: [nn.Sequential(nn.Conv1d(BATCH, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(True))],
    ),
    "attention": Case(
        lambda self, x: self.inner[0](x[None]),
        lambda: [nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)],
    ),
    "a recurrent layer": Case(
        lambda self, x: self.inner[0](x)[0], lambda: [nn.LSTM(WIDTH, 3, num_layers=2)]
    ),
    "a parametrization": Case(
        lambda self, x: self.inner[0](x),
        lambda: [nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 3))],
    ),
    "checkpoints": Case(
        lambda self, x: checkpoint(self.inner[0], x, use_reentrant=False),
        lambda: [nn.Linear(WIDTH, 3)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_lockstep_and_threads_agree_with_pytorch(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(5)
    model = Model(lambda self, *given: mean(case.f(self, *given)), *case.modules())
    takes_classes = case.f.__code__.co_argcount == 3
    given = inputs(3, *([classes] if takes_classes else []))
    expected = alone(model, given, lambda loss: loss)
    steps = [run(model, given, execution)[1] for execution in ("lockstep", "threads")]
    for step in steps:
        assert_as_alone(step, expected)
    assert_same(*steps, bits=case.bits)


def indexed(self: Model, x: Tensor, t: Tensor) -> Tensor:
    y, column = x @ self.w, t[:, None]
    parts = [
        scattered(self, x, t).mean(),
        torch.gather(y, dim=1, index=column).mean(),
        y.take(t).mean(),
        torch.take_along_dim(y, column, 1).mean(),
        y.index_fill(0, t[:2], 2.0).mean(),
        y[:, t].mean(),
        F.cross_entropy(y, target=t),
    ]
    return torch.stack(parts)


def test_indices_may_be_int32_as_they_are_on_an_ipu(execution: str) -> None:
    model = Model(lambda self, x, t: mean(indexed(self, x, t)))
    given = inputs(3, classes)
    narrow = [given[0], given[1].int()]
    assert_as_alone(run(model, narrow, execution)[1], alone(model, given, lambda loss: loss))


# What a model takes and returns.


def test_structures_go_in_and_out(execution: str) -> None:
    def forward(self: Model, x: dict[str, Tensor], *, scale: tuple[Any, ...]) -> dict[str, Any]:
        assert scale[0] == "constant"
        y = x["a"] @ self.w * scale[1]
        return {"y": [y, None, "text", (y.sum(), 3)], "loss": mean(y)}

    model = Model(forward)
    a, factor = torch.randn(3, BATCH, WIDTH), torch.tensor([1.0, 2.0, 3.0])
    args, kwargs = ({"a": a[0]},), {"scale": ("constant", factor[0])}
    program = compile_model(model, args, kwargs, training=True, replicas=3, execution=execution)
    step = program.run(spread(model.named_parameters(), 3), {}, [a, factor], counter=0, seed=0)
    y = a @ model.w.detach() * factor[:, None, None]
    assert [*step.outputs] == ["y", "loss"]
    torch.testing.assert_close(step.outputs["y"][0], y)
    assert step.outputs["y"][1:3] == [None, "text"] and step.outputs["y"][3][1] == 3
    torch.testing.assert_close(step.outputs["loss"], y.mean((1, 2)))


class Holder:
    """Nothing that anyone knows."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


UNKNOWN: dict[str, Callable[[Tensor], Any]] = {
    "Holder": Holder,
    "set": lambda x: {x},
    "generator": lambda x: (x for _ in range(2)),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_outputs_of_unknown_types_are_an_error(name: str, execution: str) -> None:
    model = Model(lambda self, x: {"a": [x, UNKNOWN[name](x)]})
    message = f"Only nested lists and tuples of tensors are supported.*{name}"
    with pytest.raises(poptorch.Error, match=message):
        run(model, inputs(2), execution, training=False)


class Forgetful(poptorch.ICustomArgParser):
    """Leaves the tensors in the structure as they are."""

    def yieldTensors(self, struct: Holder) -> Iterator[Tensor]:
        yield struct.x

    def reconstruct(self, original_structure: Holder, tensor_iterator: Iterator[Tensor]) -> Holder:
        next(tensor_iterator)
        return original_structure


def test_tensors_without_values_are_never_returned() -> None:
    poptorch.registerCustomArgParser(Holder, Forgetful())
    try:
        executor = poptorch.inferenceModel(Model(lambda self, x: Holder(2 * x)))
        with pytest.raises(poptorch.Error, match="a tensor that it kept when it was compiled"):
            executor(torch.ones(2))
        executor.destroy()
    finally:
        poptorch.registerCustomArgParser(Holder, None)


@dataclass
class Output(OrderedDict[str, Any]):
    """A dictionary with attributes, as Hugging Face's models return."""

    logits: Tensor
    hidden: tuple[Tensor, ...]
    extra: Any = None

    def __post_init__(self) -> None:
        super().__init__(logits=self.logits, hidden=self.hidden)


def test_dictionaries_keep_what_they_are(execution: str) -> None:
    def forward(self: Model, x: Tensor) -> Any:
        own: defaultdict[str, Any] = defaultdict(list, a=2 * x)
        return Output(x, (x + 1, x + 2)), own

    model, given = Model(forward), inputs(2)
    _, step = run(model, given, execution, training=False)
    output, own = step.outputs
    assert type(output) is Output and type(own) is defaultdict and own.default_factory is list
    torch.testing.assert_close(output.logits, given[0])
    assert output["logits"] is output.logits and output["hidden"] is output.hidden
    torch.testing.assert_close(output.hidden[1], given[0] + 2)
    torch.testing.assert_close(own["a"], 2 * given[0])
    assert output.extra is None


def test_inputs_that_change_in_place_come_back(execution: str) -> None:
    def forward(self: Model, x: Tensor, y: Tensor) -> Tensor:
        x[:2].mul_(2)
        return mean(x @ self.w * y)

    model, given = Model(forward), inputs(3, lambda replicas: torch.randn(replicas, BATCH, WIDTH))
    kept = [x.clone() for x in given]
    program, step = run(model, given, execution)
    assert program.changed_inputs == (0,) and [*step.changed_inputs] == [0]
    assert all(torch.equal(a, b) for a, b in zip(given, kept, strict=True))
    assert torch.equal(step.changed_inputs[0][:, :2], 2 * given[0][:, :2])
    assert torch.equal(step.changed_inputs[0][:, 2:], given[0][:, 2:])


def test_buffers_of_a_model_change_for_each_replica(execution: str) -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        self.count += 1
        self.average.mul_(0.5).add_(x.mean(0))
        return mean(x @ self.w + self.average + self.pos)

    buffers = {"count": torch.tensor(4), "average": torch.ones(WIDTH), **_position()}
    model, given = Model(forward, buffers=buffers), inputs(3)
    program, step = run(model, given, execution)
    assert program.changed_buffers == ("count", "average")
    assert step.buffers["count"].tolist() == [5, 5, 5]
    assert_as_alone(step, alone(model, given, lambda loss: loss))
    assert model.count == 4


def test_a_copy_of_a_buffer_that_is_filled_is_no_change_of_it() -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        filled, mask = self.pos.clone(), self.mask.to(torch.float32)
        filled += x[0]
        mask *= 2
        return mean(x @ self.w * filled * mask)

    mask = torch.tensor([True, False, True, True])
    model, given = Model(forward, buffers={"mask": mask, **_position()}), inputs(3)
    program, step = run(model, given, None)
    assert program.execution == "lockstep" and program.changed_buffers == ()
    assert_as_alone(step, alone(model, given, lambda loss: loss))


@pytest.mark.parametrize("kind", ["w", "pos"])
def test_reassigning_a_parameter_or_a_buffer_is_an_error(kind: str, execution: str) -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        if kind == "w":
            self.w = nn.Parameter(torch.ones(WIDTH, WIDTH))
        else:
            self.pos = self.pos + 1
        return mean(x @ self.w)

    model = Model(forward, buffers=_position())
    w, pos = model.w, model.pos
    with pytest.raises(poptorch.Error, match=f" {kind} is reassigned within the model"):
        run(model, inputs(2), execution)
    assert model.w is w and model.pos is pos


REASSIGNED: dict[str, tuple[str, Callable[[Model, Tensor], object]]] = {
    "a parameter's data": ("Parameter w", lambda self, x: setattr(self.w, "data", 2 * self.w)),
    "a transposed one": ("Parameter w", lambda self, x: setattr(self.w, "data", self.w.data.t())),
    "a buffer's data": ("Buffer pos", lambda self, x: setattr(self.pos, "data", self.pos + 1)),
    "set_": ("Buffer pos", lambda self, x: self.pos.set_(self.pos + 1)),
    "an input's data": ("Input 0", lambda self, x: setattr(x, "data", x + 1)),
}


@pytest.mark.parametrize("how", REASSIGNED)
def test_other_memory_for_a_tensor_is_a_reassignment(how: str, execution: str) -> None:
    name, change = REASSIGNED[how]
    model = Model(lambda self, x: (change(self, x), mean(x @ self.w))[1], buffers=_position())
    given = inputs(2)
    before = [x.clone() for x in (model.w.detach(), model.pos, given[0])]
    with pytest.raises(poptorch.Error, match=f"{name} is reassigned within the model"):
        run(model, given, execution)
    for x, was in zip((model.w.detach(), model.pos, given[0]), before, strict=True):
        assert torch.equal(x, was)


def test_data_that_stay_what_they_are_may_be_set(execution: str) -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        self.w.data = self.w.data
        return mean(x @ self.w)

    model, given = Model(forward), inputs(2)
    _, step = run(model, given, execution)
    assert_as_alone(step, alone(model, given, lambda loss: loss))


UNREGISTERED: dict[str, Callable[[Model], object]] = {
    "t": lambda self: self.t.add_(1),
    "states[1]": lambda self: self.states[1].mul_(2),
    "inner.0.table['a']": lambda self: self.inner[0].table["a"].fill_(3),
}


@pytest.mark.parametrize("name", UNREGISTERED)
def test_a_tensor_that_is_no_buffer_does_not_change(name: str, execution: str) -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        UNREGISTERED[name](self)
        return mean(x @ self.w)

    model: Any = Model(forward, nn.Identity())
    model.t, model.states = torch.ones(2), [torch.ones(2), torch.ones(2)]
    model.inner[0].table = {"a": torch.ones(2)}
    message = f"Tensor '{re.escape(name)}' was changed in place .* register it as a buffer"
    with pytest.raises(poptorch.Error, match=message):
        run(model, inputs(3), execution)
    for x in (model.t, *model.states, model.inner[0].table["a"]):
        assert x.tolist() == [1, 1]


def without_grad(change: Callable[[], object]) -> None:
    with torch.no_grad():
        change()


CHANGES: dict[str, Callable[[Model], object]] = {
    "under no_grad": lambda self: without_grad(lambda: self.w.mul_(2)),
    "by its data": lambda self: self.w.data.clamp_(-1, 1),
}


@pytest.mark.parametrize("how", CHANGES)
def test_changing_a_parameter_in_place_is_an_error(how: str, execution: str) -> None:
    model = Model(lambda self, x: (CHANGES[how](self), mean(x @ self.w))[1])
    before = model.w.detach().clone()
    with pytest.raises(poptorch.Error, match="Parameter 'w' was changed in place"):
        run(model, inputs(2), execution)
    assert torch.equal(model.w, before)


def test_changing_the_data_of_a_buffer_counts_as_a_change() -> None:
    model = Model(
        lambda self, x: (self.pos.data.add_(1), mean(x @ self.w + self.pos))[1], buffers=_position()
    )
    program, step = run(model, inputs(2), None)
    assert program.changed_buffers == ("pos",)
    assert step.buffers["pos"].tolist() == [[1, 2, 3, 4]] * 2
    assert model.pos.tolist() == [0, 1, 2, 3]


def test_models_run_under_inference_mode_and_no_grad(execution: str) -> None:
    model, given = MLP(), inputs(2, classes)
    _, expected = run(model, given, execution)
    for mode in (torch.inference_mode(), torch.no_grad()):
        with mode:
            _, step = run(model, given, execution)
        assert_same(step, expected)


def test_only_parameters_that_the_loss_reaches_have_gradients(execution: str) -> None:
    class Parts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.tied = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.unused, self.frozen = nn.Linear(2, 2), nn.Linear(WIDTH, WIDTH)
            self.detached = nn.Parameter(torch.ones(WIDTH))
            self.frozen.requires_grad_(False)
            self.tied.weight = self.used.weight

        def forward(self, x: Tensor) -> Tensor:
            return mean(self.tied(self.frozen(self.used(x))) * self.detached.detach())

    model, given = Parts(), inputs(3)
    program, step = run(model, given, execution)
    assert program.trained == ("used.weight", "used.bias", "tied.bias")
    assert_as_alone(step, alone(model, given, lambda loss: loss))


def test_parameters_are_parameters_inside_forward(execution: str) -> None:
    def forward(self: Model, x: Tensor) -> Tensor:
        assert isinstance(self.w, nn.Parameter) and [n for n, _ in self.named_parameters()] == ["w"]
        return mean(x @ self.w)

    run(Model(forward), inputs(2), execution)


@pytest.mark.parametrize("scale", [1024.0, {"hidden.weight": 2.0, "hidden.bias": 8.0}])
def test_the_loss_is_scaled_before_it_is_differentiated(scale: Any, execution: str) -> None:
    model, given = MLP(), inputs(2, classes)
    names = [name for name, _ in model.named_parameters()]
    scales = {name: scale.get(name, 0.5) if isinstance(scale, dict) else scale for name in names}
    _, plain = run(model, given, execution)
    _, scaled = run(
        model, given, execution, loss_scale=scales if isinstance(scale, dict) else scale
    )
    for name in names:  # powers of two: the same digits
        assert torch.equal(scaled.gradients[name], scales[name] * plain.gradients[name])
    assert torch.equal(scaled.outputs[1], plain.outputs[1])


# Tracing, or not.


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


# Collectives.


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


# Random numbers.

RANDOM: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "rand": lambda self, x: torch.rand(BATCH, WIDTH),
    "rand_like": lambda self, x: torch.rand_like(x),
    "randn": lambda self, x: torch.randn(BATCH, WIDTH),
    "randn_like": lambda self, x: torch.randn_like(x, dtype=torch.float64).float(),
    "uniform_": lambda self, x: torch.empty(BATCH, WIDTH).uniform_(-1, to=2),
    "normal_": lambda self, x: torch.empty(BATCH, WIDTH).normal_(mean=1, std=2),
    "normal of numbers": lambda self, x: torch.normal(1.0, 2.0, (BATCH, WIDTH)),
    "normal of means": lambda self, x: torch.normal(x, 2.0),
    "normal of deviations": lambda self, x: torch.normal(1.0, x.abs()),
    "normal of both": lambda self, x: torch.normal(x, x.abs()),
    "log_normal_": lambda self, x: torch.empty(BATCH, WIDTH).log_normal_(),
    "exponential_": lambda self, x: torch.empty(BATCH, WIDTH).exponential_(2.0),
    "cauchy_": lambda self, x: torch.empty(BATCH, WIDTH).cauchy_(),
    "geometric_": lambda self, x: torch.empty(BATCH, WIDTH).geometric_(0.3),
    "bernoulli": lambda self, x: torch.bernoulli(x.sigmoid()),
    "bernoulli of a number": lambda self, x: torch.bernoulli(x, 0.25),
    "bernoulli_": lambda self, x: torch.empty(BATCH, WIDTH).bernoulli_(0.25),
    "bernoulli_ of chances": lambda self, x: torch.empty(BATCH, WIDTH).bernoulli_(x.sigmoid()),
    "randint": lambda self, x: torch.randint(-3, 9, (BATCH, WIDTH)).float(),
    "randint_like": lambda self, x: torch.randint_like(x, 9),
    "random_": lambda self, x: torch.zeros(BATCH, WIDTH, dtype=torch.int32).random_(5).float(),
    "randperm": lambda self, x: x[torch.randperm(BATCH)],
    "multinomial": lambda self, x: torch.multinomial(x.softmax(-1), 3).float() @ x[:3],
    "multinomial with replacement": lambda self, x: (
        torch.multinomial(x.softmax(-1), BATCH, replacement=True).float() @ x
    ),
    "dropout": lambda self, x: F.dropout(x, 0.4),
    "dropout in place": lambda self, x: F.dropout(x + 1, 0.4, inplace=True),
    "dropout of channels": lambda self, x: F.dropout1d(x, 0.4),
    "alpha_dropout": lambda self, x: F.alpha_dropout(x, 0.4, training=True),
    "gumbel_softmax": lambda self, x: F.gumbel_softmax(x, hard=True),
    "attention with dropout": lambda self, x: F.scaled_dot_product_attention(
        x, x, x, dropout_p=0.4
    ),
}
"""What torch draws, of shape (BATCH, WIDTH)."""


def drawing(name: str) -> Model:
    return Model(lambda self, x: (RANDOM[name](self, x), mean(RANDOM[name](self, x) @ self.w)))


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_are_the_same_in_lockstep_and_in_threads(name: str) -> None:
    model, given = drawing(name), inputs(1)
    given = [given[0].expand(3, -1, -1).contiguous()]
    steps = [run(model, given, execution, counter=2)[1] for execution in ("lockstep", "threads")]
    assert_same(*steps, bits=False)
    drawn = steps[0].outputs[0]
    assert drawn.shape == (3, BATCH, WIDTH)
    assert not torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[1], drawn[2])


@pytest.mark.parametrize("name", ["rrelu", "poisson", "lstm"])
def test_what_has_no_stream_is_seeded_for_each_replica(name: str) -> None:
    kinds: dict[str, Callable[[Model, Tensor], Tensor]] = {
        "rrelu": lambda self, x: F.rrelu(x, training=True),
        "poisson": lambda self, x: torch.poisson(x.abs() * 20),
        "lstm": lambda self, x: self.inner[0](x)[0],
    }
    modules = [nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.5)] if name == "lstm" else []
    model = Model(
        lambda self, x: (kinds[name](self, x), mean(kinds[name](self, x) @ self.w)), *modules
    )
    given = [inputs(1)[0].expand(3, -1, -1).contiguous()]
    torch.manual_seed(0)
    program, first = run(model, given, None)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    _, again = run(model, given, None)
    assert program.execution == "threads"
    assert torch.equal(torch.get_rng_state(), before)  # the program's own numbers are untouched
    assert_same(first, again)
    assert not torch.equal(first.outputs[0][0], first.outputs[0][1])


def test_random_numbers_are_those_of_gpusim_rng() -> None:
    def forward(self: Model, x: Tensor) -> tuple[Tensor, ...]:
        shape = (BATCH, WIDTH)
        return torch.rand(shape), torch.randn(shape), torch.randint(3, 90, shape), mean(self.w)

    _, step = run(Model(forward), inputs(3), "lockstep", counter=5, seed=2**64 - 3)
    generator = gpusim.rng(2**64 - 3, AXIS, calls=5 << 20)

    def draw() -> tuple[Any, ...]:
        shape = (BATCH, WIDTH)
        return generator.uniform(shape), generator.normal(shape), generator.integers(3, 90, shape)

    expected = gpusim.vmap(draw, axis_name=AXIS, axis_size=3)()
    for got, wanted in zip(step.outputs, expected, strict=False):
        assert np.array_equal(got.numpy(), wanted)


def test_dropout_drops_and_scales_and_its_gradient_does_too(execution: str) -> None:
    model = Model(lambda self, x: (y := F.dropout(self.w + 0 * x[0], 0.25), mean(y)))
    _, step = run(model, inputs(5), execution)
    kept = step.outputs[0] != 0
    torch.testing.assert_close(step.outputs[0][kept], (model.w.expand(5, -1, -1) / 0.75)[kept])
    torch.testing.assert_close(step.gradients["w"], kept / 0.75 / WIDTH**2)
    assert 0.4 < kept.float().mean() < 1


def test_random_numbers_depend_on_seed_counter_and_replica_alone() -> None:
    model, given = drawing("randn"), inputs(4)
    _, all_four = run(model, given, "lockstep", counter=3, seed=1)
    _, last_two = run(model, [x[2:] for x in given], "lockstep", counter=3, seed=1, offset=2)
    assert torch.equal(all_four.outputs[0][2:], last_two.outputs[0])
    for counter, seed in ((4, 1), (3, 2)):
        _, other = run(model, given, "lockstep", counter=counter, seed=seed)
        assert not torch.equal(other.outputs[0], all_four.outputs[0])


def test_two_operators_draw_different_numbers(execution: str) -> None:
    model = Model(lambda self, x: (torch.rand(4), torch.rand(4), mean(self.w)))
    _, step = run(model, inputs(2), execution)
    assert not torch.equal(step.outputs[0], step.outputs[1])


# Anchored tensors.


def anchoring(*names: str) -> poptorch.Options:
    options = poptorch.Options()
    for name in names:
        options.anchorTensor(f"short {name}", name)
    return options


def test_tensors_have_names_and_can_be_anchored(execution: str) -> None:
    model, given = MLP(), inputs(3, classes)
    names = ["hidden/linear:0", "relu:0", "Gradient___model.out.bias", "out.bias"]
    program, step = run(model, given, execution, options=anchoring(*names))
    assert {*names} - {*program.names} == {"Gradient___model.out.bias"}
    assert {"out/linear:0", "cross_entropy:0", "Gradient___hidden.weight"} <= {*program.names}
    assert [*step.anchors] == names
    hidden = torch.stack([model.hidden(x).detach() for x in given[0]])
    torch.testing.assert_close(step.anchors["hidden/linear:0"], hidden)
    torch.testing.assert_close(step.anchors["relu:0"], hidden.relu())
    assert torch.equal(step.anchors["Gradient___model.out.bias"], step.gradients["out.bias"])
    assert torch.equal(step.anchors["out.bias"], model.out.bias.detach().expand(3, -1))


def test_an_operator_that_runs_twice_has_two_names() -> None:
    model = Model(lambda self, x: mean(x.relu() @ self.w.relu()))
    program, _ = run(model, inputs(1), None)
    assert [name for name in program.names if "relu" in name] == ["relu:0", "relu/1:0"]


def test_anchored_gradients_are_those_of_the_scaled_loss() -> None:
    model, given = MLP(), inputs(2, classes)
    name = "Gradient___hidden.weight"
    _, plain = run(model, given, None, options=anchoring(name))
    _, scaled = run(model, given, None, options=anchoring(name), loss_scale=64.0)
    assert torch.equal(scaled.anchors[name], 64 * plain.anchors[name])


def test_gradients_of_what_was_computed_can_be_anchored(execution: str) -> None:
    names = ["Gradient___hidden/linear:0", "Gradient___relu:0", "Gradient___model.out/linear:0"]
    model, given = MLP(), inputs(3, classes)
    _, plain = run(model, given, execution)
    _, step = run(model, given, execution, options=anchoring(*names), loss_scale=4.0)
    for name, gradient in plain.gradients.items():
        assert torch.equal(step.gradients[name], 4 * gradient)
    for replica in range(3):
        hidden = model.hidden(given[0][replica])
        active = hidden.relu()
        y = model.out(active)
        loss = 4 * F.cross_entropy(y, given[1][replica])
        for name, wanted in zip(names, torch.autograd.grad(loss, [hidden, active, y]), strict=True):
            torch.testing.assert_close(step.anchors[name][replica], wanted)


def test_a_loss_whose_gradient_is_anchored_is_still_the_loss(execution: str) -> None:
    model = Model(lambda self, x: mean(3 * F.mse_loss(x @ self.w, x)))
    given = inputs(2)
    name = "Gradient___mse_loss:0"
    program, step = run(model, given, execution, options=anchoring(name))
    assert program.losses == ("mse_loss", "identity_loss")
    assert step.anchors[name].tolist() == [3, 3]
    assert not any(x.requires_grad for x in (*step.anchors.values(), *step.gradients.values()))


def test_inference_has_no_gradients_to_anchor(execution: str) -> None:
    for name in ("Gradient___w", "Gradient___relu:0"):
        with pytest.raises(poptorch.Error, match="is none of the model's"):
            run(
                Model(lambda self, x: (x @ self.w).relu()),
                inputs(2),
                execution,
                training=False,
                options=anchoring(name),
            )


def test_an_anchor_that_there_is_not_is_an_error() -> None:
    with pytest.raises(poptorch.Error, match="Anchored tensor 'nothing' is none of the model's: w"):
        run(Model(lambda self, x: mean(x @ self.w)), inputs(1), None, options=anchoring("nothing"))


def test_graphs_reshape_by_methods_which_read_no_lists() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return x.view(2, -1), torch.mm(x.view(2, 2), x.view(2, 2)).view(1, 4), y.view(())

    given = torch.arange(4.0), torch.ones(1)
    graph = make_fx(function)(*given)
    call_directly(graph)
    assert graph.code.count(".view(") == 4 and ", [])" in graph.code
    assert all(map(torch.equal, graph(*given), function(*given)))
