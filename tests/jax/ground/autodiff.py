"""Derivatives of sharded programs: their sums are inserted in the transposed program too."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from tests.jax.ground import P, compilations, mesh, needs, program, put, values


def layer() -> tuple[Any, Any, Any]:
    """Weights over a model axis, a batch over a data axis, and targets."""
    over = mesh((4, 2), ("data", "model"))
    w = put(values((6, 4)), over, None, "model")
    x = put(values((8, 6), seed=1), over, "data", None)
    return w, x, put(values((8, 4), seed=2), over, "data", "model")


def loss(w: Any, x: Any, y: Any) -> Any:
    """The mean squared error of one layer."""
    return ((jnp.tanh(x @ w) - y) ** 2).mean()


@program
def gradients() -> Any:
    return jax.jit(jax.grad(loss))(*layer()), jax.jit(jax.value_and_grad(loss, (0, 1)))(*layer())


@program
def gradients_outside_of_jit() -> Any:
    f = jax.jit(loss)
    return jax.grad(f)(*layer()), jax.value_and_grad(f, (1, 2))(*layer())


@program
def second_derivatives() -> Any:
    w, x, y = layer()
    hvp = jax.jit(lambda w, v, x, y: jax.jvp(jax.grad(lambda w: loss(w, x, y)), (w,), (v,))[1])
    hessian = jax.jit(lambda b, w, x, y: jax.hessian(lambda b: loss(w, x + b, y))(b))
    return hvp(w, jnp.ones_like(w), x, y), hessian(jnp.ones(6), w, x, y)


@program
def jacobians() -> Any:
    w, x, _ = layer()
    f = lambda w, x: jnp.tanh(x @ w).sum(0)  # noqa: E731
    return [
        g(w, x) for g in (jax.jit(jax.jacrev(f)), jax.jit(jax.jacfwd(f)), jax.jacrev(jax.jit(f)))
    ]


@program
def forward_mode() -> Any:
    w, x, y = layer()
    f = jax.jit(lambda w, x: loss(w, x, y))
    found, tangent = jax.jvp(f, (w, x), (jnp.ones_like(w), jnp.ones_like(x)))
    linear = jax.linearize(f, w, x)[1]
    return found, tangent, linear(w, x), jax.jit(lambda w, x: jax.jvp(f, (w, x), (w, x)))(w, x)


@program
def vjp_functions_kept() -> Any:
    w, x, _ = layer()
    out, back = jax.vjp(jax.jit(lambda w, x: jnp.tanh(x @ w).sum(0)), w, x)
    return out, back(jnp.ones_like(out)), back(out)


@program
def linear_transposes() -> Any:
    _, x, _ = layer()
    f = jax.jit(lambda w: x @ w)
    transposed = jax.linear_transpose(f, jax.ShapeDtypeStruct((6, 4), jnp.float32))
    return transposed(values((8, 4))), jax.jit(transposed)(values((8, 4)))


@program
def checkpoints() -> Any:
    w, x, y = layer()
    policies = (
        None, jax.checkpoint_policies.everything_saveable, jax.checkpoint_policies.dots_saveable,
        jax.checkpoint_policies.nothing_saveable,
    )  # fmt: skip

    def deep(w: Any, x: Any, y: Any, policy: Any) -> Any:
        step = jax.checkpoint(lambda h: jnp.tanh(h - h.mean(0) + (x @ w).sum()), policy=policy)
        h = x @ w
        for _ in range(3):
            h = step(h)
        return (h * y).sum()

    return [jax.jit(jax.grad(partial(deep, policy=policy)))(w, x, y) for policy in policies]


@program
def checkpoints_in_scans() -> Any:
    w, _, y = layer()
    ws = jnp.stack([w.T @ w * s for s in (0.1, 0.2, 0.3)])

    def f(ws: Any, y: Any) -> Any:
        step = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w) - h.mean(), None), prevent_cse=False)
        return (lax.scan(step, y, ws)[0] ** 2).sum()

    return jax.jit(jax.value_and_grad(f))(ws, y)


@program
def named_checkpoints() -> Any:
    from jax.ad_checkpoint import checkpoint_name

    w, x, y = layer()
    policy = jax.checkpoint_policies.save_only_these_names("total")

    @partial(jax.checkpoint, policy=policy)
    def f(w: Any, x: Any, y: Any) -> Any:
        total = checkpoint_name((x @ w).sum(0), "total")
        return (jnp.sin(total) * y).sum()

    return jax.jit(jax.grad(f))(w, x, y)


@program
def gradients_through_scans() -> Any:
    w, x, _ = layer()
    square = w.T @ w

    def f(square: Any, x: Any) -> Any:
        h, totals = lax.scan(lambda h, _: (jnp.tanh(h @ square), h.sum()), x @ w, length=4)
        return h.sum() + (totals**2).mean()

    return jax.jit(jax.value_and_grad(f, (0, 1)))(square, x)


@program
def gradients_through_loops_and_branches() -> Any:
    w, x, _ = layer()

    def f(w: Any, x: Any, n: Any) -> Any:
        h = lax.cond(n > 2, lambda: x @ w, lambda: -(x @ w))
        return lax.fori_loop(0, 3, lambda _, h: jnp.tanh(h - h.mean(0)), h).sum()

    forward = jax.jit(lambda w, x: jax.jvp(lambda w: f(w, x, 3), (w,), (w,)))
    return jax.jit(jax.grad(f))(w, x, 1), forward(w, x)


@program
def custom_vjps() -> Any:
    w, x, y = layer()

    @jax.custom_vjp
    def clipped(h: Any) -> Any:
        return h

    def forward(h: Any) -> Any:
        return h, jnp.sqrt((h**2).sum())

    def backward(norm: Any, g: Any) -> Any:
        return (g / jnp.maximum(1, jnp.sqrt((g**2).sum()) + norm),)

    clipped.defvjp(forward, backward)
    return jax.jit(jax.value_and_grad(lambda w, x, y: (clipped(x @ w) * y).sum()))(w, x, y)


@program
def custom_jvps() -> Any:
    w, x, _ = layer()

    @jax.custom_jvp
    def norm(h: Any) -> Any:
        return jnp.sqrt((h**2).sum())

    @norm.defjvp
    def derivative(primals: Any, tangents: Any) -> Any:
        (h,), (t,) = primals, tangents
        return norm(h), (h * t).sum() / norm(h)

    f = lambda w, x: norm(x @ w)  # noqa: E731
    return jax.jit(jax.grad(f))(w, x), jax.jit(lambda w, x: jax.jvp(f, (w, x), (w, x)))(w, x)


@program
def custom_gradients() -> Any:
    w, x, _ = layer()

    @jax.custom_gradient
    def f(w: Any, x: Any) -> Any:
        total = (x @ w).sum(0)
        return total, lambda g: ((x.T @ jnp.broadcast_to(g, (8, 4))) * 2, jnp.zeros_like(x))

    return jax.jit(jax.grad(lambda w, x: (f(w, x) ** 2).sum()))(w, x)


@program
def gradients_of_each_example() -> Any:
    w, x, y = layer()
    each = jax.jit(jax.vmap(jax.grad(lambda w, x, y: ((x @ w - y) ** 2).sum()), (None, 0, 0)))
    grads = each(w, x, y)
    norms = jax.jit(lambda w, x, y: jax.vmap(jnp.linalg.norm)(each(w, x, y)).sum())
    return grads, grads.mean(0), norms(w, x, y)


@program
def vmap_with_an_axis_of_the_mesh() -> Any:
    w, x, y = layer()
    f = jax.grad(lambda w, x, y: ((jnp.tanh(x @ w) - y) ** 2).mean())
    return jax.jit(jax.vmap(f, (None, 0, 0), spmd_axis_name="data"))(w, x, y)


@program
def vmap_of_many_gradients() -> Any:
    w, x, y = layer()
    ws = jnp.stack([w, 2 * w, -w])
    return jax.jit(jax.vmap(jax.value_and_grad(loss), (0, None, None)))(ws, x, y)


@program
def gradients_of_constraints() -> Any:
    over = mesh((4, 2), ("x", "y"))

    def f(x: Any) -> Any:
        y = lax.with_sharding_constraint(jnp.sin(x), NamedSharding(over, P("x")))
        z = lax.with_sharding_constraint(y.T @ y, NamedSharding(over, P("y", "x")))
        return (z * z).sum()

    return jax.jit(jax.grad(f))(values((8, 4))), jax.grad(f)(put(values((8, 4)), over, "y"))


@program
def gradients_of_device_put() -> Any:
    first, second = mesh(4, "x"), mesh(4, "x", order=(4, 5, 6, 7))

    def f(x: Any) -> Any:
        y = jax.jit(lambda x: x**2)(x)
        y = jax.device_put(y, NamedSharding(second, P("x")))
        return jax.jit(lambda y: (y - y.mean(0)) ** 3)(y).sum()

    x = put(values((8, 2)), first, "x")
    return f(x), jax.grad(f)(x)


@program
def gradients_of_embeddings() -> Any:
    over = mesh((4, 2), ("data", "model"))
    table = put(values((10, 4)), over, None, "model")
    ids = put(np.arange(16, dtype=np.int32).reshape(8, 2) * 3 % 10, over, "data")
    f = jax.jit(jax.grad(lambda t, ids: (t[ids].mean(1) ** 2).sum()))
    return f(table, ids)


@program
def gradients_of_sharded_softmax() -> Any:
    over = mesh((2, 4), ("data", "vocabulary"))
    logits = put(values((4, 8)), over, "data", "vocabulary")
    labels = put(np.array([0, 3, 7, 5], np.int32), over, "data")

    def f(x: Any, y: Any) -> Any:
        return -jnp.take_along_axis(jax.nn.log_softmax(x), y[:, None], 1).mean()

    return jax.jit(jax.value_and_grad(f))(logits, labels)


@program
def gradients_of_extremes() -> Any:
    over = mesh((4, 2), ("x", "y"))
    x = put(values((8, 4)), over, "x", "y")
    f = jax.jit(jax.grad(lambda x: (x.max(0) ** 2).sum() + x.min() * 3 + jnp.sort(x, 0)[2].sum()))
    return f(x)


@program
def gradients_in_bfloat16() -> Any:
    w, x, y = (each.astype(jnp.bfloat16) for each in layer())
    return jax.jit(jax.value_and_grad(loss))(w, x, y)


@program
def gradients_of_complex_numbers() -> Any:
    over = mesh((4, 2), ("x", "y"))
    z = put(values((8, 4), "complex64"), over, "x", "y")
    f = lambda z: (jnp.abs(z.sum(0)) ** 2).sum()  # noqa: E731
    g = jax.jit(jax.grad(lambda z: z.sum() ** 2, holomorphic=True))
    return jax.jit(jax.grad(f))(z), g(z)


@program
def gradients_are_compiled_once() -> Any:
    w, x, y = layer()
    f = jax.jit(jax.value_and_grad(loss))
    f(w, x, y)
    with compilations() as count:
        found = [f(w, x, y), f(w, x * 1, y)]
    return found, count[0] <= 1


@program
def accumulated_gradients() -> Any:
    w, x, y = layer()

    @jax.jit
    def f(w: Any, x: Any, y: Any) -> Any:
        def step(total: Any, part: Any) -> Any:
            return jax.tree.map(jnp.add, total, jax.grad(loss)(w, *part)), None

        parts = x.reshape(2, 4, 6), y.reshape(2, 4, 4)
        return lax.scan(step, jnp.zeros_like(w), parts)[0]

    return f(w, x, y)


@program
def stopped_gradients() -> Any:
    w, x, y = layer()
    f = jax.jit(jax.grad(lambda w, x: (lax.stop_gradient((x @ w).mean(0)) * (x @ w)).sum()))
    return f(w, x), jax.jit(jax.grad(lambda x: (x.sum() * lax.stop_gradient(x)).mean()))(y)


@program
def forward_and_backward_apart() -> Any:
    needs("jax.fwd_and_bwd")
    w, x, y = layer()
    forward, backward = jax.fwd_and_bwd(loss, argnums=0)
    out, kept = jax.jit(forward)(w, x, y)
    return out, jax.jit(backward)(kept, jnp.float32(1))


@program
def implicit_differentiation() -> Any:
    over = mesh((4, 2), ("x", "y"))
    a = values((8, 8))
    a, b = put(a @ a.T + 8 * np.eye(8, dtype=np.float32), over, "x", "y"), put(values(8), over, "x")

    def f(a: Any, b: Any) -> Any:
        solve = lambda matvec, b: jax.scipy.sparse.linalg.cg(matvec, b, maxiter=30)[0]  # noqa: E731
        return lax.custom_linear_solve(lambda v: a @ v, b, solve, symmetric=True).sum()

    return jax.jit(jax.value_and_grad(f, (0, 1)))(a, b)
