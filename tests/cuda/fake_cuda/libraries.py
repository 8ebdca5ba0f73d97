"""CUDA's libraries for CuPy on NumPy: sorting, products, decompositions and Fourier transforms.

CuPy calls each by the functions of a module, with addresses. A function that is not here is a
NotImplementedError that names it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np

from .runtime import machine

PREFIXES = {"s": np.float32, "d": np.float64, "c": np.complex64, "z": np.complex128}
CUDA_TYPES = {0: "f4", 1: "f8", 2: "f2", 4: "c8", 5: "c16", 14: "bfloat16"}


def memory(pointer: int, dtype: Any, shape: tuple[int, ...], ld: int | None = None) -> np.ndarray:
    """The device's memory as an array: of one axis, or a matrix of columns `ld` elements apart."""
    dtype = np.dtype(dtype)
    rows, *columns = shape
    count = (columns[0] - 1) * (ld or rows) + rows if columns and rows * columns[0] else rows
    if 0 in shape:
        return np.empty(shape, dtype)
    machine.check(pointer, count * dtype.itemsize, True)
    found = machine.find(pointer)
    assert found is not None
    start = pointer - found.content.ctypes.data
    strides = (dtype.itemsize, (ld or rows) * dtype.itemsize)[: len(shape)]
    flat = found.content[start : start + count * dtype.itemsize]
    return np.ndarray(shape, dtype, flat, strides=strides)


def number(pointer: int, dtype: Any) -> Any:
    """A scalar argument, in the host's memory or the device's."""
    import ctypes

    return np.frombuffer(ctypes.string_at(pointer, np.dtype(dtype).itemsize), dtype)[0]


class Library(ModuleType):
    """A module of functions; `available` for those that CuPy asks."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.isupper():
            return name  # a constant that is passed on to us
        raise NotImplementedError(f"the fake CUDA has no {self.__name__.split('.')[-1]}.{name}")


cublas = Library("cupy_backends.cuda.libs.cublas")
cusolver = Library("cupy_backends.cuda.libs.cusolver")
cufft = Library("cupy.cuda.cufft")


def for_each_dtype(
    library: Library, *names: str, dtypes: str = "sdcz"
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a function of dtype and arguments under each name, `?` being the dtype's letter."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            for letter in dtypes:
                bound = _bound(function, PREFIXES[letter])
                setattr(library, name.replace("?", letter), bound)
        return function

    return add


def _bound(function: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
    return lambda *arguments: function(dtype, *arguments)


def plain(library: Library) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        setattr(library, function.__name__, function)
        return function

    return add


# thrust: sorts along the last axis, NaNs last.


def sort(dtype: Any, data: int, keys: int, shape: Any) -> None:
    found = memory(data, dtype, (int(np.prod(shape)),)).reshape(shape)
    found.sort(axis=-1, kind="stable")


def argsort(dtype: Any, indices: int, data: int, keys: int, shape: Any) -> None:
    found = memory(data, dtype, (int(np.prod(shape)),)).reshape(shape)
    order = found.argsort(axis=-1, kind="stable")
    memory(indices, np.int64, (order.size,))[:] = order.reshape(-1)
    found[...] = np.take_along_axis(found, order, -1)


def lexsort(dtype: Any, indices: int, keys: int, count: int, length: int) -> None:
    found = memory(keys, dtype, (count * length,)).reshape(count, length)
    memory(indices, np.int64, (length,))[:] = np.lexsort(found)


# cuBLAS: matrices are stored by columns.

cublas.CUBLAS_OP_N, cublas.CUBLAS_OP_T, cublas.CUBLAS_OP_C = range(3)
cublas.CUBLAS_FILL_MODE_LOWER, cublas.CUBLAS_FILL_MODE_UPPER = range(2)
cublas.CUBLAS_SIDE_LEFT, cublas.CUBLAS_SIDE_RIGHT = range(2)
cublas.CUBLAS_POINTER_MODE_HOST, cublas.CUBLAS_POINTER_MODE_DEVICE = range(2)
for _name in ("create", "getPointerMode", "getMathMode"):
    setattr(cublas, _name, lambda *arguments: 1 if not arguments else 0)
for _name in ("destroy", "setPointerMode", "setStream", "setMathMode"):
    setattr(cublas, _name, lambda *arguments: None)
cusolver.create, cusolver.createParams = (lambda: 1), (lambda: 1)
cusolver.CUSOLVER_EIG_MODE_NOVECTOR, cusolver.CUSOLVER_EIG_MODE_VECTOR = range(2)
for _name in ("destroy", "setStream", "destroyParams"):
    setattr(cusolver, _name, lambda *arguments: None)


def op(matrix: np.ndarray, transposed: int) -> np.ndarray:
    return (matrix, matrix.T, matrix.conj().T)[transposed]


def product(
    ways: tuple[int, int], size: tuple[int, int, int], alpha: Any, beta: Any, *matrices: Any
) -> None:
    """c = alpha * op(a) @ op(b) + beta * c; each matrix is its pointer, dtype and ld."""
    (m, n, k), shapes = size, []
    for way, shape in zip(ways, ((m, k), (k, n)), strict=True):
        shapes.append(shape[::-1] if way else shape)
    a, b, c = (
        memory(pointer, dtype, shape, ld)
        for (pointer, dtype, ld), shape in zip(matrices, (*shapes, (m, n)), strict=True)
    )
    wide = np.result_type(np.float32, c.dtype) if c.dtype.itemsize < 4 else c.dtype
    with np.errstate(all="ignore"):
        found = alpha * (op(a, ways[0]).astype(wide) @ op(b, ways[1]).astype(wide))
        c[...] = (found + beta * c.astype(wide) if beta else found).astype(c.dtype)


@for_each_dtype(cublas, "?gemm")
def _gemm(dtype, handle, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):  # type: ignore[no-untyped-def]
    scales = number(alpha, dtype), number(beta, dtype)
    product((ta, tb), (m, n, k), *scales, (a, dtype, lda), (b, dtype, ldb), (c, dtype, ldc))


@for_each_dtype(cublas, "?gemmStridedBatched")
def _gemm_strided(dtype, handle, ta, tb, m, n, k, alpha, a, lda, da, b, ldb, db, beta, c, ldc, dc, count):  # type: ignore[no-untyped-def]
    size = np.dtype(dtype).itemsize
    for i in range(count):
        at = (a + i * da * size, b + i * db * size, c + i * dc * size)
        _gemm(dtype, handle, ta, tb, m, n, k, alpha, at[0], lda, at[1], ldb, beta, at[2], ldc)


@for_each_dtype(cublas, "?gemmBatched")
def _gemm_batched(dtype, handle, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, count):  # type: ignore[no-untyped-def]
    for at in zip(*(memory(table, np.int64, (count,)).tolist() for table in (a, b, c)), strict=True):
        _gemm(dtype, handle, ta, tb, m, n, k, alpha, at[0], lda, at[1], ldb, beta, at[2], ldc)


@plain(cublas)
def gemmEx(handle, ta, tb, m, n, k, alpha, a, type_a, lda, b, type_b, ldb, beta, c, type_c, ldc, computing, algorithm):  # type: ignore[no-untyped-def]
    scale = {68: "f4", 70: "f8"}.get(computing, "f4")
    scale = {4: "c8", 5: "c16", 1: "f8"}.get(type_c, scale)
    matrices = (a, CUDA_TYPES[type_a], lda), (b, CUDA_TYPES[type_b], ldb), (c, CUDA_TYPES[type_c], ldc)
    product((ta, tb), (m, n, k), number(alpha, scale), number(beta, scale), *matrices)


@plain(cublas)
def gemmStridedBatchedEx(handle, ta, tb, m, n, k, alpha, a, type_a, lda, da, b, type_b, ldb, db, beta, c, type_c, ldc, dc, count, computing, algorithm):  # type: ignore[no-untyped-def]
    sizes = [np.dtype(CUDA_TYPES[kind]).itemsize for kind in (type_a, type_b, type_c)]
    for i in range(count):
        at = [p + i * step * size for p, step, size in zip((a, b, c), (da, db, dc), sizes, strict=True)]
        gemmEx(handle, ta, tb, m, n, k, alpha, at[0], type_a, lda, at[1], type_b, ldb, beta, at[2], type_c, ldc, computing, algorithm)


@for_each_dtype(cublas, "?geam")
def _geam(dtype, handle, ta, tb, m, n, alpha, a, lda, beta, b, ldb, c, ldc):  # type: ignore[no-untyped-def]
    first = memory(a, dtype, (n, m) if ta else (m, n), lda)
    second = memory(b, dtype, (n, m) if tb else (m, n), ldb)
    total = number(alpha, dtype) * op(first, ta) + number(beta, dtype) * op(second, tb)
    memory(c, dtype, (m, n), ldc)[...] = total


# LU, QR and Cholesky decompositions, as LAPACK leaves them.


def factorize(a: np.ndarray) -> tuple[list[int], int]:
    """LU in place, with partial pivoting: the pivots, from one, and the first zero of U's."""
    pivots, singular = [], 0
    for k in range(min(a.shape)):
        pivot = k + int(np.argmax(np.abs(a[k:, k])))
        pivots.append(pivot + 1)
        a[[k, pivot]] = a[[pivot, k]]
        if a[k, k] == 0:
            singular = singular or k + 1
            continue
        a[k + 1 :, k] /= a[k, k]
        a[k + 1 :, k + 1 :] -= np.outer(a[k + 1 :, k], a[k, k + 1 :])
    return pivots, singular


def substitute(a: np.ndarray, pivots: Any, b: np.ndarray, transposed: int) -> None:
    """Solve op(A) x = b in place, where `a` holds A's LU."""
    lower = np.tril(a, -1) + np.eye(len(a), dtype=a.dtype)
    upper = np.triu(a)
    order = np.arange(len(a))
    for k, pivot in enumerate(pivots):
        order[[k, pivot - 1]] = order[[pivot - 1, k]]
    if transposed:
        found = np.linalg.solve(op(lower, transposed), np.linalg.solve(op(upper, transposed), b))
        b[order] = found
    else:
        b[...] = np.linalg.solve(upper, np.linalg.solve(lower, b[order]))


@for_each_dtype(
    cusolver, "?getrf_bufferSize", "?geqrf_bufferSize", "?orgqr_bufferSize", "?ungqr_bufferSize",
    "?potrf_bufferSize", "?gesvd_bufferSize",
)
def _one(dtype: Any, *arguments: Any) -> int:
    return 1


@for_each_dtype(cusolver, "?getrf")
def _getrf(dtype, handle, m, n, a, lda, work, pivots, info):  # type: ignore[no-untyped-def]
    with np.errstate(all="ignore"):
        found, singular = factorize(memory(a, dtype, (m, n), lda))
    memory(pivots, np.int32, (min(m, n),))[:] = found
    memory(info, np.int32, (1,))[0] = singular


@for_each_dtype(cusolver, "?getrs")
def _getrs(dtype, handle, trans, n, count, a, lda, pivots, b, ldb, info):  # type: ignore[no-untyped-def]
    places = memory(pivots, np.int32, (n,))
    substitute(memory(a, dtype, (n, n), lda), places, memory(b, dtype, (n, count), ldb), trans)
    memory(info, np.int32, (1,))[0] = 0


def addresses(table: int, count: int) -> list[int]:
    return memory(table, np.int64, (count,)).tolist()  # type: ignore[no-any-return]


@for_each_dtype(cublas, "?getrfBatched")
def _getrf_batched(dtype, handle, n, table, lda, pivots, info, count):  # type: ignore[no-untyped-def]
    for i, a in enumerate(addresses(table, count)):
        _getrf(dtype, handle, n, n, a, lda, 0, pivots + 4 * n * i, info + 4 * i)


@for_each_dtype(cublas, "?getrsBatched")
def _getrs_batched(dtype, handle, trans, n, many, table, lda, pivots, targets, ldb, info, count):  # type: ignore[no-untyped-def]
    pairs = zip(addresses(table, count), addresses(targets, count), strict=True)
    for i, (a, b) in enumerate(pairs):
        places = memory(pivots + 4 * n * i, np.int32, (n,))
        substitute(memory(a, dtype, (n, n), lda), places, memory(b, dtype, (n, many), ldb), trans)
    return 0


@for_each_dtype(cublas, "?getriBatched")
def _getri_batched(dtype, handle, n, table, lda, pivots, targets, ldc, info, count):  # type: ignore[no-untyped-def]
    for i, (a, c) in enumerate(zip(addresses(table, count), addresses(targets, count), strict=True)):
        target = memory(c, dtype, (n, n), ldc)
        target[...] = np.eye(n)
        places = memory(pivots + 4 * n * i, np.int32, (n,))
        substitute(memory(a, dtype, (n, n), lda), places, target, 0)
    memory(info, np.int32, (count,))[:] = 0


@for_each_dtype(cusolver, "?potrf")
def _potrf(dtype, handle, uplo, n, a, lda, work, size, info):  # type: ignore[no-untyped-def]
    found, status = memory(a, dtype, (n, n), lda), 0
    whole = np.tril(found) if uplo == cublas.CUBLAS_FILL_MODE_LOWER else np.triu(found).conj().T
    whole = whole + np.tril(whole, -1).conj().T
    try:
        lower = np.linalg.cholesky(whole)
    except np.linalg.LinAlgError:
        status = 1
    else:
        mask = np.tri(n, dtype=bool)
        if uplo == cublas.CUBLAS_FILL_MODE_LOWER:
            found[mask] = lower[mask]
        else:
            found[mask.T] = lower.conj().T[mask.T]
    memory(info, np.int32, (1,))[0] = status


@for_each_dtype(cusolver, "?potrfBatched")
def _potrf_batched(dtype, handle, uplo, n, table, lda, info, count):  # type: ignore[no-untyped-def]
    for i, a in enumerate(addresses(table, count)):
        _potrf(dtype, handle, uplo, n, a, lda, 0, 0, info + 4 * i)


@for_each_dtype(cusolver, "?geqrf")
def _geqrf(dtype, handle, m, n, a, lda, tau, work, size, info):  # type: ignore[no-untyped-def]
    found = memory(a, dtype, (m, n), lda)
    reflectors, scales = np.linalg.qr(found, mode="raw")
    found[...] = reflectors.T
    memory(tau, dtype, (min(m, n),))[:] = scales
    memory(info, np.int32, (1,))[0] = 0


@for_each_dtype(cusolver, "?orgqr", "?ungqr")
def _orgqr(dtype, handle, m, n, k, a, lda, tau, work, size, info):  # type: ignore[no-untyped-def]
    found, scales = memory(a, dtype, (m, n), lda), memory(tau, dtype, (k,))
    q = np.eye(m, n, dtype=dtype)
    for i in range(k - 1, -1, -1):
        reflector = np.concatenate([np.zeros(i), [1], found[i + 1 :, i]]).astype(dtype)
        q -= scales[i] * np.outer(reflector, reflector.conj() @ q)
    found[...] = q
    memory(info, np.int32, (1,))[0] = 0


@for_each_dtype(cusolver, "?gesvd")
def _gesvd(dtype, handle, jobu, jobvt, m, n, a, lda, s, u, ldu, vt, ldvt, work, size, real, info):  # type: ignore[no-untyped-def]
    ways = {ord("A"): True, ord("S"): False}
    k, full = min(m, n), ways.get(jobu, False)
    left, values, right = np.linalg.svd(memory(a, dtype, (m, n), lda), full_matrices=full)
    memory(s, values.dtype, (k,))[:] = values
    if jobu in ways:
        memory(u, dtype, left.shape, ldu)[...] = left
        memory(vt, dtype, right.shape, ldvt)[...] = right
    memory(info, np.int32, (1,))[0] = 0


@plain(cusolver)
def xsyevd_bufferSize(*arguments: Any) -> tuple[int, int]:
    return 1, 1


@plain(cusolver)
def xgeev_bufferSize(*arguments: Any) -> tuple[int, int]:
    return 1, 1


@plain(cusolver)
def xsyevd(handle, params, jobz, uplo, n, kind, a, lda, kind_w, w, *rest):  # type: ignore[no-untyped-def]
    found = memory(a, CUDA_TYPES[kind], (n, n), lda)
    values, vectors = np.linalg.eigh(found, "UL"[uplo == cublas.CUBLAS_FILL_MODE_LOWER])
    memory(w, CUDA_TYPES[kind_w], (n,))[:] = values
    if jobz == cusolver.CUSOLVER_EIG_MODE_VECTOR:
        found[...] = vectors
    memory(rest[-1], np.int32, (1,))[0] = 0


@plain(cusolver)
def xgeev(handle, params, left, right, n, kind, a, lda, kind_w, w, *rest):  # type: ignore[no-untyped-def]
    found, (_, _, _, _, v, ldv), info = memory(a, CUDA_TYPES[kind], (n, n), lda), rest[:6], rest[-1]
    values, vectors = np.linalg.eig(found)
    memory(w, CUDA_TYPES[kind_w], (n,))[:] = values
    if right == cusolver.CUSOLVER_EIG_MODE_VECTOR:
        target = memory(v, CUDA_TYPES[kind], (n, n), ldv)
        if target.dtype.kind == "c":
            target[...] = vectors
        else:  # a pair of conjugates as its real and its imaginary part
            target[...] = vectors.real
            for k in np.flatnonzero(values.imag > 0):
                target[:, k + 1] = vectors[:, k].imag
    memory(info, np.int32, (1,))[0] = 0


# cuFFT: unscaled transforms both ways.

cufft.CUFFT_FORWARD, cufft.CUFFT_INVERSE = -1, 1
cufft.CUFFT_C2C, cufft.CUFFT_R2C, cufft.CUFFT_C2R = 0x29, 0x2A, 0x2C
cufft.CUFFT_Z2Z, cufft.CUFFT_D2Z, cufft.CUFFT_Z2D = 0x69, 0x6A, 0x6C
_OUTPUTS = {0x29: "c8", 0x2A: "c8", 0x2C: "f4", 0x69: "c16", 0x6A: "c16", 0x6C: "f8"}
_COMPLEX, _FORWARD = (0x29, 0x69), (0x2A, 0x6A)


@plain(cufft)
def get_current_plan() -> Any:
    return getattr(_thread, "plan", None)


_thread = threading.local()


class _Plan:
    gpus = None
    last_axis: int
    last_size: int
    fft_type: int
    axes: tuple[int, ...]

    def __enter__(self) -> Any:
        _thread.plan = self
        return self

    def __exit__(self, *exception: Any) -> None:
        _thread.plan = None

    def fft(self, a: Any, out: Any, direction: int) -> None:
        x, axes = a.get(), tuple(axis % a.ndim for axis in self.axes)
        last = self.last_axis % a.ndim
        axes = (*(axis for axis in axes if axis != last), last)
        if self.fft_type in _COMPLEX:
            forward = direction == cufft.CUFFT_FORWARD
            y = np.fft.fftn(x, axes=axes) if forward else np.fft.ifftn(x, axes=axes, norm="forward")
        elif self.fft_type in _FORWARD:
            y = np.fft.rfftn(x, axes=axes)
        else:
            lengths = [self.last_size if axis == last else x.shape[axis] for axis in axes]
            y = np.fft.irfftn(x, lengths, axes=axes, norm="forward")
        out.set(np.require(y.astype(out.dtype), None, "F" if out.flags.f_contiguous else "C"))

    def get_output_array(self, a: Any, order: str = "C") -> Any:
        import cupy

        shape = list(a.shape)
        if self.fft_type not in _COMPLEX:
            shape[self.last_axis] = self.last_size
        return cupy.empty(tuple(shape), _OUTPUTS[self.fft_type], order=order)

    def check_output_array(self, a: Any, out: Any) -> None:
        expected = self.get_output_array(a)
        if (out.shape, out.dtype) != (expected.shape, expected.dtype):
            raise ValueError(f"out must have shape {expected.shape} and dtype {expected.dtype}")


@plain(cufft)
class Plan1d(_Plan):
    last_axis, axes = -1, (-1,)

    def __init__(self, nx: int, fft_type: int, batch: int, *, devices: Any = None, out: Any = None):
        self.nx, self.fft_type, self.batch = nx, fft_type, batch
        self.last_size = nx // 2 + 1 if fft_type in _FORWARD else nx


@plain(cufft)
class PlanNd(_Plan):
    def __init__(
        self, shape: Any, inembed: Any, istride: int, idist: int, onembed: Any, ostride: int,
        odist: int, fft_type: int, batch: int, order: str, last_axis: int, last_size: int, **_: Any,
    ) -> None:  # fmt: skip
        self.shape, self.fft_type, self.batch, self.order = tuple(shape), fft_type, batch, order
        self.last_axis, self.last_size = last_axis, last_size
        count = len(self.shape)
        self.axes = tuple(range(-count, 0)) if order == "C" else tuple(range(count))
        if fft_type in _COMPLEX:
            self.last_axis = self.axes[-1]


def install() -> None:
    """Put the modules where CuPy looks for them."""
    for library in (cublas, cusolver, cufft):
        sys.modules[library.__name__] = library
    from cupy.cuda import thrust

    thrust.sort, thrust.argsort, thrust.lexsort = sort, argsort, lexsort
