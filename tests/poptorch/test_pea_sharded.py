"""Sharded products are plain products, and train as those do: whole matrices in one process are
the expected values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import gpusim.poptorch_experimental_addons as pea
import gpusim.torch as gt
from gpusim.poptorch.axis import AXIS

REPLICAS = (1, 2, 3, 4, 5, 7, 8)
RATE = 0.125


def rows(x: Tensor, replicas: int) -> Tensor:
    """Of each replica a block of rows."""
    return torch.stack(x.chunk(replicas))


def columns(x: Tensor, replicas: int) -> Tensor:
    return torch.stack(x.chunk(replicas, 1))


def whole(x: Tensor, replicas: int) -> Tensor:
    return torch.stack([x] * replicas)


class Product(NamedTuple):
    """A sharded product, how its operands and its result are sharded, and what gradients count."""

    operation: Callable[..., Any]
    left: Callable[[Tensor, int], Tensor]
    right: Callable[[Tensor, int], Tensor]
    result: Callable[[Tensor, int], Tensor]


PRODUCTS = {
    "rowcolrow": Product(pea.sharded.rowcolrow_sharded_matmul, rows, columns, rows),
    "rowcolrow in 4 chunks": Product(
        lambda X, Y, R: pea.sharded.rowcolrow_sharded_matmul(X, Y, R, num_chunks=4),
        rows,
        columns,
        rows,
    ),
    "repcolcol": Product(pea.sharded.repcolcol_sharded_matmul, whole, columns, columns),
    "colrowrep": Product(pea.sharded.colrowrep_sharded_matmul, columns, rows, whole),
}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def lockstep(one: Callable[..., Any], *args: Tensor) -> Any:
    return gt.vmap(one, axis_name=AXIS)(*args)


def threads(one: Callable[..., Any], *args: Tensor) -> Any:
    return gt.pmap(one, AXIS)(*args)


@pytest.mark.parametrize("map_", [lockstep, threads])
@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("replicas", REPLICAS)
def test_products_gradients_and_updated_weights(
    replicas: int, name: str, map_: Callable[..., Any]
) -> None:
    """The loss is the sum of (X Y - target)**2, of which each replica has what it holds."""
    product, inner = PRODUCTS[name], 4 * replicas
    X, Y = random(2 * replicas, inner, seed=0), random(inner, 3 * replicas, seed=1)
    target = random(2 * replicas, 3 * replicas, seed=2)

    def one(X: Tensor, Y: Tensor, target: Tensor) -> Any:
        def loss(X: Tensor, Y: Tensor) -> tuple[Tensor, Tensor]:
            y = product.operation(X, Y, replicas)
            return (y - target).square().sum(), y

        (of_X, of_Y), y = torch.func.grad(loss, argnums=(0, 1), has_aux=True)(X, Y)
        return y, of_X, of_Y, X - RATE * of_X, Y - RATE * of_Y

    shards = (product.left(X, replicas), product.right(Y, replicas))
    y, of_X, of_Y, new_X, new_Y = map_(one, *shards, product.result(target, replicas))
    ct = 2 * (X @ Y - target)
    torch.testing.assert_close(y, product.result(X @ Y, replicas))
    torch.testing.assert_close(of_X, product.left(ct @ Y.T, replicas))
    torch.testing.assert_close(of_Y, product.right(X.T @ ct, replicas))
    torch.testing.assert_close(new_X, product.left(X - RATE * ct @ Y.T, replicas))
    torch.testing.assert_close(new_Y, product.right(Y - RATE * X.T @ ct, replicas))


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_a_network_sharded_over_replicas_trains_as_a_whole_one(replicas: int) -> None:
    """Two layers: the first in columns, the second in rows, 5 steps of SGD."""
    x, target = random(6, 4, seed=0), random(6, 2, seed=1)
    first, second = random(4, 16, seed=2), random(16, 2, seed=3)

    def sharded_loss(first: Tensor, second: Tensor) -> Tensor:
        hidden = pea.sharded.repcolcol_sharded_matmul(x, first, replicas).tanh()
        y = pea.sharded.colrowrep_sharded_matmul(hidden, second, replicas)
        return (y - target).square().mean()

    def whole_loss(first: Tensor, second: Tensor) -> Tensor:
        return ((x @ first).tanh() @ second - target).square().mean()

    def trained(loss: Callable[..., Tensor], *weights: Tensor) -> tuple[Tensor, ...]:
        for _ in range(5):
            gradients = torch.func.grad(loss, argnums=(0, 1))(*weights)
            weights = tuple(w - 0.1 * g for w, g in zip(weights, gradients, strict=True))
        return weights

    shards = (columns(first, replicas), rows(second, replicas))
    found = gt.vmap(lambda *shards: trained(sharded_loss, *shards), axis_name=AXIS)(*shards)
    expected = trained(whole_loss, first, second)
    torch.testing.assert_close(found[0], columns(expected[0], replicas))
    torch.testing.assert_close(found[1], rows(expected[1], replicas))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_products_keep_their_dtype(dtype: torch.dtype) -> None:
    X, Y = torch.ones(2, 3, 4, dtype=dtype), torch.ones(2, 4, 5, dtype=dtype)
    for product in PRODUCTS.values():
        y = gt.vmap(lambda X, Y, of=product: of.operation(X, Y, 2), axis_name=AXIS)(X, Y)
        assert y.dtype == dtype


def test_a_product_over_nothing_is_zero() -> None:
    X, Y = torch.ones(2, 3, 0), torch.ones(2, 0, 5)
    y = gt.vmap(PRODUCTS["rowcolrow"].operation, in_dims=(0, 0, None), axis_name=AXIS)(X, Y, 2)
    assert torch.equal(y, torch.zeros(2, 3, 10))


@pytest.mark.parametrize("chunks", [0, -1, 3])
def test_chunks_must_divide_the_inner_dimension(chunks: int) -> None:
    X, Y = torch.ones(3, 4), torch.ones(4, 5)
    with pytest.raises(ValueError, match=f"num_chunks must divide the 4 columns .* got {chunks}"):
        pea.sharded.rowcolrow_sharded_matmul(X, Y, 1, num_chunks=chunks)


@pytest.mark.parametrize("name", PRODUCTS)
def test_shapes_must_fit(name: str) -> None:
    with pytest.raises(
        ValueError, match=r"matrices X \(m, k\) and Y \(k, n\), got shapes \(3, 4\)"
    ):
        PRODUCTS[name].operation(torch.ones(3, 4), torch.ones(5, 4), 1)
    with pytest.raises(ValueError, match=r"got shapes \(3,\) and \(3, 4\)"):
        PRODUCTS[name].operation(torch.ones(3), torch.ones(3, 4), 1)
