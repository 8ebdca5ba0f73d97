"""Products with matrices of blocks are those of the dense matrices that they stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import gpusim.torch as gt
from gpusim.poptorch_experimental_addons import sparse

PRODUCTS = (sparse.block_coo_spmm, sparse.block_coo_spmm_gs, sparse.block_coo_spmm_ipu)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def blocks(*shape: int, size: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """So many blocks, at places of their own, of a matrix of that many blocks."""
    generator = torch.Generator().manual_seed(1)
    chosen = torch.randperm(shape[0] * shape[1], generator=generator)[:count]
    places = torch.stack([chosen // shape[1], chosen % shape[1]])
    values = random(count, size, size, dtype=dtype)
    whole = (*shape, size, size)
    return torch.sparse_coo_tensor(places, values, whole, check_invariants=True).coalesce()


def by_hand(tensor: Tensor) -> Tensor:
    rows, columns, height, width = tensor.shape
    out = torch.zeros(rows * height, columns * width, dtype=tensor.dtype)
    for (row, column), value in zip(tensor.indices().T.tolist(), tensor.values(), strict=True):
        top, left = row * height, column * width
        out[top : top + height, left : left + width] = value
    return out


CASES = {"1x1": (1, (3, 5), 6), "4x4": (4, (12, 10), 24), "few": (1, (64, 64), 40)}


@pytest.mark.parametrize("case", CASES)
def test_blocks_stand_for_a_dense_matrix(case: str) -> None:
    size, shape, count = CASES[case]
    matrix = blocks(*shape, size=size, count=count)
    dense = by_hand(matrix)
    assert torch.equal(sparse.block_coo_to_dense(matrix), dense)
    assert torch.equal(sparse.block_coo_to_dense(sparse.block_coo_transpose(matrix)), dense.T)


def test_any_number_of_dimensions_has_blocks() -> None:
    values = torch.arange(1.0, 17).reshape(2, 2, 2, 2)
    cube = torch.sparse_coo_tensor(
        [[0, 2], [1, 0], [0, 0]], values, (3, 2, 1, 2, 2, 2), check_invariants=True
    )
    dense = sparse.block_coo_to_dense(cube)
    assert dense.shape == (6, 4, 2)
    assert torch.equal(dense[:2, 2:], values[0]) and torch.equal(dense[4:, :2], values[1])
    assert dense.count_nonzero() == 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("case", CASES)
def test_products_from_both_sides(case: str, product: object, dtype: torch.dtype) -> None:
    size, shape, count = CASES[case]
    matrix = blocks(*shape, size=size, count=count, dtype=dtype)
    dense = by_hand(matrix).double()
    right = random(dense.shape[1], 7, seed=2, dtype=dtype)
    left = random(7, dense.shape[0], seed=3, dtype=dtype)
    assert callable(product)
    close = {"rtol": 0, "atol": 2e-2 if dtype == torch.float16 else 1e-5}
    for found, expected in (
        (product(matrix, right, "sparse_dense"), dense @ right.double()),
        (product(matrix, left, "dense_sparse"), left.double() @ dense),
    ):
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), expected, **close)


def test_blocks_need_not_be_square() -> None:
    places = torch.tensor([[0, 1], [1, 0]])
    values, whole = random(2, 3, 2), (2, 2, 3, 2)
    matrix = torch.sparse_coo_tensor(places, values, whole, check_invariants=True).coalesce()
    dense = random(4, 5)
    found = sparse.block_coo_spmm(matrix, dense, "sparse_dense")
    torch.testing.assert_close(found, by_hand(matrix) @ dense)


def test_products_in_replicas_and_their_gradients() -> None:
    matrix = blocks(3, 5, size=2, count=6)
    x, ct = random(4, 10, 7), random(4, 6, 7, seed=1)

    def one(x: Tensor, ct: Tensor) -> tuple[Tensor, Tensor]:
        product = sparse.StaticSparseMatrix(matrix)
        y, back = torch.func.vjp(lambda x: product @ x, x)
        return y, back(ct)[0]

    for map_ in (gt.vmap, gt.pmap):
        y, gradient = map_(one, axis_name="i")(x, ct)
        torch.testing.assert_close(y, by_hand(matrix) @ x)
        torch.testing.assert_close(gradient, by_hand(matrix).T @ ct)


def test_a_graph_has_the_matrix_as_a_constant() -> None:
    matrix = blocks(3, 5, size=2, count=6)
    x = random(4, 7, 10)
    with gt.trace_axes({"i": 4}):
        graph = make_fx(
            sparse.StaticSparseLinear(matrix),
            pre_dispatch=True,
            tracing_mode="fake",
            _allow_non_fake_inputs=True,
        )(x[0])
    y = gt.vmap(graph, axis_name="i")(x)
    torch.testing.assert_close(y, x @ by_hand(matrix).T)


def test_pruning_keeps_the_largest_blocks() -> None:
    matrix = random(6, 10)
    pruned = sparse.magnitude_prune(matrix, block_size=2, density=0.75)
    assert pruned.shape == (3, 5, 2, 2) and len(pruned.values()) == 11  # of 15, 0.75 are 11.25
    norms = matrix.reshape(3, 2, 5, 2).transpose(1, 2).norm(dim=(2, 3)).flatten()
    kept = (pruned.indices()[0] * 5 + pruned.indices()[1]).tolist()
    by_spectral_norm = torch.linalg.matrix_norm(
        matrix.reshape(3, 2, 5, 2).transpose(1, 2), ord=2
    ).flatten()
    assert {*kept} == {*by_spectral_norm.topk(11).indices.tolist()}
    by_frobenius = sparse.magnitude_prune(matrix, 2, 0.2, ord="fro")
    chosen = (by_frobenius.indices()[0] * 5 + by_frobenius.indices()[1]).tolist()
    assert {*chosen} == {*norms.topk(3).indices.tolist()}
    dense = by_hand(pruned)
    assert torch.equal(dense[dense != 0], matrix[dense != 0])


def test_layers_of_pruned_weights() -> None:
    weight = sparse.magnitude_prune(random(6, 10), block_size=2, density=0.75)
    x = random(7, 10, seed=1)
    expected = x @ sparse.block_coo_to_dense(weight).T
    layer = sparse.StaticSparseLinear(weight)
    transposed = sparse.StaticSparseMatrix(sparse.block_coo_transpose(weight))
    for found in (layer(x), (sparse.StaticSparseMatrix(weight) @ x.T).T, x @ transposed):
        torch.testing.assert_close(found, expected)
    assert not [*layer.parameters()]


@pytest.mark.parametrize("product", PRODUCTS)
def test_other_modes_are_refused_by_name(product: object) -> None:
    assert callable(product)
    name = "block_coo_spmm_ipu" if product is sparse.block_coo_spmm_ipu else "block_coo_spmm_gs"
    with pytest.raises(ValueError) as raised:
        product(blocks(2, 2, size=1, count=1), torch.ones(2, 2), "dense_dense")
    assert str(raised.value) == f"Expected {name} mode either 'sparse_dense' or 'dense_sparse'"


def test_what_is_no_matrix_of_blocks_is_refused_in_the_words_of_the_original() -> None:
    checked = {"check_invariants": True}
    square = blocks(2, 2, size=2, count=1)
    long = torch.sparse_coo_tensor([[0], [0]], random(1, 3, 2), (2, 2, 3, 2), **checked).coalesce()
    flat = torch.sparse_coo_tensor([[0]], random(1, 2), (2, 2), **checked).coalesce()
    thin = torch.sparse_coo_tensor([[0], [0]], random(1, 2), (2, 2, 2), **checked).coalesce()
    ipu = "block_coo_spmm_ipu"
    cases = [
        (
            lambda: sparse.block_coo_to_dense(thin),
            "Block COO requires sparse_dim (2) == dense_dim (1)",
        ),
        (
            lambda: sparse.block_coo_spmm(torch.ones(2, 2), torch.ones(2, 2), "sparse_dense"),
            "Expected sparse_coo `lhs`, actual layout: torch.strided",
        ),
        (
            lambda: sparse.block_coo_spmm(square, torch.ones(3, 2), "sparse_dense"),
            "Block sparse input size (2 blocks * 2) does not match dense input size (3)",
        ),
        (
            lambda: sparse.block_coo_spmm_ipu(torch.ones(2, 2), torch.ones(2, 2), "sparse_dense"),
            f"{ipu} requires `sparse` to be torch.sparse_coo_tensor, actual torch.strided",
        ),
        (
            lambda: sparse.block_coo_spmm_ipu(flat, torch.ones(2, 2), "sparse_dense"),
            f"{ipu} requires `sparse` to be 2D block sparse, with sparse_dim (1) == 2, "
            "dense_dim (1) == 2",
        ),
        (
            lambda: sparse.block_coo_spmm_ipu(long, torch.ones(4, 2), "sparse_dense"),
            f"{ipu} requires square blocks i.e. shape (*, *, B, B), actual: {long.shape}",
        ),
        (
            lambda: sparse.block_coo_spmm_ipu(square, torch.ones(4), "sparse_dense"),
            f"{ipu} supports only 2D dense operands, actual shape: torch.Size([4])",
        ),
    ]
    for call, message in cases:
        with pytest.raises(ValueError) as raised:
            call()
        assert str(raised.value) == message
