"""Operations whose partitioned forms have sums between devices, each in its own way."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from tests.jax.ground import P, error, mesh, needs, program, put, values


def grid(x: Any, *spec: Any) -> Any:
    """An array on a mesh of 4 by 2, sharded over x and y unless said otherwise."""
    return put(x, mesh((4, 2), ("x", "y")), *(spec or ("x", "y")))


@program
def means_and_variances() -> Any:
    x = grid(values((8, 6)))
    f = jax.jit(lambda x: (x.mean(0), x.var(1), x.std(), jnp.median(x, 0), jnp.ptp(x, 0)))
    return f(x), jax.jit(lambda x: jnp.average(x, 0, weights=jnp.abs(x)))(x)


@program
def softmax_and_its_kin() -> Any:
    x = grid(values((8, 6)))
    f = jax.jit(
        lambda x: (
            jax.nn.softmax(x, 0), jax.nn.softmax(x, 1), jax.nn.log_softmax(x),
            jax.nn.logsumexp(x, 0), jax.nn.standardize(x, 0), jnp.linalg.norm(x, axis=1),
        )
    )  # fmt: skip
    return f(x)


@program
def products_in_many_ways() -> Any:
    a, b = grid(values((8, 4))), grid(values((4, 8), seed=1), "y", "x")

    @jax.jit
    def f(a: Any, b: Any) -> Any:
        return (
            a @ b, b @ a, jnp.vdot(a, b.T), jnp.inner(a, b.T),
            jnp.tensordot(a, b, ([0, 1], [1, 0])),
            jnp.einsum("ij,ji->", a, b), jnp.einsum("ij,jk,kl->il", a, b, a), jnp.kron(a, b).sum(0),
            a[:, 0] @ b[0], jnp.trace(a @ b), jnp.outer(a[:, 0], b[0]).sum(1),
        )  # fmt: skip

    return f(a, b)


@program
def batched_products() -> Any:
    over = mesh((2, 2, 2), ("b", "m", "k"))
    a = put(values((4, 6, 8)), over, "b", "m", "k")
    c = put(values((4, 8, 2), seed=1), over, "b", "k", None)
    f = jax.jit(lambda a, c: (a @ c, jnp.einsum("bmk,bkn->mn", a, c), lax.batch_matmul(a, c)))
    return f(a, c)


@program
def attention() -> Any:
    over = mesh((2, 4), ("data", "model"))
    shape = (4, 8, 4, 2)
    q, k, v = (put(values(shape, seed=s), over, "data", None, "model") for s in range(3))

    @jax.jit
    def f(q: Any, k: Any, v: Any) -> Any:
        scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2, -1)
        heads = jnp.einsum("bhqk,bkhd->bqhd", scores, v)
        return heads, heads.sum(2), jax.nn.dot_product_attention(q, k, v).sum(0)

    return f(q, k, v)


@program
def attention_with_a_sharded_sequence() -> Any:
    over = mesh(8, "sequence")
    q, k, v = (put(values((2, 16, 2, 4), seed=s), over, None, "sequence") for s in range(3))
    f = jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True))
    return f(q, k, v)


@program
def convolutions() -> Any:
    over = mesh((4, 2), ("x", "y"))
    images = put(values((4, 8, 8, 4)), over, "x", None, None, "y")
    kernel = put(values((3, 3, 4, 6), seed=1), over, None, None, "y")

    @jax.jit
    def f(images: Any, kernel: Any) -> Any:
        names = ("NHWC", "HWIO", "NHWC")
        found = lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=names)
        return found, found.mean((0, 1, 2))

    grads = jax.jit(jax.grad(lambda w, x: (f(x, w)[0] ** 2).sum()))
    return f(images, kernel), grads(kernel, images)


@program
def convolutions_over_sharded_space() -> Any:
    over = mesh(8, "x")
    images = put(values((2, 16, 6, 3)), over, None, "x")
    kernel = values((3, 3, 3, 2), seed=1)
    names = ("NHWC", "HWIO", "NHWC")
    f = jax.jit(
        lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=names).sum(1)
    )
    return f(images, kernel)


@program
def windows() -> Any:
    x = grid(values((16, 8)))

    @jax.jit
    def f(x: Any) -> Any:
        pooled = lax.reduce_window(x, -np.inf, lax.max, (2, 2), (2, 2), "VALID")
        summed = lax.reduce_window(x, 0.0, lax.add, (3, 1), (1, 1), "SAME")
        return pooled, summed, pooled.sum(), summed.sum(1)

    return f(x)


@program
def running_sums() -> Any:
    x = grid(values((16, 8)))
    f = jax.jit(
        lambda x: (
            jnp.cumsum(x, 0), jnp.cumsum(x, 1), jnp.cumprod(x, 0), lax.cummax(x, 0),
            lax.associative_scan(jnp.add, x, axis=0), lax.cumlogsumexp(x, 1),
        )
    )  # fmt: skip
    return f(x)


@program
def sorting() -> Any:
    x = grid(values((16, 8)))
    f = jax.jit(
        lambda x: (
            jnp.sort(x, 0), jnp.argsort(x, 1), lax.top_k(x, 3), jnp.quantile(x, 0.3, axis=0),
            jnp.unique(jnp.round(x), size=5), jnp.searchsorted(jnp.sort(x[:, 0]), x[0]),
        )
    )  # fmt: skip
    return f(x)


@program
def sums_by_segments() -> Any:
    x = grid(values((16, 4)))
    ids = put(np.arange(16, dtype=np.int32) * 7 % 5, mesh((4, 2), ("x", "y")), "x")
    f = jax.jit(
        lambda x, ids: (
            jax.ops.segment_sum(x, ids, 5), jax.ops.segment_max(x, ids, 5),
            jnp.bincount(ids, x[:, 0], length=5), jnp.histogram(x, 4)[0],
        )
    )  # fmt: skip
    return f(x, ids)


@program
def embeddings() -> Any:
    over = mesh((4, 2), ("x", "y"))
    table = put(values((16, 8)), over, "x", "y")
    ids = put(np.arange(12, dtype=np.int32).reshape(4, 3) * 5 % 16, over, "x")

    @jax.jit
    def f(table: Any, ids: Any) -> Any:
        return table[ids].sum(1), jax.nn.one_hot(ids, 16) @ table

    grads = jax.jit(jax.grad(lambda t, i: (f(t, i)[0] ** 2).sum() + f(t, i)[1].sum()))
    return f(table, ids), grads(table, ids)


@program
def losses() -> Any:
    over = mesh((4, 2), ("data", "model"))
    logits = put(values((8, 6)), over, "data", "model")
    labels = put(np.arange(8, dtype=np.int32) % 6, over, "data")

    @jax.jit
    def f(logits: Any, labels: Any) -> Any:
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
        return -chosen.mean(), (logits.argmax(1) == labels).mean()

    return f(logits, labels), jax.jit(jax.grad(lambda x, y: f(x, y)[0]))(logits, labels)


@program
def normalisation() -> Any:
    over = mesh((2, 4), ("data", "model"))
    x, g = put(values((4, 8)), over, "data", "model"), put(values(8, seed=1), over, "model")

    @jax.jit
    def f(x: Any, g: Any) -> Any:
        layer = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * g
        rms = x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * g
        batch = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)
        return layer, rms, batch

    grads = jax.jit(jax.grad(lambda g, x: sum((y**2).sum() for y in f(x, g))))
    return f(x, g), grads(g, x)


@program
def general_reductions() -> Any:
    x = grid(values((8, 4)))

    @jax.jit
    def f(x: Any) -> Any:
        both = lax.reduce(
            (x, x * 2), (np.float32(0), np.float32(-np.inf)),
            lambda a, b: (a[0] + b[0], lax.max(a[1], b[1])), (0,),
        )  # fmt: skip
        return both, lax.reduce(x, np.float32(1), lax.mul, (0, 1))

    length = jax.jit(
        lambda x: lax.reduce(x, np.float32(0), lambda a, b: lax.sqrt(a * a + b * b), (0,))
    )
    return f(x), error(length, x).partition(" computation")[0]  # XLA:CPU has no such reduction


@program
def selections() -> Any:
    x = grid(values((8, 4)))
    f = jax.jit(
        lambda x: (
            jnp.where(x > 0, x, 0).sum(0), x.sum(0, where=x > 0), jnp.clip(x, -1, 1).sum(),
            jnp.select([x > 1, x < -1], [x, -x]).sum(1), lax.select_n(x > 0, x, -x).mean(),
        )
    )  # fmt: skip
    return f(x)


@program
def masks_of_the_program_are_summed() -> Any:
    # Each device has one row, with zeros by a mask of the program's: no move of data.
    x = put(values((8, 16)), mesh(8, "x"), "x")
    f = jax.jit(
        lambda x: (
            jnp.where(x > 0.1, x, 0).sum(0), jnp.where((jnp.arange(8) < 4)[:, None], x, 0).sum(0),
            jnp.tril(x).sum(0), jax.ops.segment_sum(x, jnp.arange(8) % 3, 3), (x * (x > 0)).sum(0),
        )
    )  # fmt: skip
    return f(x)


@program
def pads_slices_and_rolls() -> Any:
    x = grid(values((8, 4)))
    f = jax.jit(
        lambda x, i: (
            jnp.pad(x, 1).sum(0), jnp.roll(x, 3, 0).sum(1), lax.dynamic_slice(x, (i, 0), (3, 4)),
            lax.dynamic_update_slice(x, x[:2] * 2, (i, 0)).sum(0), jnp.flip(x, 0)[::2],
            jnp.concatenate([x, x[:3]]).sum(0), jnp.stack([x, x]).sum((0, 1)), jnp.tile(x, (2, 1)),
        )
    )  # fmt: skip
    return f(x, 2)


@program
def differences_and_interpolation() -> Any:
    x = grid(values((8, 4)))
    f = jax.jit(
        lambda x: (
            jnp.diff(x, axis=0), jnp.gradient(x, axis=0), jnp.trapezoid(x, axis=0),
            jnp.interp(x[:, 0], jnp.linspace(-2, 2, 8), x[:, 1]), jnp.convolve(x[:, 0], x[0]),
            jnp.corrcoef(x), jnp.cov(x.T), jax.image.resize(x, (4, 8), "linear"),
        )
    )  # fmt: skip
    return f(x)


@program
def polynomials_and_statistics() -> Any:
    x = grid(values((8, 4)))
    f = jax.jit(
        lambda x: (
            jnp.polyval(x, jnp.float32(0.5)), jax.scipy.stats.norm.logpdf(x).sum(),
            jax.scipy.special.logsumexp(x, axis=0, b=jnp.abs(x)), jnp.nanmean(x, 0), jnp.nanvar(x),
        )
    )  # fmt: skip
    return f(x)


@program
def scattering_by_constraints() -> Any:
    over = mesh(8, "x")
    rows = NamedSharding(over, P("x"))
    x, w = put(values((16, 8)), over, None, "x"), put(values((8, 24), seed=1), over, "x")

    @jax.jit
    def f(x: Any, w: Any) -> Any:
        # Each device keeps a part of the sum: a reduce-scatter on other machines.
        return lax.with_sharding_constraint(x @ w, rows).sum(1), lax.with_sharding_constraint(
            x @ w, NamedSharding(over, P(None, "x"))
        )

    return f(x, w)


@program
def one_sum_used_twice() -> Any:
    x = grid(values((8, 4)))
    f = jax.jit(lambda x: (x.sum(0), x.sum(0) * 2, (x / x.sum(0)).sum(0), x.sum(0, keepdims=True)))
    return f(x)


@program
def sums_of_sums() -> Any:
    x = grid(values((8, 4)))

    @jax.jit
    def f(x: Any) -> Any:
        for _ in range(4):
            x = x - x.sum(0) / 8 + x.mean(1, keepdims=True)
        return x, x.sum()

    return f(x)


@program
def many_sums_of_one_program() -> Any:
    x = grid(values((8, 4)))
    f = jax.jit(lambda x: [(jnp.sin(x * k) ** 2).sum(k % 2) for k in range(40)])
    return f(x)


@program
def large_sums() -> Any:
    x = grid(values((64, 1 << 14)))
    f = jax.jit(lambda x: (x.sum(0), (x @ x.T)))
    return f(x)


@program
def complex_numbers() -> Any:
    x = grid(values((8, 4), "complex64"))
    f = jax.jit(
        lambda x: (
            x.sum(0), (x * x.conj()).real.sum(), x @ x.conj().T, jnp.vdot(x, x), jnp.abs(x).sum(1),
            x.imag.mean(), jnp.angle(x).sum(0), x.prod(0),
        )
    )  # fmt: skip
    return f(x)


@program
def scaled_and_ragged_products() -> Any:
    needs("jax.lax.ragged_dot")
    over = mesh(4, "x")
    x = put(values((12, 8)), over, None, "x")
    w = put(values((3, 8, 4), seed=1), over, None, "x")
    sizes = np.array([5, 0, 7], np.int32)
    return jax.jit(lax.ragged_dot)(x, w, sizes)


@program
def barriers() -> Any:
    x = grid(values((8, 4)))

    @jax.jit
    def f(x: Any) -> Any:
        total, x = lax.optimization_barrier((x.sum(0), x))
        return total, (x * total).sum(1)

    return f(x)
