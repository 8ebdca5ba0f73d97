"""identity_loss, and which of a model's losses is differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gpusim import poptorch
from gpusim.poptorch import Error
from gpusim.poptorch.losses import FUNCTIONAL, NO_LOSS, SEVERAL, LossFinder, identity_loss
from gpusim.poptorch.replicas import compile_model

ROWS, COLUMNS = 5, 3


class Model(nn.Module):
    """A linear layer, and what a test makes of its result."""

    def __init__(self, after: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, COLUMNS)
        self.after = after

    def forward(self, x: Tensor) -> Any:
        return self.after(self.layer(x))


def run(after: Callable[..., Any], execution: str | None = "lockstep") -> tuple[Model, Any, Any]:
    """The model, its program and a step of one replica, on ones."""
    model, x = Model(after), torch.ones(ROWS, 4)
    program = compile_model(model, [x], training=True, replicas=1, execution=execution)
    parameters = {name: p.detach()[None] for name, p in model.named_parameters()}
    return model, program, program.run(parameters, {}, [x[None]], counter=0, seed=0)


def gradient_of(model: Model, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """PyTorch's gradient of the layer's weights, of a loss of the layer's result."""
    (found,) = torch.autograd.grad(loss(model.layer(torch.ones(ROWS, 4))), model.layer.weight)
    return found


def target() -> Tensor:
    return torch.linspace(-1, 1, ROWS * COLUMNS).reshape(ROWS, COLUMNS)


def signs() -> Tensor:
    return torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0])


def classes() -> Tensor:
    return torch.tensor([0, 2, 1, 1, 0])


OF_LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "binary_cross_entropy": lambda y: F.binary_cross_entropy(y.sigmoid(), target().sigmoid()),
    "binary_cross_entropy_with_logits": lambda y: F.binary_cross_entropy_with_logits(
        y, target().sigmoid()
    ),
    "cosine_embedding_loss": lambda y: F.cosine_embedding_loss(y, target(), signs()),
    "cross_entropy": lambda y: F.cross_entropy(y, classes()),
    "ctc_loss": lambda y: F.ctc_loss(
        y.log_softmax(-1)[:, None], torch.tensor([[1, 2]]), torch.tensor([5]), torch.tensor([2])
    ),
    "gaussian_nll_loss": lambda y: F.gaussian_nll_loss(y, target(), torch.ones_like(y)),
    "hinge_embedding_loss": lambda y: F.hinge_embedding_loss(y, target().sign()),
    "huber_loss": lambda y: F.huber_loss(y, target()),
    "kl_div": lambda y: F.kl_div(y.log_softmax(-1), target().softmax(-1), reduction="batchmean"),
    "l1_loss": lambda y: F.l1_loss(y, target()),
    "linear_cross_entropy": lambda y: F.linear_cross_entropy(y, target()[:3], classes()),
    "margin_ranking_loss": lambda y: F.margin_ranking_loss(y[:, 0], y[:, 1], signs()),
    "mse_loss": lambda y: F.mse_loss(y, target()),
    "multi_margin_loss": lambda y: F.multi_margin_loss(y, classes()),
    "multilabel_margin_loss": lambda y: F.multilabel_margin_loss(
        y, torch.tensor([[0, 2, -1]]).expand(ROWS, 3)
    ),
    "multilabel_soft_margin_loss": lambda y: F.multilabel_soft_margin_loss(y, target().sign()),
    "nll_loss": lambda y: F.nll_loss(y.log_softmax(-1), classes()),
    "poisson_nll_loss": lambda y: F.poisson_nll_loss(y, target().exp()),
    "smooth_l1_loss": lambda y: F.smooth_l1_loss(y, target()),
    "soft_margin_loss": lambda y: F.soft_margin_loss(y, target().sign()),
    "triplet_margin_loss": lambda y: F.triplet_margin_loss(y, target(), -target()),
    "triplet_margin_with_distance_loss": lambda y: F.triplet_margin_with_distance_loss(
        y, target(), -target()
    ),
}


def test_every_loss_of_torch_is_known() -> None:
    entropies = {name for name in vars(F) if name.endswith(("_loss", "_entropy"))}
    others = {"kl_div", "binary_cross_entropy_with_logits", "triplet_margin_with_distance_loss"}
    assert {*FUNCTIONAL} == entropies | others == {*OF_LOSSES}


@pytest.mark.parametrize("name", OF_LOSSES)
def test_a_loss_of_torch_is_found_and_differentiated(name: str) -> None:
    loss = OF_LOSSES[name]
    looks_at_values = name in ("ctc_loss", "gaussian_nll_loss")
    execution = "threads" if looks_at_values else "lockstep"
    model, program, step = run(lambda y: (y, loss(y)), execution)
    assert program.losses == (name,)
    expected = gradient_of(model, loss)
    torch.testing.assert_close(step.gradients["layer.weight"][0], expected)
    assert torch.equal(step.loss, step.outputs[1])


MODULES = [nn.CrossEntropyLoss(), nn.NLLLoss()]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: type(module).__name__)
@pytest.mark.parametrize("execution", ["lockstep", "threads"])
def test_targets_may_be_int32_as_they_are_on_an_ipu(module: nn.Module, execution: str) -> None:
    model, _, step = run(lambda y: module(y, classes().int()), execution)
    expected = gradient_of(model, lambda y: module(y, classes()))
    torch.testing.assert_close(step.gradients["layer.weight"][0], expected)


REDUCED: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": torch.sum,
    "mean": torch.mean,
    "none": lambda y: y,
}


@pytest.mark.parametrize("reduction", REDUCED)
def test_identity_loss_reduces_and_is_the_loss(reduction: str, execution: str) -> None:
    model, program, step = run(lambda y: identity_loss(y * y, reduction), execution)
    assert program.losses == ("identity_loss",)
    expected = gradient_of(model, lambda y: REDUCED[reduction](y * y).sum())
    torch.testing.assert_close(step.gradients["layer.weight"][0], expected)
    with torch.no_grad():
        y = model.layer(torch.ones(ROWS, 4))
    torch.testing.assert_close(step.outputs[0], REDUCED[reduction](y * y))


def test_a_loss_that_is_not_reduced_is_differentiated_as_its_sum(execution: str) -> None:
    model, _, step = run(lambda y: F.mse_loss(y, target(), reduction="none"), execution)
    expected = gradient_of(model, lambda y: F.mse_loss(y, target(), reduction="sum"))
    torch.testing.assert_close(step.gradients["layer.weight"][0], expected)
    assert step.outputs.shape == (1, ROWS, COLUMNS)


class OfAParameter(nn.Module):
    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.reduction = reduction

    def forward(self, x: Tensor) -> Tensor:
        return identity_loss(self.w, self.reduction)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("reduction", REDUCED)
def test_identity_loss_of_a_parameter_trains_it(reduction: str, replicas: int) -> None:
    model = OfAParameter(reduction)
    options = poptorch.Options().replicationFactor(replicas)
    sgd = torch.optim.SGD(model.parameters(), lr=0.5)
    train = poptorch.trainingModel(model, options, sgd)
    expected = torch.tensor([1.0, 2.0])
    for _ in range(3):
        loss = train(torch.zeros(replicas))
        reduced = REDUCED[reduction](expected).reshape(-1).repeat(replicas)
        torch.testing.assert_close(loss.reshape(-1), reduced)
        expected = expected - (0.25 if reduction == "mean" else 0.5)
    assert torch.equal(model.w.detach(), expected)
    train.destroy()


class OfABuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.total.copy_(self.total + x)
        return identity_loss(self.total, "none")


@pytest.mark.parametrize("replicas", [1, 2])
def test_identity_loss_of_a_buffer_has_its_new_values(replicas: int) -> None:
    options = poptorch.Options().replicationFactor(replicas).broadcastBuffers(False)
    infer = poptorch.inferenceModel(OfABuffer(), options)
    x = torch.arange(2.0 * replicas)
    assert torch.equal(infer(x), x)
    assert torch.equal(infer(x), 2 * x)
    infer.destroy()


class BelowTorch(nn.Module):
    """Adds by a function that function modes do not see."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            result = self.w + x
        return identity_loss(result, "sum")


def test_a_parameter_that_torch_functions_do_not_see_is_trained() -> None:
    model = BelowTorch()
    train = poptorch.trainingModel(model, None, torch.optim.SGD(model.parameters(), lr=0.5))
    train(torch.zeros(1))
    assert model.w.tolist() == [0.5, 1.5]
    train.destroy()


def test_outside_a_model_identity_loss_only_reduces() -> None:
    x = torch.tensor([1.0, 2.0, 6.0], requires_grad=True)
    assert identity_loss(x, "sum") == 9 and identity_loss(x, "mean") == 3
    kept = identity_loss(x, reduction="none")
    assert torch.equal(kept, x) and kept is not x


@pytest.mark.parametrize("reduction", ["max", "", None, 0, "Sum"])
def test_other_reductions_are_refused(reduction: Any) -> None:
    with pytest.raises(AssertionError, match=r"^Unsupported reduction type!$"):
        identity_loss(torch.ones(3), reduction)


def two_losses(y: Tensor) -> Tensor:
    return F.mse_loss(y, target()) + 3 * F.l1_loss(y, target())


ONE_LOSS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Tensor]]] = {
    "of two": (lambda y: identity_loss(two_losses(y), "none"), two_losses),
    "scaled after it": (lambda y: 5 * F.mse_loss(y, target()), lambda y: F.mse_loss(y, target())),
    "in a chain": (
        lambda y: identity_loss(identity_loss(two_losses(y), "sum") * 2, "mean"),
        lambda y: 2 * two_losses(y),
    ),
    "through a view": (
        lambda y: identity_loss(F.mse_loss(y, target(), reduction="none").view(-1)[1:], "sum"),
        lambda y: F.mse_loss(y, target(), reduction="none").view(-1)[1:].sum(),
    ),
    "through what was filled": (
        lambda y: identity_loss(filled(F.mse_loss(y, target()), y), "sum"),
        lambda y: F.mse_loss(y, target()) + y[0, 0],
    ),
    "through a list": (
        lambda y: identity_loss(torch.stack([F.mse_loss(y, target()), y[0, 0]]), "sum"),
        lambda y: F.mse_loss(y, target()) + y[0, 0],
    ),
    "through what is detached": (
        lambda y: identity_loss(F.mse_loss(y, target()).detach() * y, "sum"),
        lambda y: (F.mse_loss(y, target()).detach() * y).sum(),
    ),
}


def filled(loss: Tensor, y: Tensor) -> Tensor:
    both = torch.zeros(2)
    both[0] = loss
    both[1] = y[0, 0]
    return both


@pytest.mark.parametrize("case", ONE_LOSS)
def test_the_last_of_losses_that_depend_on_each_other_counts(case: str, execution: str) -> None:
    after, expected = ONE_LOSS[case]
    model, _, step = run(after, execution)
    torch.testing.assert_close(step.gradients["layer.weight"][0], gradient_of(model, expected))


SEVERAL_LOSSES: dict[str, Callable[[Tensor], Any]] = {
    "added": two_losses,
    "returned": lambda y: (F.mse_loss(y, target()), F.l1_loss(y, target())),
    "one of which is marked": lambda y: (
        identity_loss(F.mse_loss(y, target()), "sum"),
        F.l1_loss(y, target()),
    ),
    "one of which is not used": lambda y: (F.l1_loss(y, target()), F.mse_loss(y, target()))[:1],
    "of one tensor": lambda y: (identity_loss(y, "none"), identity_loss(y, "none")),
}


@pytest.mark.parametrize("case", SEVERAL_LOSSES)
def test_losses_that_do_not_depend_on_each_other_are_an_error(case: str, execution: str) -> None:
    with pytest.raises(Error) as caught:
        run(SEVERAL_LOSSES[case], execution)
    assert caught.value.message == SEVERAL
    assert caught.value.type == "poptorch_cpp_error"


def test_no_loss_is_an_error(execution: str) -> None:
    with pytest.raises(Error, match="Couldn't find a loss in graph!") as caught:
        run(lambda y: y.sum(), execution)
    assert caught.value.message == NO_LOSS


def test_inference_needs_no_loss_and_may_have_several() -> None:
    for after in (lambda y: y, two_losses):
        program = compile_model(Model(after), [torch.ones(ROWS, 4)], training=False, replicas=1)
        assert program.trained == ()


def test_a_finder_forgets_nothing_when_memory_is_used_again() -> None:
    finder = LossFinder()
    loss = torch.ones(())
    finder.mark("first", [], loss)
    for _ in range(20):  # what depends on it dies at once, and others may lie where it lay
        finder.record(torch.mul, [loss], [loss * 2])
        other = torch.ones(())
        finder.mark("other", [other], other * 3)
    assert not finder.marks[0].absorbed


OVER_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "a loss under vmap": lambda y: torch.func.vmap(F.mse_loss)(y, target()),
    "marked after it": lambda y: identity_loss(torch.func.vmap(F.mse_loss)(y, target()), "sum"),
    "vmap after a loss": lambda y: identity_loss(
        torch.func.vmap(lambda row: row.sum())(F.mse_loss(y, target(), reduction="none")) / COLUMNS,
        "sum",
    ),
}


@pytest.mark.parametrize("how", OVER_ROWS)
def test_losses_and_vmap_go_together(how: str) -> None:
    for execution in (None, "threads"):
        model, _, step = run(OVER_ROWS[how], execution)
        expected = gradient_of(model, lambda y: ((y - target()) ** 2).mean(1).sum())
        torch.testing.assert_close(step.gradients["layer.weight"][0], expected)


def test_sparse_tensors_are_no_losses_and_no_trouble() -> None:
    finder = LossFinder()
    loss, sparse = torch.ones(2, requires_grad=True) * 1, torch.eye(2).to_sparse()
    finder.mark("mse_loss", [], loss)
    finder.record(torch.mul, [sparse], [sparse])
    assert finder.final() is loss
