"""Parts of JAX and of its kin that are programs of their own: kernels, solvers, optimizers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.jax.ground import P, mesh, needs_module, program, put, values


def grid(x: Any, *spec: Any) -> Any:
    """An array on a mesh of 4 by 2, sharded over x and y unless said otherwise."""
    return put(x, mesh((4, 2), ("x", "y")), *(spec or ("x", "y")))


@program
def kernels_interpreted_on_each_device() -> Any:
    from jax.experimental import pallas as pl

    over = mesh(8, "x")

    def kernel(x: Any, out: Any) -> None:
        out[...] = x[...] * 2 + 1

    def local(x: Any) -> Any:
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return lax.psum(pl.pallas_call(kernel, out_shape=shape, interpret=True)(x), "x")

    f = jax.shard_map(local, mesh=over, in_specs=P("x"), out_specs=P(), check_vma=False)
    return jax.jit(lambda x: (f(x), f(x).sum(), x.sum(0)))(put(values((8, 4)), over, "x"))


@program
def sparse_matrices() -> Any:
    from jax.experimental import sparse

    dense = values((8, 6)) * (np.abs(values((8, 6), seed=1)) > 1)
    matrix = sparse.BCOO.fromdense(dense)
    x = grid(values((6, 4), seed=2), None, "y")
    f = jax.jit(lambda m, x: ((m @ x).sum(0), m.sum(0).todense()))
    return f(matrix, x)


@program(last_bits=64)
def differential_equations() -> Any:
    from jax.experimental.ode import odeint

    a = grid(values((4, 4)) / 4, None, "y")
    y = put(values(4), mesh((4, 2), ("x", "y")), "x")
    f = jax.jit(lambda a, y: odeint(lambda y, t: a @ y, y, jnp.linspace(0.0, 1, 3), rtol=1e-3))
    return f(a, y)


@program
def taylor_series() -> Any:
    from jax.experimental.jet import jet

    x = grid(values((8, 4)))
    f = jax.jit(lambda x: jet(lambda x: (x**2).sum(0), (x,), ((jnp.ones_like(x), x),)))
    return f(x)


@program(last_bits=1024)
def minimization() -> Any:
    from jax.scipy.optimize import minimize

    a = values((4, 4))
    a = grid(a @ a.T + 4 * np.eye(4, dtype=np.float32))
    f = jax.jit(
        lambda a: (
            minimize(
                lambda v: v @ a @ v - v.sum(), jnp.zeros(4), method="BFGS", options={"maxiter": 3}
            ).x
        )
    )
    return f(a)


@program
def example_optimizers() -> Any:
    from jax.example_libraries import optimizers

    init, update, weights = optimizers.adam(0.1)
    x = grid(values((8, 4)), "x")
    state = init(grid(values((4, 4), seed=1), None, "y"))

    @jax.jit
    def step(i: Any, state: Any, x: Any) -> Any:
        grads = jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(weights(state))
        return update(i, optimizers.clip_grads(grads, 1.0), state)

    for i in range(3):
        state = step(i, state, x)
    return weights(state)


@program
def example_layers() -> Any:
    from jax.example_libraries import stax

    init, apply = stax.serial(stax.Dense(8), stax.Relu, stax.Dense(4), stax.LogSoftmax)
    _, params = init(jax.random.key(0), (-1, 4))
    x = grid(values((8, 4)), ("x", "y"))
    f = jax.jit(lambda params, x: -apply(params, x)[:, 0].mean())
    return f(params, x), jax.jit(jax.grad(f))(params, x)


@program
def special_functions_and_signals() -> Any:
    x = grid(values((8, 4)))
    f = jax.jit(
        lambda x: (
            jax.scipy.special.erf(x).sum(0), jax.scipy.signal.convolve(x, x[:2, :2]).sum(1),
            jax.scipy.stats.multivariate_normal.logpdf(x, jnp.zeros(4), jnp.eye(4)).sum(),
            jax.nn.gelu(x).mean(), jax.scipy.cluster.vq.vq(x, x[:3])[1].sum(),
        )
    )  # fmt: skip
    return f(x)


@program(last_bits=64)
def optax_optimizers() -> Any:
    needs_module("optax")
    import optax

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))
    w, x = grid(values((4, 4)), None, "y"), grid(values((8, 4), seed=1), "x")
    state = jax.jit(optimizer.init)(w)

    @jax.jit
    def step(w: Any, state: Any, x: Any) -> Any:
        grads = jax.grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)
        updates, state = optimizer.update(grads, state, w)
        return optax.apply_updates(w, updates), state

    for _ in range(3):
        w, state = step(w, state, x)
    return w


@program(last_bits=64)
def flax_modules() -> Any:
    needs_module("flax")
    from flax import linen

    class Model(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            x = linen.relu(linen.Dense(8)(x))
            return linen.Dense(2)(linen.LayerNorm()(x))

    model, x = Model(), grid(values((8, 4)), ("x", "y"))
    params = model.init(jax.random.key(0), x)
    return jax.jit(jax.grad(lambda p, x: (model.apply(p, x) ** 2).mean()))(params, x)
