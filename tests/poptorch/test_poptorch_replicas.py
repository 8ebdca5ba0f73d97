"""Replicas of a model: what they compute, take, change and return, as a loop over PyTorch."""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gpusim import poptorch
from gpusim.poptorch.replicas import compile_model
from tests.poptorch.poptorch_models import spread
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
