"""Losses of classes under vmap: one call for all replicas, with the results of a loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import gpusim.torch as gt  # which installs the rules

R, CLASSES = 3, 4


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignored", [-100, 1])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("shared", [False, True], ids=["own targets", "shared targets"])
@pytest.mark.parametrize("samples", [(5,), (1,), (0,), ()], ids=str)
def test_cross_entropy_is_that_of_a_loop(
    samples: tuple[int, ...], shared: bool, reduction: str, ignored: int, weighted: bool
) -> None:
    x = torch.randn(R, *samples, CLASSES, dtype=torch.float64)
    y = torch.randint(CLASSES, samples if shared else (R, *samples))
    weight = torch.rand(CLASSES, dtype=torch.float64) if weighted else None

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(x, y, weight, reduction=reduction, ignore_index=ignored)

    def total(x: Tensor, y: Tensor) -> Tensor:
        return (loss(x, y) * 3).sum()

    in_dims = (0, None if shared else 0)
    own = [(x[r], y if shared else y[r]) for r in range(R)]
    derivatives = [torch.func.grad(total), torch.func.hessian(total)]
    for f in (loss, *(derivatives if x.numel() else derivatives[:1])):  # torch's jacobians are of 1
        found = gt.vmap(f, in_dims)(x, y)
        expected = torch.stack([f(*one) for one in own])
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-15, equal_nan=True)


@pytest.mark.parametrize("in_dims", [(0, 0), (2, 1), (1, None)])
def test_a_vmap_in_a_vmap(in_dims: Any) -> None:
    x, y = (
        torch.randn(2, 2, 2, CLASSES),
        torch.randint(CLASSES, (2, 2) if in_dims[1] is not None else (2,)),
    )
    inner = torch.func.vmap(F.cross_entropy, (0, None), out_dims=0)
    found = torch.func.vmap(torch.func.grad(lambda x, y: inner(x, y).sum()), in_dims)(x, y)
    for place in range(2):
        own_x = x.select(in_dims[0], place)
        own_y = y if in_dims[1] is None else y.select(in_dims[1], place)
        for part in range(2):
            x_part = own_x[part].clone().requires_grad_()
            F.cross_entropy(x_part, own_y).backward()
            torch.testing.assert_close(found[place, part], x_part.grad)


def test_a_target_outside_the_classes_is_an_error() -> None:
    with pytest.raises(IndexError, match="Target 4 is out of bounds"):
        torch.func.vmap(F.cross_entropy)(torch.randn(R, 2, CLASSES), torch.full((R, 2), CLASSES))


def test_no_operation_has_all_classes_but_the_loss_itself() -> None:
    def gradient(x: Tensor, y: Tensor) -> Tensor:
        return torch.func.grad(F.cross_entropy)(x, y)

    x, y = torch.randn(R, 5, 1000), torch.randint(1000, (R, 5))
    graph = make_fx(torch.func.vmap(gradient))(x, y).graph
    values = [(str(n.target), n.meta.get("val")) for n in graph.nodes if n.op == "call_function"]
    large = [
        name for name, x_of in values if isinstance(x_of, Tensor) and x_of.numel() >= x.numel()
    ]
    views = ("view", "reshape", "flatten", "movedim", "permute", "transpose", "alias", "detach")
    computed = [name for name in large if not any(view in name for view in views)]
    assert sorted(computed) == [
        "aten._log_softmax.default",
        "aten._log_softmax_backward_data.default",
        "aten.nll_loss_backward.default",
    ]
