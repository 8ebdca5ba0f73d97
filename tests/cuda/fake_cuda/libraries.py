"""CUDA's libraries for CuPy on NumPy: sorting, products, decompositions and Fourier transforms.

CuPy calls each by the functions of a module, with addresses. A function that is not here is a
NotImplementedError that names it.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from . import capsules, compiler
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
    return np.frombuffer(ctypes.string_at(pointer, np.dtype(dtype).itemsize), dtype)[0]


cublas: dict[str, Any] = {}
cusolver: dict[str, Any] = {}
cufft = ModuleType("cupy.cuda.cufft")
OP_N, OP_T, OP_C = range(3)
LOWER, UPPER = range(2)
WITH_VECTORS = 1


def for_each_dtype(
    library: dict[str, Any], *names: str, dtypes: str = "sdcz"
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a function of dtype and arguments under each name, `?` being the dtype's letter."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            for letter in dtypes:
                library[name.replace("?", letter)] = partial(function, PREFIXES[letter])
        return function

    return add


def plain(library: dict[str, Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add a function under its own name."""

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        library[function.__name__] = function
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


def lexsort(dtype: Any, indices: int, keys: int, count: int, length: int) -> None:
    found = memory(keys, dtype, (count * length,)).reshape(count, length)
    memory(indices, np.int64, (length,))[:] = np.lexsort(found)


# cuBLAS: matrices are stored by columns.

for _library in (cublas, cusolver):
    for _name in (
        *("create", "createParams", "createGesvdjInfo", "createSyevjInfo"),
        *("getPointerMode", "getMathMode"),
    ):
        _library[_name] = lambda *arguments: 0 if arguments else 1
    for _name in (
        *("destroy", "destroyParams", "destroyGesvdjInfo", "destroySyevjInfo"),
        *("setPointerMode", "setStream", "setMathMode"),
    ):
        _library[_name] = lambda *arguments: None
    _library["getVersion"] = lambda *arguments: 13000
cusolver["_getVersion"], cusolver["_getVersionNumber"] = (lambda: (12, 0, 0)), (lambda: 12000)


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
def _gemm(dtype, handle, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc):
    scales = number(alpha, dtype), number(beta, dtype)
    product((ta, tb), (m, n, k), *scales, (a, dtype, lda), (b, dtype, ldb), (c, dtype, ldc))


@for_each_dtype(cublas, "?gemmStridedBatched")
def _gemm_strided(
    dtype, handle, ta, tb, m, n, k, alpha, a, lda, da, b, ldb, db, beta, c, ldc, dc, count
):
    size = np.dtype(dtype).itemsize
    for i in range(count):
        at = (a + i * da * size, b + i * db * size, c + i * dc * size)
        _gemm(dtype, handle, ta, tb, m, n, k, alpha, at[0], lda, at[1], ldb, beta, at[2], ldc)


@for_each_dtype(cublas, "?gemmBatched")
def _gemm_batched(dtype, handle, ta, tb, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc, count):
    for at in zip(
        *(memory(table, np.int64, (count,)).tolist() for table in (a, b, c)), strict=True
    ):
        _gemm(dtype, handle, ta, tb, m, n, k, alpha, at[0], lda, at[1], ldb, beta, at[2], ldc)


@plain(cublas)
def gemmEx(
    handle,
    ta,
    tb,
    m,
    n,
    k,
    alpha,
    a,
    type_a,
    lda,
    b,
    type_b,
    ldb,
    beta,
    c,
    type_c,
    ldc,
    computing,
    algorithm,
):
    scale = {68: "f4", 70: "f8"}.get(computing, "f4")
    scale = {4: "c8", 5: "c16", 1: "f8"}.get(type_c, scale)
    matrices = (
        (a, CUDA_TYPES[type_a], lda),
        (b, CUDA_TYPES[type_b], ldb),
        (c, CUDA_TYPES[type_c], ldc),
    )
    product((ta, tb), (m, n, k), number(alpha, scale), number(beta, scale), *matrices)


@plain(cublas)
def gemmStridedBatchedEx(
    handle,
    ta,
    tb,
    m,
    n,
    k,
    alpha,
    a,
    type_a,
    lda,
    da,
    b,
    type_b,
    ldb,
    db,
    beta,
    c,
    type_c,
    ldc,
    dc,
    count,
    computing,
    algorithm,
):
    sizes = [np.dtype(CUDA_TYPES[kind]).itemsize for kind in (type_a, type_b, type_c)]
    for i in range(count):
        at = [
            p + i * step * size
            for p, step, size in zip((a, b, c), (da, db, dc), sizes, strict=True)
        ]
        gemmEx(
            handle,
            ta,
            tb,
            m,
            n,
            k,
            alpha,
            at[0],
            type_a,
            lda,
            at[1],
            type_b,
            ldb,
            beta,
            at[2],
            type_c,
            ldc,
            computing,
            algorithm,
        )


@for_each_dtype(cublas, "?geam")
def _geam(dtype, handle, ta, tb, m, n, alpha, a, lda, beta, b, ldb, c, ldc):
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
    cusolver,
    "?getrf_bufferSize",
    "?geqrf_bufferSize",
    "?orgqr_bufferSize",
    "?ungqr_bufferSize",
    "?potrf_bufferSize",
    "?gesvd_bufferSize",
    "?gesvdjBatched_bufferSize",
    "?syevjBatched_bufferSize",
    "?heevjBatched_bufferSize",
)
def _one(dtype: Any, *arguments: Any) -> int:
    return 1


@for_each_dtype(cusolver, "?getrf")
def _getrf(dtype, handle, m, n, a, lda, work, pivots, info):
    with np.errstate(all="ignore"):
        found, singular = factorize(memory(a, dtype, (m, n), lda))
    memory(pivots, np.int32, (min(m, n),))[:] = found
    memory(info, np.int32, (1,))[0] = singular


@for_each_dtype(cusolver, "?getrs")
def _getrs(dtype, handle, trans, n, count, a, lda, pivots, b, ldb, info):
    places = memory(pivots, np.int32, (n,))
    substitute(memory(a, dtype, (n, n), lda), places, memory(b, dtype, (n, count), ldb), trans)
    memory(info, np.int32, (1,))[0] = 0


def addresses(table: int, count: int) -> list[int]:
    return memory(table, np.int64, (count,)).tolist()


@for_each_dtype(cublas, "?getrfBatched")
def _getrf_batched(dtype, handle, n, table, lda, pivots, info, count):
    for i, a in enumerate(addresses(table, count)):
        _getrf(dtype, handle, n, n, a, lda, 0, pivots + 4 * n * i, info + 4 * i)


@for_each_dtype(cublas, "?getrsBatched")
def _getrs_batched(dtype, handle, trans, n, many, table, lda, pivots, targets, ldb, info, count):
    pairs = zip(addresses(table, count), addresses(targets, count), strict=True)
    for i, (a, b) in enumerate(pairs):
        places = memory(pivots + 4 * n * i, np.int32, (n,))
        substitute(memory(a, dtype, (n, n), lda), places, memory(b, dtype, (n, many), ldb), trans)
    ctypes.c_int.from_address(info).value = 0  # the host's


@for_each_dtype(cublas, "?getriBatched")
def _getri_batched(dtype, handle, n, table, lda, pivots, targets, ldc, info, count):
    for i, (a, c) in enumerate(
        zip(addresses(table, count), addresses(targets, count), strict=True)
    ):
        target = memory(c, dtype, (n, n), ldc)
        target[...] = np.eye(n)
        places = memory(pivots + 4 * n * i, np.int32, (n,))
        substitute(memory(a, dtype, (n, n), lda), places, target, 0)
    memory(info, np.int32, (count,))[:] = 0


@for_each_dtype(cusolver, "?potrf")
def _potrf(dtype, handle, uplo, n, a, lda, work, size, info):
    found, status = memory(a, dtype, (n, n), lda), 0
    whole = np.tril(found) if uplo == LOWER else np.triu(found).conj().T
    whole = whole + np.tril(whole, -1).conj().T
    try:
        lower = np.linalg.cholesky(whole)
    except np.linalg.LinAlgError:
        status = 1
    else:
        mask = np.tri(n, dtype=bool)
        if uplo == LOWER:
            found[mask] = lower[mask]
        else:
            found[mask.T] = lower.conj().T[mask.T]
    memory(info, np.int32, (1,))[0] = status


@for_each_dtype(cusolver, "?potrfBatched")
def _potrf_batched(dtype, handle, uplo, n, table, lda, info, count):
    for i, a in enumerate(addresses(table, count)):
        _potrf(dtype, handle, uplo, n, a, lda, 0, 0, info + 4 * i)


@for_each_dtype(cusolver, "?geqrf")
def _geqrf(dtype, handle, m, n, a, lda, tau, work, size, info):
    found = memory(a, dtype, (m, n), lda)
    reflectors, scales = np.linalg.qr(found, mode="raw")
    found[...] = reflectors.T
    memory(tau, dtype, (min(m, n),))[:] = scales
    memory(info, np.int32, (1,))[0] = 0


@for_each_dtype(cusolver, "?orgqr", "?ungqr")
def _orgqr(dtype, handle, m, n, k, a, lda, tau, work, size, info):
    found, scales = memory(a, dtype, (m, n), lda), memory(tau, dtype, (k,))
    q = np.eye(m, n, dtype=dtype)
    for i in range(k - 1, -1, -1):
        reflector = np.concatenate([np.zeros(i), [1], found[i + 1 :, i]]).astype(dtype)
        q -= scales[i] * np.outer(reflector, reflector.conj() @ q)
    found[...] = q
    memory(info, np.int32, (1,))[0] = 0


@for_each_dtype(cusolver, "?gesvd")
def _gesvd(dtype, handle, jobu, jobvt, m, n, a, lda, s, u, ldu, vt, ldvt, work, size, real, info):
    found, k = memory(a, dtype, (m, n), lda), min(m, n)
    left, values, right = np.linalg.svd(found, full_matrices=True)
    memory(s, values.dtype, (k,))[:] = values
    for job, part, pointer, ld in ((jobu, left, u, ldu), (jobvt, right, vt, ldvt)):
        thin = part[:, :k] if part is left else part[:k]
        if job == ord("A"):
            memory(pointer, dtype, part.shape, ld)[...] = part
        if job == ord("S"):
            memory(pointer, dtype, thin.shape, ld)[...] = thin
        if job == ord("O"):
            found[: len(thin), : thin.shape[1]] = thin
    memory(info, np.int32, (1,))[0] = 0


@for_each_dtype(cusolver, "?gesvdjBatched")
def _gesvdj_batched(
    dtype, handle, job, m, n, a, lda, s, u, ldu, v, ldv, work, size, info, params, count
):
    k, itemsize = min(m, n), np.dtype(dtype).itemsize
    for i in range(count):
        found = memory(a + i * lda * n * itemsize, dtype, (m, n), lda)
        left, values, right = np.linalg.svd(found)
        memory(s, values.dtype, (count * k,))[i * k : (i + 1) * k] = values
        if job == WITH_VECTORS:
            memory(u + i * ldu * m * itemsize, dtype, (m, m), ldu)[...] = left
            memory(v + i * ldv * n * itemsize, dtype, (n, n), ldv)[...] = right.conj().T
    memory(info, np.int32, (count,))[:] = 0


@for_each_dtype(cusolver, "?syevjBatched", dtypes="sd")
@for_each_dtype(cusolver, "?heevjBatched", dtypes="cz")
def _syevj_batched(dtype, handle, job, uplo, n, a, lda, w, work, size, info, params, count):
    for i in range(count):
        found = memory(a + i * lda * n * np.dtype(dtype).itemsize, dtype, (n, n), lda)
        values, vectors = np.linalg.eigh(found, "UL"[uplo == LOWER])
        memory(w, values.dtype, (count * n,))[i * n : (i + 1) * n] = values
        if job == WITH_VECTORS:
            found[...] = vectors
    memory(info, np.int32, (count,))[:] = 0


@plain(cusolver)
def xsyevd_bufferSize(*arguments: Any) -> tuple[int, int]:
    return 1, 1


@plain(cusolver)
def xgeev_bufferSize(*arguments: Any) -> tuple[int, int]:
    return 1, 1


@plain(cusolver)
def xsyevd(handle, params, jobz, uplo, n, kind, a, lda, kind_w, w, *rest):
    found = memory(a, CUDA_TYPES[kind], (n, n), lda)
    values, vectors = np.linalg.eigh(found, "UL"[uplo == LOWER])
    memory(w, CUDA_TYPES[kind_w], (n,))[:] = values
    if jobz == WITH_VECTORS:
        found[...] = vectors
    memory(rest[-1], np.int32, (1,))[0] = 0


@plain(cusolver)
def xgeev(handle, params, left, right, n, kind, a, lda, kind_w, w, *rest):
    found, (_, _, _, _, v, ldv), info = memory(a, CUDA_TYPES[kind], (n, n), lda), rest[:6], rest[-1]
    values, vectors = np.linalg.eig(found)
    memory(w, CUDA_TYPES[kind_w], (n,))[:] = values
    if right == WITH_VECTORS:
        target = memory(v, CUDA_TYPES[kind], (n, n), ldv)
        if target.dtype.kind == "c":
            target[...] = vectors
        else:  # a pair of conjugates as its real and its imaginary part
            target[...] = vectors.real
            for k in np.flatnonzero(values.imag > 0):
                target[:, k + 1] = vectors[:, k].imag
    memory(info, np.int32, (1,))[0] = 0


# cuFFT: unscaled transforms both ways.

vars(cufft).update(CUFFT_FORWARD=-1, CUFFT_INVERSE=1)
vars(cufft).update(CUFFT_C2C=0x29, CUFFT_R2C=0x2A, CUFFT_C2R=0x2C)
vars(cufft).update(CUFFT_Z2Z=0x69, CUFFT_D2Z=0x6A, CUFFT_Z2D=0x6C)
_FROM_REAL = (0x2A, 0x6A)
_TO_REAL = (0x2C, 0x6C)


@plain(vars(cufft))
def get_current_plan() -> Any:
    return getattr(_thread, "plan", None)


_thread = threading.local()


def signals(
    pointer: int, dtype: Any, count: int, distance: int, embed: Any, stride: int, shape: Any
) -> np.ndarray:
    """`count` signals in memory, as cuFFT's advanced layout describes them."""
    steps = [stride * math.prod(embed[axis + 1 :]) for axis in range(len(shape))]
    steps, shape = [distance, *steps], (count, *shape)
    extent = 1 + sum((length - 1) * step for length, step in zip(shape, steps, strict=True))
    flat = memory(pointer, dtype, (extent,))
    return np.ndarray(shape, dtype, flat, strides=[step * flat.itemsize for step in steps])


@plain(vars(cufft))
class PlanNd:
    """A plan for `batch` transforms of `shape`."""

    gpus = None

    def __init__(
        self, shape: Any, inembed: Any, istride: int, idist: int, onembed: Any, ostride: int,
        odist: int, fft_type: int, batch: int, order: str, last_axis: int, last_size: Any,
    ) -> None:  # fmt: skip
        import cupy

        self.shape, self.fft_type, self.batch, self.order = tuple(shape), fft_type, batch, order
        self.last_axis, self.last_size, self.work_area = last_axis, last_size, cupy.cuda.alloc(0)
        self._input = batch, idist, inembed, istride
        self._output = batch, odist, onembed, ostride

    def __enter__(self) -> Any:
        _thread.plan = self
        return self

    def __exit__(self, *exception: Any) -> None:
        _thread.plan = None

    def fft(self, a: Any, out: Any, direction: int) -> None:
        half = (*self.shape[:-1], self.shape[-1] // 2 + 1)
        to_real, from_real = self.fft_type in _TO_REAL, self.fft_type in _FROM_REAL
        shapes = half if to_real else self.shape, half if from_real else self.shape
        x = signals(a.data.ptr, a.dtype, *self._input, shapes[0])
        y = signals(out.data.ptr, out.dtype, *self._output, shapes[1])
        axes = tuple(range(1, x.ndim))
        if from_real:
            y[...] = np.fft.rfftn(x, axes=axes)
        elif to_real:
            y[...] = np.fft.irfftn(x, self.shape, axes=axes, norm="forward")
        elif direction == -1:
            y[...] = np.fft.fftn(x, axes=axes)
        else:
            y[...] = np.fft.ifftn(x, axes=axes, norm="forward")

    def get_output_array(self, a: Any, order: str = "C") -> Any:
        import cupy

        shape, kind = list(a.shape), a.dtype.char
        if self.fft_type in (*_TO_REAL, *_FROM_REAL):
            shape[self.last_axis] = self.last_size
            kind = kind.lower() if self.fft_type in _TO_REAL else kind.upper()
        return cupy.empty(tuple(shape), kind, order=order)

    def check_output_array(self, a: Any, out: Any) -> None:
        expected = self.get_output_array(a)
        if (out.shape, out.dtype) != (expected.shape, expected.dtype):
            raise ValueError(f"out must have shape {expected.shape} and dtype {expected.dtype}")


@plain(vars(cufft))
class Plan1d(PlanNd):
    """A plan for transforms of one axis, the last one of an array in C order."""

    def __init__(
        self, nx: int, fft_type: int, batch: int, *, devices: Any = None, out: Any = None
    ) -> None:
        half = nx // 2 + 1
        lengths = [half if fft_type in kinds else nx for kinds in (_TO_REAL, _FROM_REAL)]
        ends = [([length], 1, length) for length in lengths]
        super().__init__((nx,), *ends[0], *ends[1], fft_type, batch, "C", -1, lengths[1])
        self.nx = nx


# cupyx._cusolver calls cuSOLVER from C.

HANDLE, COUNT, JOB = ctypes.c_void_p, ctypes.c_int, ctypes.c_byte
FROM_C: dict[str, tuple[Any, ...]] = {
    "geqrf": (COUNT, COUNT, HANDLE, COUNT, HANDLE, HANDLE, COUNT, HANDLE),
    "orgqr": (COUNT, COUNT, COUNT, HANDLE, COUNT, HANDLE, HANDLE, COUNT, HANDLE),
    "gesvd": (
        *(JOB, JOB, COUNT, COUNT, HANDLE, COUNT, HANDLE, HANDLE, COUNT, HANDLE, COUNT),
        *(HANDLE, COUNT, HANDLE, HANDLE),
    ),
}
WORDS = {HANDLE: "void*", COUNT: "int", JOB: "signed char"}


def stub(soname: str, source: str) -> ctypes.CDLL:
    """Load a library of this name, which later ones take their functions from."""
    source = f'extern "C" {{\n{source}int stub;\n}}\n'
    versions = f"{soname} {{ global: *; }};"
    built = compiler.build_library(source, soname, [f"-Wl,-soname,{soname}"], versions)
    return ctypes.CDLL(str(built), ctypes.RTLD_GLOBAL)


def stub_cusolver() -> None:
    """Load a libcusolver.so.12 whose functions are `cusolver`'s, for cupyx._cusolver."""
    source, callbacks = "", {}
    for name, types in FROM_C.items():
        for letter in PREFIXES:
            ours = name.replace("or", "un") if letter in "cz" else name
            symbol = f"cusolverDn{letter.upper()}{ours}"
            words = [WORDS[kind] for kind in (HANDLE, *types)]
            given = ", ".join(f"{word} a{i}" for i, word in enumerate(words))
            passed = ", ".join(f"a{i}" for i in range(len(words)))
            source += f"int (*to_{symbol})({', '.join(words)});\n"
            source += f"int {symbol}({given}) {{ return to_{symbol}({passed}); }}\n"
            kind = ctypes.CFUNCTYPE(ctypes.c_int, HANDLE, *types)
            callbacks[symbol] = kind(_returning_zero(cusolver[letter + ours]))
    library = stub("libcusolver.so.12", source)
    for symbol, callback in callbacks.items():
        address = ctypes.cast(callback, ctypes.c_void_p).value
        ctypes.c_void_p.in_dll(library, f"to_{symbol}").value = address
    _kept.append(callbacks)


_kept: list[Any] = []


def _returning_zero(function: Callable[..., Any]) -> Callable[..., int]:
    def call(*arguments: Any) -> int:
        function(*(0 if argument is None else argument for argument in arguments))
        return 0

    return call


def install() -> None:
    """Put all this where CuPy looks for it."""
    sys.modules[cufft.__name__] = cufft
    stub("libcublas.so.13", "")
    stub_cusolver()
    usual = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_LAZY)  # most of the libraries' functions do not exist
    try:
        for name, functions in (("cublas", cublas), ("cusolver", cusolver)):
            module = importlib.import_module(f"cupy_backends.cuda.libs.{name}")
            capsules.replace(module, partial(_function, name, functions))
        importlib.import_module("cupyx._cusolver")
    finally:
        sys.setdlopenflags(usual)
    from cupy.cuda import thrust

    thrust.sort, thrust.argsort, thrust.lexsort = sort, argsort, lexsort


def _function(library: str, functions: dict[str, Any], name: str) -> Callable[..., Any]:
    def missing(*arguments: Any) -> Any:
        raise NotImplementedError(f"the fake CUDA has no {library}.{name}")

    return functions.get(name, missing)
