"""Derivatives of collectives on tensors: first and second, forward and reverse, in every map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import gpusim
import gpusim.torch as gt
from gpusim import lax

Function = Callable[[Any], Any]
R = 3
GROUPS = [[2, 0], [1]]
ALONE = [[1], [0], [2]]

#: Each linear collective, and its transpose as `gpusim.lax` has it.
LINEAR: dict[str, tuple[Function, Function]] = {
    "psum": (lambda x: gt.psum(x, "i"), lambda ct: lax.psum.transpose(ct, "i")),
    "psum groups": (
        lambda x: gt.psum(x, "i", axis_index_groups=GROUPS),
        lambda ct: lax.psum.transpose(ct, "i", axis_index_groups=GROUPS),
    ),
    "pmean": (lambda x: gt.pmean(x, "i"), lambda ct: lax.pmean.transpose(ct, "i")),
    "all_gather": (
        lambda x: gt.all_gather(x, "i", axis=-1),
        lambda ct: lax.all_gather.transpose(ct, "i", axis=-1),
    ),
    "all_gather tiled": (
        lambda x: gt.all_gather(x, "i", axis=1, tiled=True),
        lambda ct: lax.all_gather.transpose(ct, "i", axis=1, tiled=True),
    ),
    "psum_scatter": (
        lambda x: gt.psum_scatter(x, "i", scatter_dimension=1),
        lambda ct: lax.psum_scatter.transpose(ct, "i", scatter_dimension=1),
    ),
    "psum_scatter alone": (
        lambda x: gt.psum_scatter(x, "i", axis_index_groups=ALONE, tiled=True),
        lambda ct: lax.psum_scatter.transpose(ct, "i", axis_index_groups=ALONE, tiled=True),
    ),
    "all_to_all": (
        lambda x: gt.all_to_all(x, "i", 1, 0),
        lambda ct: lax.all_to_all.transpose(ct, "i", 1, 0),
    ),
    "all_to_all tiled": (
        lambda x: gt.all_to_all(x, "i", 0, 1, tiled=True),
        lambda ct: lax.all_to_all.transpose(ct, "i", 0, 1, tiled=True),
    ),
    "pswapaxes": (
        lambda x: gt.pswapaxes(x, "i", 1),
        lambda ct: lax.pswapaxes.transpose(ct, "i", 1),
    ),
    "ppermute": (
        lambda x: gt.ppermute(x, "i", [(0, 1), (2, 0)]),
        lambda ct: lax.ppermute.transpose(ct, "i", [(0, 1), (2, 0)]),
    ),
    "pshuffle": (
        lambda x: gt.pshuffle(x, "i", [2, 0, 1]),
        lambda ct: lax.pshuffle.transpose(ct, "i", [2, 0, 1]),
    ),
    "pbroadcast": (
        lambda x: gt.pbroadcast(x, "i", 1),
        lambda ct: lax.pbroadcast.transpose(ct, "i", 1),
    ),
}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("name", LINEAR)
def test_derivatives_are_those_of_differences(name: str) -> None:
    mapped = gt.vmap(LINEAR[name][0], axis_name="i")
    x = random(R, 3, 3).requires_grad_()
    assert gradcheck(mapped, x, check_forward_ad=True)
    assert gradgradcheck(lambda x: mapped(x) ** 2, x)


def outside(f: Function, x: torch.Tensor, ct: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    y = gt.vmap(f, axis_name="i")(x)
    return torch.autograd.grad(y, x, ct)[0]


def functional_outside(f: Function, x: torch.Tensor, ct: torch.Tensor) -> torch.Tensor:
    _, back = torch.func.vjp(gt.vmap(f, axis_name="i"), x)
    (found,) = back(ct)
    return found


def inside(f: Function, x: torch.Tensor, ct: torch.Tensor) -> torch.Tensor:
    def one(x: torch.Tensor, ct: torch.Tensor) -> torch.Tensor:
        _, back = torch.func.vjp(f, x)
        (found,) = back(ct)
        return found

    return gt.vmap(one, axis_name="i")(x, ct)


def in_threads(schedule: str) -> Callable[..., torch.Tensor]:
    def run(f: Function, x: torch.Tensor, ct: torch.Tensor) -> torch.Tensor:
        def one(x: torch.Tensor, ct: torch.Tensor) -> torch.Tensor:
            x.requires_grad_()
            f(x).backward(ct)
            assert x.grad is not None
            return x.grad

        return gt.pmap(one, "i", schedule=schedule)(x, ct)

    return run


def functional_in_threads(f: Function, x: torch.Tensor, ct: torch.Tensor) -> torch.Tensor:
    def one(x: torch.Tensor, ct: torch.Tensor) -> torch.Tensor:
        return torch.func.vjp(f, x)[1](ct)[0]

    return gt.pmap(one, "i")(x, ct)


WAYS = {
    "autograd outside": outside,
    "func outside": functional_outside,
    "func inside": inside,
    "threads": in_threads("cores"),
    "threads, one": in_threads("one"),
    "func in threads": functional_in_threads,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LINEAR)
def test_a_cotangent_has_the_bits_of_the_transpose(name: str, way: str) -> None:
    f, transposed = LINEAR[name]
    x = random(R, 3, 3, dtype=torch.bfloat16)
    ct = random(*gt.vmap(f, axis_name="i")(x).shape, seed=1, dtype=torch.bfloat16)
    with gpusim.reduction(order="ring", accumulate="bfloat16"):
        found = WAYS[way](f, x, ct)
        expected = gpusim.vmap(transposed, axis_name="i")(gt.as_array(ct))
    np.testing.assert_array_equal(gt.as_array(found).view("u2"), expected.view("u2"))


def test_rows_sent_raggedly_come_back() -> None:
    offsets, sizes = torch.tensor([[0, 1], [0, 1]]), torch.tensor([[1, 2], [1, 1]])
    landing, received = torch.tensor([[0, 0], [1, 2]]), torch.tensor([[1, 1], [2, 1]])

    def exchange(operand: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        def f(*arguments: Any) -> Any:
            return gt.ragged_all_to_all(*arguments, axis_name="i")

        return gt.vmap(f, axis_name="i")(operand, output, offsets, sizes, landing, received)

    operand, output = random(2, 3, 2).requires_grad_(), random(2, 4, 2).requires_grad_()
    assert gradcheck(exchange, (operand, output), check_forward_ad=True)
    assert gradgradcheck(lambda *both: exchange(*both) ** 2, (operand, output))


def test_rows_sent_raggedly_come_back_in_threads() -> None:
    start, received = torch.tensor([[0, 0], [1, 2]]), torch.tensor([[1, 1], [2, 2]])

    def f(rows: torch.Tensor, start: torch.Tensor, received: torch.Tensor) -> Any:
        output = torch.zeros(4).requires_grad_()
        given = (torch.tensor([0, 1]), torch.tensor([1, 2]), start, received)
        y = gt.ragged_all_to_all(rows.requires_grad_(), output, *given, axis_name="i")
        return torch.autograd.grad(y, (rows, output), torch.arange(1.0, 5.0))

    rows_ct, output_ct = gt.pmap(f, "i")(torch.zeros(2, 3), start, received)
    assert rows_ct.tolist() == [[1.0, 1.0, 2.0], [2.0, 3.0, 4.0]]
    assert output_ct.tolist() == [[0.0, 0.0, 3.0, 4.0], [0.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("names", ["i", "j", ("i", "j"), ("j", "i")], ids=str)
def test_gradients_over_nested_axes_are_those_of_differences(names: Any) -> None:
    def nested(x: torch.Tensor) -> torch.Tensor:
        def f(x: torch.Tensor) -> torch.Tensor:
            return gt.psum(gt.all_gather(x, names) ** 2, "j") * x[0]

        return gt.vmap(gt.vmap(f, axis_name="j"), axis_name="i", in_dims=1)(x)

    x = random(3, 2, 2).requires_grad_()
    assert gradcheck(nested, x, check_forward_ad=True)
    grad_inside = gt.vmap(
        gt.vmap(torch.func.grad(lambda x: gt.psum(x**2, names).sum()), axis_name="j"), axis_name="i"
    )
    count = {"i": 2, "j": 3}.get(names, 6) if isinstance(names, str) else 6
    y = random(2, 3, 4)
    torch.testing.assert_close(grad_inside(y), 2 * count * y)


# --- values that are not batched ---------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 3, 5])
def test_a_shared_parameter_counts_once_for_each_replica(replicas: int) -> None:
    x = random(replicas, 2)
    w = random(2, seed=1)

    def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return (gt.psum(w, "i") * x).sum() + (gt.psum(w * x, "i") ** 2).sum()

    def total(w: torch.Tensor) -> torch.Tensor:
        return gt.vmap(lambda x: loss(w, x), axis_name="i")(x).sum()

    def by_hand(w: torch.Tensor) -> torch.Tensor:
        return sum(
            ((replicas * w * row).sum() + ((w * x).sum(0) ** 2).sum() for row in x),
            start=torch.zeros(()),
        )

    torch.testing.assert_close(torch.func.grad(total)(w), torch.func.grad(by_hand)(w))
    leaf = w.clone().requires_grad_()
    total(leaf).backward()
    torch.testing.assert_close(leaf.grad, torch.func.grad(by_hand)(w))
    each = gt.vmap(torch.func.grad(loss), in_dims=(None, 0), axis_name="i")(w, x)
    threads = gt.pmap(torch.func.grad(loss), "i", in_dims=(None, 0))(w, x)
    torch.testing.assert_close(each.sum(0), torch.func.grad(by_hand)(w))
    torch.testing.assert_close(threads, each)


def test_a_constant_counts_too() -> None:
    f = torch.func.grad(lambda x: gt.psum(torch.ones(2) * 3, "i").sum() * x)
    assert gt.vmap(f, axis_name="i")(torch.arange(4.0)).tolist() == [24.0] * 4


# --- training ----------------------------------------------------------------------------------


def step(w: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradients of one replica's loss, averaged over all."""

    def loss(w: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden = torch.tanh(x @ w["in"] + w["bias"])
        return ((hidden @ w["out"] - y) ** 2).mean()

    return gt.pmean(torch.func.grad(loss)(w), "i")


def test_a_data_parallel_step_is_that_of_a_plain_loop() -> None:
    w = {"in": random(4, 8), "bias": random(8, seed=1), "out": random(8, 2, seed=2)}
    x, y = random(5, 6, 4, seed=3), random(5, 6, 2, seed=4)
    leaves = {name: value.clone().requires_grad_() for name, value in w.items()}
    losses = [
        ((torch.tanh(a @ leaves["in"] + leaves["bias"]) @ leaves["out"] - b) ** 2).mean()
        for a, b in zip(x, y, strict=True)
    ]
    (sum(losses) / 5).backward()
    how: dict[str, Any] = {"in_dims": (None, 0, 0), "out_dims": None, "axis_name": "i"}
    for found in (gt.vmap(step, **how)(w, x, y), gt.pmap(step, **how)(w, x, y)):
        for name, leaf in leaves.items():
            torch.testing.assert_close(found[name], leaf.grad)


def test_lockstep_and_threads_train_to_the_same_bits() -> None:
    w = {"in": random(4, 8), "bias": random(8, seed=1), "out": random(8, 2, seed=2)}
    half = {name: value.half() for name, value in w.items()}
    x, y = random(3, 6, 4, seed=3).half(), random(3, 6, 2, seed=4).half()

    def summed(map_: Any) -> list[bytes]:
        def f(x: torch.Tensor, y: torch.Tensor) -> Any:
            return gt.psum({name: x.mean() * value for name, value in half.items()}, "i")

        with gpusim.reduction(rounding="stochastic", seed=5):
            tree = map_(f, axis_name="i", out_dims=None)(x, y)
        return [gt.as_array(leaf).tobytes() for leaf in tree.values()]

    assert summed(gt.vmap) == summed(gt.pmap)


def test_a_module_trains_in_threads_with_its_own_backward() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    x = random(4, 5, 3, dtype=torch.float32)

    def backward(x: torch.Tensor) -> list[torch.Tensor]:
        loss = gt.pmean(model(x).square().mean(), "i")
        gradients = torch.autograd.grad(loss, [*model.parameters()])
        return gt.pmean([*gradients], "i")

    found = gt.pmap(backward, "i", out_dims=None)(x)
    model(x).square().mean(dim=(1, 2)).mean().backward()
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


# --- reductions, errors ------------------------------------------------------------------------


def test_the_backward_pass_sums_as_the_forward_pass_did() -> None:
    x = random(R, 50, dtype=torch.float16).requires_grad_()
    ct = random(R, R, 50, seed=1, dtype=torch.float16)

    def gathered() -> torch.Tensor:
        return gt.vmap(lambda x: gt.all_gather(x, "i"), axis_name="i")(x)

    with gpusim.reduction(order="reverse", rounding="stochastic", seed=2) as state:
        y = gathered()
    (found,) = torch.autograd.grad(y, x, ct)
    assert state.calls == 1
    how = gpusim.Reduction(order="reverse", rounding="stochastic", seed=2)
    expected = gpusim.collectives.psum_scatter(ct.numpy(), reduction=how, call=0).value
    np.testing.assert_array_equal(found.numpy(), expected)
    (plain,) = torch.autograd.grad(gathered(), x, ct)
    assert not torch.equal(plain, found)


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_other_axes_have_their_own_bits_in_the_backward_pass_too(rounding: str) -> None:
    x, ct = random(2, R, 40, dtype=torch.float16), random(2, R, 40, seed=1, dtype=torch.float16)

    def f(x: torch.Tensor, ct: torch.Tensor) -> torch.Tensor:
        return torch.func.vjp(lambda x: gt.psum(x, "j"), x)[1](ct)[0]

    def transposed(x: Any, ct: Any) -> Any:
        lax.psum(x, "j")
        return lax.psum.transpose(ct, "j")

    shared = ct[0]
    with gpusim.reduction(rounding=rounding, seed=2):
        found = gt.vmap(gt.vmap(f, axis_name="j"), in_dims=(0, None), axis_name="i")(x, shared)
    with gpusim.reduction(rounding=rounding, seed=2):
        expected = gpusim.vmap(
            gpusim.vmap(transposed, axis_name="j"), in_axes=(0, None), axis_name="i"
        )(x.numpy(), shared.numpy())
    np.testing.assert_array_equal(found.numpy(), expected)


def test_extremes_have_no_derivative() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return gt.pmax(x, "i")

    x = torch.arange(3.0)
    with pytest.raises(NotImplementedError, match="pmax has no derivative in gpusim: detach"):
        gt.vmap(torch.func.grad(f), axis_name="i")(x)
    with pytest.raises(NotImplementedError, match="pmax has no derivative"):
        torch.func.jvp(gt.vmap(f, axis_name="i"), (x,), (x,))
    detached = gt.vmap(torch.func.grad(lambda x: x * f(x.detach())), axis_name="i")(x)
    assert detached.tolist() == [2.0] * 3


def test_integers_in_a_tree_have_no_cotangents() -> None:
    def f(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        total, count, share = gt.psum([x, n, 2 * x], "i")
        return (total * share).sum() / count

    x, n = random(3, 2).requires_grad_(), torch.tensor([1, 2, 3])
    assert gradcheck(lambda x: gt.vmap(f, axis_name="i")(x, n), x, check_forward_ad=True)


def test_a_backward_pass_outside_of_pmap_is_refused() -> None:
    kept: list[torch.Tensor] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        y = gt.psum(x.requires_grad_(), "i")
        kept.append(y)
        return y

    result = gt.pmap(f, "i")(torch.arange(2.0))
    assert not result.requires_grad
    with pytest.raises(gpusim.GpusimError, match="call backward\\(\\) inside the function"):
        kept[0].backward()


def test_replicas_that_go_back_in_other_ways_are_told_apart() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = gt.psum(x.requires_grad_(), "i")
        z = gt.pmean(x, "i")
        (y if x > 0 else z).backward()
        assert x.grad is not None
        return x.grad

    with pytest.raises(gpusim.CollectiveMismatchError, match=r"lax\.p(sum|mean)"):
        gt.pmap(f, "i")(torch.arange(2.0))


def test_arguments_are_leaves_of_their_own_on_each_replica() -> None:
    def f(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        assert w.is_leaf and w.requires_grad and not x.requires_grad
        (w * x).backward()
        assert w.grad is not None
        return w.grad

    w = torch.tensor(1.0, requires_grad=True)
    assert gt.pmap(f, in_dims=(None, 0))(w, torch.arange(3.0)).tolist() == [0.0, 1.0, 2.0]
    assert w.grad is None


def test_the_callers_grad_mode_holds_in_threads() -> None:
    def f(x: torch.Tensor) -> bool:
        return torch.is_grad_enabled()

    with torch.no_grad():
        assert not gt.pmap(f)(torch.zeros(2)).any()
    assert gt.pmap(f)(torch.zeros(2)).all()
