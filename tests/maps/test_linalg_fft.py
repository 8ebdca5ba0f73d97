"""numpy.linalg, numpy.fft and products: each batched rule has the bits of one replica's call."""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpusim
from tests.oracles.replicated import OVER, Operand, check, normal

FLOATS = (np.float32, np.float64, np.complex64, np.complex128)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng(sum(map(ord, request.node.name)))


def well_posed(
    rng: np.random.Generator, shape: tuple[int, ...], over: str | None, dtype: Any = np.float64
) -> Operand:
    """Hermitian positive definite matrices."""
    x = normal(rng, shape, over, dtype).data
    return Operand((x @ x.conj().swapaxes(-1, -2) + np.eye(shape[-1])).astype(dtype), over)


OF_SQUARE: dict[str, Callable[[Any], Any]] = {
    "inv": np.linalg.inv,
    "det": np.linalg.det,
    "slogdet": np.linalg.slogdet,
    "cholesky": np.linalg.cholesky,
    "eig": np.linalg.eig,
    "eigvals": np.linalg.eigvals,
    "eigh": np.linalg.eigh,
    "eigh upper": lambda x: np.linalg.eigh(x, UPLO="U"),
    "eigvalsh": np.linalg.eigvalsh,
    "power 0": lambda x: np.linalg.matrix_power(x, 0),
    "power 5": lambda x: np.linalg.matrix_power(x, 5),
    "power -3": lambda x: np.linalg.matrix_power(x, n=-3),
    "hermitian pinv": lambda x: np.linalg.pinv(x, hermitian=True),
    "hermitian svd": lambda x: np.linalg.svd(x, hermitian=True),
    "cond": np.linalg.cond,
    "cond -2": lambda x: np.linalg.cond(x, -2),
    "cond fro": lambda x: np.linalg.cond(x, "fro"),
    "cond 1": lambda x: np.linalg.cond(x, 1),
    "cond inf": lambda x: np.linalg.cond(x, np.inf),
    "trace": np.linalg.trace,
    "trace 1": lambda x: np.linalg.trace(x, offset=1),
    "diagonal": np.linalg.diagonal,
    "diagonal -1": lambda x: np.linalg.diagonal(x, offset=-1),
}

OF_MATRICES: dict[str, Callable[[Any], Any]] = {
    "qr": np.linalg.qr,
    "qr complete": lambda x: np.linalg.qr(x, "complete"),
    "qr r": lambda x: np.linalg.qr(x, mode="r"),
    "qr raw": lambda x: np.linalg.qr(x, "raw"),
    "svd": np.linalg.svd,
    "thin svd": lambda x: np.linalg.svd(x, full_matrices=False),
    "svd values": lambda x: np.linalg.svd(x, compute_uv=False),
    "svdvals": np.linalg.svdvals,
    "pinv": np.linalg.pinv,
    "pinv rcond": lambda x: np.linalg.pinv(x, 0.3),
    "pinv rtol": lambda x: np.linalg.pinv(x, rtol=None),
    "rank": np.linalg.matrix_rank,
    "rank tol": lambda x: np.linalg.matrix_rank(x, tol=1.0),
    "transpose": np.linalg.matrix_transpose,
    "matrix norm": np.linalg.matrix_norm,
    "matrix norm 2": lambda x: np.linalg.matrix_norm(x, ord=2, keepdims=True),
    "matrix norm nuc": lambda x: np.linalg.matrix_norm(x, ord="nuc"),
    "norm": np.linalg.norm,
    "norm keepdims": lambda x: np.linalg.norm(x, keepdims=True),
    "norm of rows": lambda x: np.linalg.norm(x, axis=-1),
    "norm of columns": lambda x: np.linalg.norm(x, axis=-2, keepdims=True),
    "norm 1": lambda x: np.linalg.norm(x, 1, axis=(-2, -1)),
    "norm -inf": lambda x: np.linalg.norm(x, -np.inf, axis=(-1, -2)),
    "norm 3 of rows": lambda x: np.linalg.norm(x, 3, axis=-1),
    "norm 0 of rows": lambda x: np.linalg.norm(x, 0, axis=-1),
    "vector norm": np.linalg.vector_norm,
    "vector norm keepdims": lambda x: np.linalg.vector_norm(x, keepdims=True),
    "vector norm 1 of columns": lambda x: np.linalg.vector_norm(x, axis=-2, ord=1),
    "vector norm of both": lambda x: np.linalg.vector_norm(x, axis=(-1, -2), ord=np.inf),
    "vector norm 3 of both": lambda x: np.linalg.vector_norm(x, axis=(-1, -2), keepdims=True),
}


@pytest.mark.parametrize("name", OF_SQUARE)
def test_functions_of_square_matrices_have_the_bits_of_one_replica(name, rng):
    for dtype in FLOATS:
        for over in OVER:
            for shape in ((3, 3), (2, 4, 4), (1, 1), (17, 17), (0, 2, 2)):
                check(OF_SQUARE[name], well_posed(rng, shape, over, dtype))


@pytest.mark.parametrize("name", OF_MATRICES)
def test_functions_of_matrices_have_the_bits_of_one_replica(name, rng):
    function = OF_MATRICES[name]
    for dtype in FLOATS:
        for over in OVER:
            for shape in ((3, 5), (5, 3), (2, 3, 2), (1, 1), (33, 9)):
                check(
                    function, normal(rng, shape, over, dtype), batched=name_is_batched(name, shape)
                )
    check(function, normal(rng, (4, 4), "i", np.int32), batched=name_is_batched(name, (4, 4)))


def name_is_batched(name: str, shape: tuple[int, ...]) -> bool | None:
    return None if name in ("norm", "norm keepdims") and len(shape) > 2 else True


@pytest.mark.parametrize("name", OF_MATRICES)
def test_layouts_do_not_change_bits(name, rng):
    layouts: list[Callable[[np.ndarray], np.ndarray]] = [
        lambda x: np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 0, -1)), -1, 0),
        lambda x: np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2),
        lambda x: np.repeat(x, 2, -1)[..., ::2],
        lambda x: x[..., ::-1],
    ]
    for layout in layouts:
        x = layout(normal(rng, (40, 30), "ij", np.float32).data)
        check(OF_MATRICES[name], Operand(x, "ij"), batched=None)


def test_singular_and_odd_matrices_raise_what_numpy_raises(rng):
    singular = np.eye(3) * np.ones((2, 1, 1))
    singular[1, 1, 1] = 0
    for function in (np.linalg.inv, lambda x: np.linalg.solve(x, np.ones(3)), np.linalg.cholesky):
        assert isinstance(check(function, Operand(singular, "i")).error, np.linalg.LinAlgError)
    for function in (np.linalg.inv, np.linalg.det, np.linalg.eigh, np.linalg.cond):
        for shape in ((3,), (2, 3), ()):
            check(function, normal(rng, shape, "i"), batched=None)
    check(np.linalg.inv, normal(rng, (2, 2), "i", np.float16))


def test_solve_takes_one_axis_for_a_vector_and_more_for_a_stack_of_matrices(rng):
    for dtype in FLOATS:
        for over in OVER:
            for other in (*OVER, None):
                for a, b in (
                    ((3, 3), (3,)),
                    ((3, 3), (3, 2)),
                    ((4, 3, 3), (3,)),
                    ((4, 3, 3), (3, 2)),
                    ((3, 3), (4, 3, 1)),
                    ((3, 3, 3), (3, 3)),
                ):
                    check(
                        np.linalg.solve,
                        well_posed(rng, a, over, dtype),
                        normal(rng, b, other, dtype),
                    )
    check(np.linalg.solve, well_posed(rng, (3, 3), "i"), normal(rng, (2,), "j"))
    check(np.linalg.solve, well_posed(rng, (3, 3), "i"), normal(rng, (), "j"))


def test_tolerances_may_differ_between_replicas(rng):
    x = normal(rng, (4, 3, 3), "ij")
    for over in OVER:
        tolerance = Operand(np.abs(normal(rng, (4,), over).data), over)
        check(lambda x, t: np.linalg.pinv(x, rcond=t), x, tolerance)
        check(lambda x, t: np.linalg.matrix_rank(x, tol=t), x, tolerance)
        check(lambda x, t: np.linalg.matrix_rank(x, rtol=t), normal(rng, (4, 3, 3), "i"), tolerance)


def test_eigenvalues_have_one_dtype_on_all_replicas():
    turn = np.array([[[2.0, 0.0], [0.0, 3.0]], [[0.0, -1.0], [1.0, 0.0]]])
    values = gpusim.vmap(np.linalg.eigvals)(turn)
    assert values.dtype == np.complex128 and np.allclose(sorted(values[1].imag), [-1, 1])


def test_results_are_the_named_tuples_of_numpy():
    def f(x):
        return np.linalg.svd(x).S, np.linalg.eigh(x).eigenvalues, np.linalg.qr(x).R

    assert [part.shape for part in gpusim.vmap(f)(np.ones((2, 3, 3)))] == [
        (2, 3),
        (2, 3),
        (2, 3, 3),
    ]


def test_functions_that_take_the_per_replica_route_do(rng):
    x, y = normal(rng, (4, 3), "i"), normal(rng, (4,), "ij")
    check(lambda x, y: np.linalg.lstsq(x, y)[0], x, y, batched=False)
    check(lambda x, y: np.convolve(y, x[0]), x, y, batched=False)
    check(lambda x, y: np.correlate(y, x[0], "full"), x, y, batched=False)
    check(lambda x, y: np.einsum("ij,ij->", x, x), x, y, batched=False)
    check(lambda x, y: np.einsum(x, [0, 1], y, [0]), x, y, batched=False)
    check(lambda x, y: np.einsum("ij,i->j", x, y, optimize=True), x, y, batched=False)


# Products.

SIZED = (1, 2, 3, 5, 8, 17, 40)


def laid_out(
    rng: np.random.Generator, shape: tuple[int, ...], over: str | None, dtype: Any
) -> Operand:
    """Values in one of many layouts: transposed, strided, reversed, mapped axes innermost."""
    x = normal(rng, shape, over, dtype).data
    mapped = len(over or "")
    if len(shape) > 1 and rng.integers(2):
        x = np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
    choice = rng.integers(6) if shape else 5
    if choice == 0:
        x = x[..., ::-1]
    elif choice == 1:
        x = np.repeat(x, 2, -1)[..., ::2]
    elif choice == 2:
        wide = np.zeros((*x.shape[:-1], x.shape[-1] + 3), x.dtype)
        wide[..., :-3] = x
        x = wide[..., :-3]
    elif choice == 3 and mapped:
        x = np.moveaxis(
            np.ascontiguousarray(np.moveaxis(x, range(mapped), range(-mapped, 0))),
            range(-mapped, 0),
            range(mapped),
        )
    return Operand(x, over)


ARITHMETIC = (np.float64, np.float32, np.complex64, np.complex128, np.float16, np.int8, np.bool_)


@pytest.mark.parametrize("dtype", ARITHMETIC)
def test_dot_of_vectors_and_matrices_has_the_bits_of_one_replica(dtype, rng):
    for _ in range(150):
        m, k, n = rng.choice(SIZED, 3)
        a = [(k,), (m, k)][rng.integers(2)]
        b = [(k,), (k, n)][rng.integers(2)]
        over, other = rng.choice(OVER, 2)
        operands = laid_out(rng, a, over, dtype), laid_out(rng, b, other, dtype)
        ordinary = min(m, k, n) > 1
        check(np.dot, *operands, batched=True if ordinary else None)


@pytest.mark.parametrize("dtype", ARITHMETIC)
def test_a_matrix_times_its_own_transpose_has_the_bits_of_one_replica(dtype, rng):
    for shape in ((3, 5), (40, 17), (2, 2), (100, 30)):
        for over in OVER:
            x = normal(rng, shape, over, dtype)
            turned = Operand(x.data.swapaxes(-1, -2), over)  # the same memory: BLAS has syrk for it
            check(np.dot, x, turned)
            check(np.dot, turned, x)
            check(np.matmul, x, turned)
            check(np.inner, x, x)
            check(lambda x: np.tensordot(x, x, (0, 0)), x)
            check(np.cov, x, batched=dtype is not np.float16 or None)


def test_dot_of_other_shapes_and_dtypes_has_the_bits_of_one_replica(rng):
    shapes = [
        ((3,), (2, 3, 4)),
        ((2, 3), (5, 3, 4)),
        ((2, 5, 3), (3,)),
        ((2, 5, 3), (2, 3, 4)),
        ((), (3,)),
        ((2, 3), ()),
        ((0,), (0,)),
        ((2, 0), (0, 3)),
        ((0, 2), (2,)),
        ((3,), (4,)),
        ((2, 3), (2, 3)),
        ((1, 1), (1, 4)),
        ((4, 1), (1,)),
    ]
    for a, b in shapes:
        for dtypes in (
            (np.float64, np.float64),
            (np.float32, np.float64),
            (np.int32, np.float32),
            (np.complex64, np.float64),
            (np.int8, np.bool_),
        ):
            for over, other in (("i", "j"), ("ij", None), ("", "ij")):
                operands = laid_out(rng, a, over, dtypes[0]), laid_out(rng, b, other, dtypes[1])
                check(np.dot, *operands, batched=None)
                check(np.inner, *operands, batched=None)
                check(np.matmul, *operands, batched=None)


def test_products_of_two_arrays_have_the_bits_of_one_replica(rng):
    products: list[tuple[Callable[..., Any], tuple[int, ...], tuple[int, ...]]] = [
        (np.inner, (5, 7), (3, 7)),
        (np.vdot, (5, 7), (7, 5)),
        (np.vdot, (9,), (9,)),
        (np.outer, (2, 3), (4,)),
        (np.linalg.outer, (3,), (4,)),
        (np.kron, (2, 3), (4, 1, 2)),
        (np.kron, (3,), (2,)),
        (np.cross, (4, 3), (3,)),
        (lambda a, b: np.cross(a, b, axis=0), (3, 4), (3, 4)),
        (lambda a, b: np.cross(a, b, axisa=0, axisc=0), (3, 4), (2, 4, 3)),
        (lambda a, b: np.linalg.cross(a, b, axis=0), (3, 4), (3, 4)),
        (np.linalg.vecdot, (4, 9), (9,)),
        (lambda a, b: np.linalg.vecdot(a, b, axis=0), (9, 4), (9, 4)),
        (np.linalg.matmul, (4, 9), (9, 2)),
        (np.tensordot, (4, 2, 3), (2, 3, 5)),
        (lambda a, b: np.tensordot(a, b, 1), (4, 3), (3, 2, 2)),
        (lambda a, b: np.tensordot(a, b, ((0, -1), (1, 0))), (4, 2, 3), (3, 4, 6)),
        (lambda a, b: np.linalg.tensordot(a, b, axes=(-1, -1)), (4, 2, 3), (4, 3)),
        (lambda a, b: np.tensordot(a, b, 0), (4, 2), (3, 2)),
        (lambda a, b: np.linalg.multi_dot([a, b, b.T]), (4, 20), (20, 6)),
        (lambda a, b: np.linalg.multi_dot([a[0], b, b[0]]), (4, 20), (20, 6)),
        (lambda a, b: np.linalg.multi_dot([a, b]), (4, 20), (20, 6)),
    ]
    for function, a, b in products:
        for dtype in ARITHMETIC:
            for over in OVER:
                for other in (*OVER, None):
                    if over == "" and other is None:
                        continue
                    operands = normal(rng, a, over, dtype), normal(rng, b, other, dtype)
                    check(
                        function, *operands, batched=True if np.dtype(dtype).kind in "fi" else None
                    )


def test_shapes_that_do_not_fit_raise_what_numpy_raises(rng):
    x, y = normal(rng, (3, 4), "i"), normal(rng, (3, 4), "j")
    for function in (
        np.dot,
        np.matmul,
        lambda x, y: np.vdot(x, y[0]),
        lambda x, y: np.cross(x, y),
        lambda x, y: np.einsum("ij,ij", x),
        lambda x, y: np.einsum("ij,jk", x, y),
        lambda x, y: np.einsum("ijk,jk", x, y),
        lambda x, y: np.einsum("ij,jk->il", x, y),
        lambda x, y: np.tensordot(x, y, (0, 5)),
        lambda x, y: np.linalg.outer(x, y),
        lambda x, y: np.fft.fft(x, axis=2),
        lambda x, y: np.fft.fft(x, 0),
        lambda x, y: np.fft.fftn(x, axes=(0, 2)),
        lambda x, y: np.fft.fftshift(x, axes=3),
        lambda x, y: np.linalg.norm(x, axis=2),
        lambda x, y: np.linalg.norm(x, ord="nonsense"),
        lambda x, y: np.linalg.norm(x, ord=5),
        lambda x, y: np.linalg.vecdot(x, y, axis=4),
        lambda x, y: np.linalg.tensorinv(x),
        lambda x, y: np.linalg.tensorsolve(x, y),
        lambda x, y: np.linalg.matrix_norm(x[0]),
    ):
        assert check(function, x, y).error is not None, function


EINSUMS = (
    "ij,jk->ik",
    "ij,jk",
    "ij,kj->ik",
    "ij,j->i",
    "i,i->",
    "i,i",
    "i,j->ij",
    "ij->ji",
    "ij->i",
    "ii->i",
    "ij,ij->ij",
    "bij,bjk->bik",
    "bqhd,bkhd->bhqk",
    "...ij,...jk->...ik",
    "...i,...i",
    "i...->...",
    "i...j,j->...i",
    "ij,jk,k->ijk",
    " i j , j -> i ",
    "...,i->...i",
)


@pytest.mark.parametrize("subscripts", EINSUMS)
def test_einsum_of_sums_over_one_label_is_batched(subscripts, rng):
    size = {letter: int(rng.choice((2, 3, 5, 9))) for letter in string.ascii_letters}
    for dtype in ARITHMETIC:
        for _ in range(6):
            operands = []
            for term in subscripts.replace(" ", "").split("->")[0].split(","):
                before, dots, after = term.partition("...")
                shape = [size[letter] for letter in before] + [4] * bool(dots)
                shape += [size[letter] for letter in after]
                operands.append(laid_out(rng, tuple(shape), str(rng.choice(OVER)), dtype))
            check(lambda *values: np.einsum(subscripts, *values), *operands, batched=None)
            plain = [normal(rng, op.data.shape[len(op.over) :], op.over, dtype) for op in operands]
            check(lambda *values: np.einsum(subscripts, *values), *plain)


@settings(max_examples=150)
@given(st.data())
def test_any_einsum_has_the_bits_of_one_replica(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    letters = "abcd"[: rng.integers(1, 5)]
    size = {letter: int(rng.choice((1, 2, 3, 4, 7, 9, 17))) for letter in letters}
    terms = [
        "".join(rng.choice(list(letters), rng.integers(0, 4))) for _ in range(rng.integers(1, 4))
    ]
    used = sorted(set("".join(terms)))
    output = "".join(rng.permutation(used)[: rng.integers(0, len(used) + 1)]) if used else ""
    subscripts = ",".join(terms) + ("->" + output if rng.integers(4) else "")
    dtype = ARITHMETIC[rng.integers(len(ARITHMETIC))]
    operands = [
        laid_out(rng, tuple(size[letter] for letter in term), str(rng.choice(OVER)), dtype)
        for term in terms
    ]
    check(lambda *values: np.einsum(subscripts, *values), *operands, batched=None)


def test_long_sums_have_the_bits_of_one_replica(rng):
    for length in (8191, 8192, 8193, 20000):
        x, y = normal(rng, (length,), "i"), normal(rng, (length,), "ij")
        for subscripts in ("i,i->", "i->"):
            operands = (x, y)[: subscripts.count(",") + 1]
            check(
                lambda *values, subscripts=subscripts: np.einsum(subscripts, *values),
                *operands,
                batched=length <= 8192,
            )
        check(np.dot, x, y)
        check(np.vdot, x, y)
        check(np.linalg.norm, y)


STATISTICS: dict[str, Callable[[Any], Any]] = {
    "cov": np.cov,
    "biased cov": lambda x: np.cov(x, bias=True),
    "cov ddof": lambda x: np.cov(x, ddof=0),
    "cov of columns": lambda x: np.cov(x, rowvar=False),
    "cov of one": lambda x: np.cov(x[0]),
    "cov of two": lambda x: np.cov(x, x[:1]),
    "corrcoef": np.corrcoef,
    "corrcoef of columns": lambda x: np.corrcoef(x, rowvar=False),
    "corrcoef of one": lambda x: np.corrcoef(x[0]),
    "corrcoef of two": lambda x: np.corrcoef(x[0], x[1]),
    "polyval": lambda x: np.polyval(x[0], x),
    "polyval of plain": lambda x: np.polyval([1.0, 2.0, 3.0], x),
    "polyval at plain": lambda x: np.polyval(x, np.linspace(-1, 1, 7)),
    "vander": lambda x: np.vander(x[0]),
    "vander 3": lambda x: np.vander(x[0], 3, increasing=True),
    "vander 0": lambda x: np.vander(x[0], 0),
}


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_and_polynomials_have_the_bits_of_one_replica(name, rng):
    for dtype in (np.float64, np.float32, np.complex64, np.int32):
        for over in OVER:
            for shape in ((3, 7), (4, 40), (2, 2), (9, 5)):
                check(STATISTICS[name], normal(rng, shape, over, dtype))
                check(STATISTICS[name], laid_out(rng, shape, over, dtype))


def test_dtypes_of_other_packages_have_the_dtype_of_one_replica(rng):
    x, y = (
        normal(rng, (3, 4), "i", ml_dtypes.bfloat16),
        normal(rng, (4, 2), "j", ml_dtypes.bfloat16),
    )
    for function in (
        np.dot,
        np.matmul,
        np.outer,
        np.kron,
        lambda x, y: np.tensordot(x, y, 1),
        lambda x, y: np.inner(x, y.T),
        lambda x, y: np.vdot(x[0], y[:, 0]),
        lambda x, y: np.linalg.norm(x),
        lambda x, y: np.polyval(y[:, 0], x),
        lambda x, y: np.cov(x),
    ):
        check(function, x, y, batched=None)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_covariances_without_a_degree_of_freedom_warn_as_numpy_does(rng):
    with pytest.warns(RuntimeWarning, match="Degrees of freedom"):
        check(np.cov, normal(rng, (3, 1), "i"), batched=False)


# Fourier transforms.

ONE_AXIS = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
MANY_AXES = tuple(name + end for end in ("2", "n") for name in ("fft", "ifft", "rfft", "irfft"))


@pytest.mark.parametrize("name", ONE_AXIS)
def test_transforms_along_an_axis_have_the_bits_of_one_replica(name, rng):
    function = getattr(np.fft, name)
    for dtype in (np.float32, np.float64, np.complex64, np.complex128, np.int16):
        if np.dtype(dtype).kind == "c" and name in ("rfft", "ihfft"):
            continue
        for over in OVER:
            x = laid_out(rng, (5, 8), over, dtype)
            check(function, x)
            check(lambda x: function(x, axis=0), x)
            check(lambda x: function(x, 4, -1), x)
            check(lambda x: function(x, n=11, axis=-2, norm="ortho"), x)
            check(function, laid_out(rng, (97,), over, dtype))


@pytest.mark.parametrize("name", MANY_AXES)
def test_transforms_along_axes_have_the_bits_of_one_replica(name, rng):
    function = getattr(np.fft, name)
    for dtype in (np.float32, np.float64, np.complex128):
        if np.dtype(dtype).kind == "c" and name.startswith("rfft"):
            continue
        for over in OVER:
            x = laid_out(rng, (3, 4, 6), over, dtype)
            check(function, x)
            check(lambda x: function(x, axes=(0, 2)), x)
            check(lambda x: function(x, s=(5, 2), axes=(-1, 0)), x)
            check(lambda x: function(x, axes=(1, 1), norm="forward"), x)


def test_shifts_of_frequencies_move_visible_axes(rng):
    for over in OVER:
        x = normal(rng, (3, 4, 5), over)
        for function in (np.fft.fftshift, np.fft.ifftshift):
            check(function, x)
            check(lambda x, function=function: function(x, axes=-1), x)
            check(lambda x, function=function: function(x, axes=(0, 2)), x)


def test_tensor_equations_have_the_bits_of_one_replica(rng):
    for over in OVER:
        a = normal(rng, (2, 3, 6), over)
        check(np.linalg.tensorinv, a)
        for other in OVER:
            check(np.linalg.tensorsolve, a, normal(rng, (2, 3), other))
            check(
                lambda a, b: np.linalg.tensorsolve(a, b, axes=(0,)),
                normal(rng, (6, 2, 3), over),
                normal(rng, (2, 3), other),
            )
