"""for_loop, cond and CPU operations in models, for each replica as its own values say."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpusim.poptorch import ops
from gpusim.poptorch.losses import identity_loss
from gpusim.poptorch.poptorch_core import Error
from tests.poptorch.poptorch_models import EXECUTIONS, REPLICAS, Calling, infer, run

DTYPES = [torch.float32, torch.float16]


def numbers(replicas: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(3.0 * replicas).reshape(replicas, 3).to(dtype)


def truths(replicas: int) -> Tensor:
    return (torch.arange(replicas) % 2 == 0).reshape(replicas, 1)


# Loops.


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float16"])
@pytest.mark.parametrize("replicas", REPLICAS)
def test_a_loop_hands_on_what_its_body_returns(
    replicas: int, dtype: torch.dtype, execution: str
) -> None:
    def model(x: Tensor, y: Tensor) -> list[Tensor]:
        return ops.for_loop(5, lambda a, b: (a / 2 + y, b + 1), [x, y])

    x, y = numbers(replicas, dtype), numbers(replicas, dtype) + 1
    a, b = x, y
    for _ in range(5):
        a, b = a / 2 + y, b + 1
    found = infer(model, [x, y], execution)
    torch.testing.assert_close(found, [a, b])
    assert ops.for_loop(5, lambda a, b: (a / 2 + y, b + 1), [x, y])[0].equal(a)


def test_a_loop_passes_by_value(execution: str) -> None:
    def model(x: Tensor, y: Tensor) -> list[Tensor]:
        def body(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
            a += 1
            b *= 2
            return a, y  # the next call changes what it is given, and not y

        looped = ops.for_loop(3, body, [x, y])
        return [*looped, x, y]

    x, y = numbers(2), numbers(2) + 1
    found = infer(model, [x, y], execution)
    torch.testing.assert_close(found, [x + 3, y, x, y])


def test_a_loop_of_no_calls_copies(execution: str) -> None:
    x = numbers(2)
    (found,) = infer(lambda x: ops.for_loop(0, lambda x: x + 1, [x]), [x], execution)
    assert found.equal(x)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda x: (x, x), "body takes 1 tensors and returns 2"),
        (lambda x: x.sum(), r"returns torch.float32 of shape \(\)"),
        (lambda x: x.int(), "returns torch.int32"),
        (lambda x: 3, "must return tensors"),
    ],
)
def test_a_loop_wants_back_what_it_gives(
    body: Callable[..., Any], message: str, execution: str
) -> None:
    with pytest.raises(Error, match=message):
        infer(lambda x: ops.for_loop(2, body, [x]), [numbers(2)], execution)


def test_a_loops_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match=r"\(Object is not list\)"):
        ops.for_loop(2, lambda x: x, (torch.ones(1),))
    with pytest.raises(ValueError, match=r"\(Object contained in list at index 1 is not torch.ten"):
        ops.for_loop(2, lambda x, y: (x, y), [torch.ones(1), 5])
    with pytest.raises(ValueError, match="count must be an integer from 0, got -1"):
        ops.for_loop(-1, lambda x: x, [torch.ones(1)])


# Branches.


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float16"])
@pytest.mark.parametrize("replicas", REPLICAS)
def test_each_replica_takes_its_own_branch(
    replicas: int, dtype: torch.dtype, execution: str
) -> None:
    def model(truth: Tensor, x: Tensor, y: Tensor) -> list[Tensor]:
        return ops.cond(truth, lambda x: (x + y, 2 * x), [x], lambda a, b: (a * b, y), [x, y])

    truth, x = truths(replicas), numbers(replicas, dtype)
    found = infer(model, [truth, x, x + 1], execution)
    expected = torch.where(truth, 2 * x + 1, x * (x + 1)), torch.where(truth, 2 * x, x + 1)
    torch.testing.assert_close(found, [*expected])
    for replica in range(replicas):
        alone = model(truth[replica], x[replica], x[replica] + 1)
        torch.testing.assert_close(alone, [each[replica] for each in found])


def test_branches_nest(execution: str) -> None:
    def model(outer: Tensor, inner: Tensor, x: Tensor) -> Tensor:
        def then() -> Tensor:
            return ops.cond(inner, lambda: x + 1, [], lambda: x + 2, [])[0]

        def other(flag: Tensor) -> Tensor:
            return ops.cond(~flag, lambda x: x + 3, [x], lambda: x + 4, [])[0]

        return ops.cond(outer, then, [], other, [inner])[0]

    outer = torch.tensor([True, True, False, False])
    inner = torch.tensor([True, False, True, False])
    found = infer(model, [outer, inner, torch.zeros(4)], execution)
    assert found.tolist() == [1, 2, 4, 3]


def test_what_a_branch_changes_in_place_is_a_copy(execution: str) -> None:
    class Model(nn.Module):
        total: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(3))

        def forward(self, truth: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            def then(y: Tensor) -> Tensor:
                y += 1
                self.total.add_(y)
                self.total[0] = 7
                return self.total

            (found,) = ops.cond(truth, then, [x], lambda: x, [])
            return found, x

    x = numbers(2)
    program, step = run(Model(), [truths(2), x], execution)
    assert program.changed_buffers == () and program.changed_inputs == ()
    assert step.outputs[0].tolist() == [[7, 2, 3], [3, 4, 5]]
    assert step.outputs[1].equal(x)


def test_a_cache_is_filled_in_the_first_step_and_kept(execution: str) -> None:
    """As text generation does with what an encoder has computed."""

    class Model(nn.Module):
        cache: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Linear(3, 3)
            self.register_buffer("cache", torch.zeros(3))

        def forward(self, step: Tensor, x: Tensor) -> Tensor:
            def keep(_: Tensor) -> Tensor:
                return self.cache

            self.cache.copy_(ops.cond(step == 0, self.encoder, [x], keep, [x])[0])
            return self.cache * step

    model, x = Model(), numbers(2)
    first = torch.tensor([[0], [1]])
    program, step = run(model, [first, x], execution)
    assert program.changed_buffers == ("cache",)
    with torch.no_grad():
        encoded = model.encoder(x)
    torch.testing.assert_close(step.buffers["cache"], torch.stack([encoded[0], torch.zeros(3)]))
    parameters = {n: p.detach().expand(2, *p.shape) for n, p in model.named_parameters()}
    later = program.run(parameters, step.buffers, [first + 2, 5 * x], counter=1, seed=0)
    assert later.buffers["cache"].equal(step.buffers["cache"])
    torch.testing.assert_close(later.outputs[0], 2 * encoded[0])


def test_functions_told_to_work_in_place_work_on_copies(execution: str) -> None:
    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        def then() -> Tensor:
            return nn.functional.relu(x, inplace=True)

        return ops.cond(x.sum() > 0, then, [], lambda: x, [])[0], x

    x = torch.tensor([[-1.0, 3.0], [-1.0, -3.0]])
    found = infer(model, [x.clone()], execution)
    assert found[0].tolist() == [[0, 3], [-1, -3]] and found[1].equal(x)


def test_a_change_that_cannot_be_a_copy_is_an_error(execution: str) -> None:
    def model(x: Tensor) -> Tensor:
        def body() -> Tensor:
            x[:2].add_(1)
            return x

        return ops.cond(x.sum() > 0, body, [], body, [])[0]

    with pytest.raises(Error, match="in place, through a view of it"):
        infer(model, [numbers(2)], execution)


def test_branches_draw_the_same_numbers_in_lockstep_and_in_threads() -> None:
    def model(truth: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        def then() -> Tensor:
            return torch.rand(3) + torch.rand(3)

        before = torch.rand(3)
        (one,) = ops.cond(truth, then, [], lambda: torch.rand(3), [])
        (two,) = ops.cond(truth, then, [], lambda: torch.rand(3), [])
        return before, one, two, torch.rand(3)

    lockstep, threads = (infer(model, [truths(4), numbers(4)], e) for e in EXECUTIONS)
    for x, y in zip(lockstep, threads, strict=True):
        assert x.equal(y)
    assert len(torch.stack(lockstep).flatten().unique()) == 4 * 4 * 3


def test_shapes_are_those_of_the_other_branch() -> None:
    x = numbers(2)
    (found,) = infer(
        lambda x: ops.cond(x.sum() > 3, lambda: x[:1], [], lambda: x[None, 1:2], []),
        [x],
        "lockstep",
    )
    assert found.tolist() == [[[1.0]], [[3.0]]]
    with pytest.raises(Error, match="`else` branch output has an empty shape"):
        infer(lambda x: ops.cond(x[0] > 0, lambda: x[:1], [], lambda: x[0], []), [x], "lockstep")


@pytest.mark.parametrize(
    ("then", "other", "message"),
    [
        (lambda x: (x, x), lambda x: x, "then_body returns 2 tensors and else_body 1"),
        (lambda x: x, lambda x: x.int(), "torch.float32 of shape .* else_body returns torch.int32"),
        (lambda x: x[:2], lambda x: x, r"of shape \(2,\) where else_body"),
    ],
)
def test_branches_return_the_same_kinds(
    then: Callable[..., Any], other: Callable[..., Any], message: str
) -> None:
    with pytest.raises(Error, match=message):
        infer(lambda x: ops.cond(x[0] > 0, then, [x], other, [x]), [numbers(2)], "lockstep")


def test_a_branchs_arguments_are_checked(execution: str) -> None:
    with pytest.raises(ValueError, match=r"poptorch.cond expects .* \(Object is not list\)"):
        ops.cond(torch.tensor(True), lambda x: x, (torch.ones(1),), lambda: 0, [])
    with pytest.raises(Error, match=r"condition must be a tensor of one element, got \(3,\)"):
        infer(lambda x: ops.cond(x > 0, lambda: x, [], lambda: x, []), [numbers(2)], execution)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("for_loop", lambda x: ops.for_loop(2, lambda x: 2 * x, [x])[0]),
        ("cond", lambda x: ops.cond(x[0] > 0, lambda: x, [], lambda: x, [])[0]),
    ],
)
def test_loops_and_branches_are_for_inference(
    name: str, function: Callable[[Tensor], Tensor], execution: str
) -> None:
    with pytest.raises(Error, match=rf"poptorch.{name}\(\) is only supported in inference."):
        run(Trained(function), [numbers(2)], execution, training=True)


class Trained(nn.Module):
    """A function of a weighted input, and its mean as a loss."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return identity_loss(self.function(self.w * x), "mean")


# CPU operations.


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float16"])
@pytest.mark.parametrize("replicas", REPLICAS)
def test_a_cpu_operation_is_called_for_each_replica(
    replicas: int, dtype: torch.dtype, execution: str
) -> None:
    calls: list[list[float]] = []

    def layer(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        assert type(x) is Tensor and x.device.type == "cpu"
        calls.append(x.tolist())
        return torch.from_numpy(x.numpy() * 2), y.sum()

    cpu = ops.CPU(layer, "twice")

    def model(x: Tensor) -> tuple[Tensor, Tensor]:
        y, total = cpu(x, x + 1)
        return y * 3, total

    x = numbers(replicas, dtype)
    found = infer(model, [x], execution)
    torch.testing.assert_close(found, (x * 6, (x + 1).sum(-1)))
    assert calls[0] == [0, 0, 0] and calls[-replicas:] == x.tolist()


def test_a_cpu_operation_of_what_all_replicas_share_is_still_called_for_each() -> None:
    calls: list[Tensor] = []
    cpu = ops.CPU(lambda x: [calls.append(x.clone()), x + len(calls)][1], "counting")
    found = infer(lambda x: x + cpu(torch.ones(3)), [torch.zeros(4, 3)], "lockstep")
    assert found[:, 0].tolist() == [3, 4, 5, 6] and len(calls) == 5  # the first one for the shapes


def test_a_module_is_a_cpu_operation(execution: str) -> None:
    layer = nn.Linear(3, 2)
    cpu = ops.CPU(layer, "linear")
    assert not layer.weight.requires_grad
    x = numbers(2)
    torch.testing.assert_close(infer(cpu, [x], execution), layer(x))


def test_a_cpu_operation_is_outside_of_the_model(execution: str) -> None:
    """Operations of PopTorch in it are plain PyTorch."""

    def layer(x: Tensor) -> Tensor:
        x = ops.dynamic_slice(x, 0, torch.tensor(1), 2, 1)  # of 3: in a model an error
        return ops.for_loop(2, lambda x: x * float(x.sum()), [x])[0]

    x = numbers(2) + 1
    found = infer(lambda x: ops.nop(ops.CPU(layer, "in forward")(x)), [x], execution)
    torch.testing.assert_close(found, torch.stack([layer(own) for own in x]))


def test_a_cpu_operation_of_a_branch_is_called_where_the_branch_is_taken(execution: str) -> None:
    calls: list[float] = []
    cpu = ops.CPU(lambda x: [calls.append(float(x.sum())), 2 * x][1], "counted")
    truth, x = truths(4), numbers(4)
    model = Calling(lambda truth, x: ops.cond(truth, cpu, [x], lambda: x, []))
    (found,) = run(model, [truth, x], execution)[1].outputs
    assert found.equal(torch.where(truth, 2 * x, x))
    assert calls[-2:] == [3.0, 21.0]  # of replicas 0 and 2


def test_cpu_operations_can_be_copied_and_pickled() -> None:
    cpu = ops.CPU(torch.neg, "negative")
    model = Calling(cpu)
    run(model, [numbers(2)], "lockstep")
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert run(other, [numbers(4)], "lockstep")[1].outputs.equal(-numbers(4))
    cpu.registerPersistentData()
    cpu.execute()
    assert cpu.outputs is not None and cpu.outputs[0].equal(torch.zeros(3))


def test_misuse_of_cpu_operations(execution: str) -> None:
    inner = ops.CPU(torch.neg, "inner")
    outer = ops.CPU(lambda x: inner(x), "outer")
    x = numbers(2)
    with pytest.raises(Error, match="CPU ops must not overlap"):
        infer(outer, [x], execution)
    with pytest.raises(Error, match="CPU ops are only supported in inference graphs, and 'inner'"):
        run(Trained(inner), [x], execution, training=True)
    with pytest.raises(Error, match=r"'inner' must take torch\.tensor arguments"):
        infer(lambda x: inner(3.0), [x], execution)
    with pytest.raises(Error, match="'inner' takes tensors by place, and no x by name"):
        inner(x=x)
    with pytest.raises(Error, match="'words' must return tensors, got <class 'str'>"):
        infer(ops.CPU(str, "words"), [x], execution)
    shapes = iter([torch.ones(1), *[torch.ones(2)] * 9])
    with pytest.raises(Exception, match="'growing' returned") as raised:
        infer(ops.CPU(lambda x: next(shapes), "growing"), [x], execution)
    assert isinstance(raised.value.__cause__ or raised.value, Error)
