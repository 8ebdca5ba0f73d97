"""The types of values in shard_map: varying, reduced and unreduced over axes, or unchecked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from tests.jax.ground import P, error, mesh, needs, program, put, values

Function = Callable[..., Any]


def under(shape: Any, names: Any) -> Callable[[Function], Function]:
    """Run a program with an explicit mesh, which it is given."""

    def decorate(function: Function) -> Function:
        def run() -> Any:
            needs("jax.set_mesh", "jax.sharding.reshard", "jax.lax.pcast")
            over = mesh(shape, names, explicit=True)
            with jax.set_mesh(over):
                return function(over)

        run.__name__, run.__module__ = function.__name__, function.__module__
        return run

    return decorate


def place(x: Any, *spec: Any, **kinds: Any) -> Any:
    """An array on the mesh that is set."""
    return jax.device_put(x, P(*spec, **kinds))


def parts(x: Any) -> list[Any]:
    """Each device's part of an array; addends of an unreduced one."""
    return [shard.data for shard in x.addressable_shards]


@program
@under((2, 2), ("x", "y"))
def unreduced_products(over: Any) -> Any:
    a, b = place(values((8, 4)), "x", "y"), place(values((4, 6), seed=1), "y", None)

    @jax.jit
    @partial(jax.shard_map, out_specs=P("x", None, unreduced={"y"}))
    def f(a: Any, b: Any) -> Any:
        return lax.pcast(a @ b, "y", to="unreduced")

    def loss(a: Any, b: Any) -> Any:
        return (jax.sharding.reshard(f(a, b), P("x", None)) ** 2).sum()

    c = f(a, b)
    known = parts(c), str(c.sharding), jax.sharding.reshard(c, P("x", None))
    return known, loss(a, b), jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(a, b)


@program
@under((2, 1), ("x", "y"))
def unreduced_over_the_whole(over: Any) -> Any:
    a, b = place(values((8, 4)), None, "x"), place(values((4, 6), seed=1), "x", None)

    @jax.jit
    @partial(jax.shard_map, out_specs=P(unreduced={"x"}))
    def f(a: Any, b: Any) -> Any:
        return lax.pcast(a @ b, "x", to="unreduced")

    c = f(a, b)
    return parts(c), str(c.sharding), jax.jit(lambda c: jax.sharding.reshard(c, P()))(c)


@program
@under((2, 2, 2), ("x", "y", "z"))
def unreduced_einsum_beside_sums(over: Any) -> Any:
    a, b = place(values((8, 4)), "x", "y"), place(values((4, 6), seed=1), "y", None)
    spec = P("x", None, unreduced={"y"})

    @jax.jit
    def f(a: Any, b: Any) -> Any:
        c = jnp.einsum("ij,jk->ik", a, b, out_sharding=spec)
        return c, jax.sharding.reshard(c + c, P("x", None)), a.sum(0), b.max()

    @jax.jit
    def g(c: Any, a: Any) -> Any:
        return c + c, jax.sharding.reshard(c, P("x", "y")), a.sum()

    c, whole, sums, most = f(a, b)
    twice, again, total = g(c, a)
    return parts(c), whole, sums, most, parts(twice), again, total, str(twice.sharding)


@program
@under((4,), ("x",))
def sums_and_scattered_sums_of_the_unreduced(over: Any) -> Any:
    a, b = place(values((8, 8)), None, "x"), place(values((8, 6), seed=1), "x", None)
    whole = jax.shard_map(lambda c: lax.psum(c, "x"), in_specs=P(unreduced={"x"}), out_specs=P())
    rows = jax.shard_map(
        lambda c: lax.psum_scatter(c, "x", tiled=True),
        in_specs=P(unreduced={"x"}), out_specs=P("x", None),
    )  # fmt: skip

    def loss(reduce: Any, a: Any, b: Any) -> Any:
        c = jnp.einsum("ij,jk->ik", a, b, out_sharding=P(unreduced={"x"}))
        return (jnp.tanh(reduce(c)) ** 2).sum()

    return [
        jax.jit(jax.value_and_grad(partial(loss, reduce), argnums=(0, 1)))(a, b)
        for reduce in (whole, rows)
    ]


@program
@under((2, 2), ("data", "seq"))
def weights_sharded_and_gathered_as_reduced(over: Any) -> Any:
    x, w = place(values((8, 4, 2)), "data", "seq", None), place(values((2, 6)), "seq", None)
    reduced = jax.shard_map(
        lambda a: lax.pcast(a, "data", to="reduced"),
        in_specs=P("seq", None), out_specs=P("seq", None, reduced={"data"}),
    )  # fmt: skip
    gathered = jax.shard_map(
        lambda a: lax.all_gather(a, "seq", tiled=True, to="reduced"),
        in_specs=P("seq", None, reduced={"data"}),
        out_specs=P(None, None, reduced={"seq", "data"}),
    )

    def loss(x: Any, w: Any) -> Any:
        return jnp.sin(jnp.einsum("btd,df->btf", x, gathered(reduced(w)))).sum()

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, w)


@program
@under((2, 2), ("data", "seq"))
def gradients_unreduced_in_two_steps(over: Any) -> Any:
    x, w = place(values((8, 4, 2)), "data", "seq", None), place(values((2, 6)), "seq", None)
    gathered = jax.shard_map(
        lambda a: lax.all_gather(a, "seq", tiled=True, to="reduced"),
        in_specs=P("seq", None), out_specs=P(None, None, reduced={"seq"}),
    )  # fmt: skip
    scattered = jax.shard_map(
        lambda a: lax.psum_scatter(a, "seq", tiled=True),
        in_specs=P(unreduced={"data", "seq"}), out_specs=P("seq", None, unreduced={"data"}),
    )  # fmt: skip
    summed = jax.shard_map(
        lambda a: lax.psum(a, "data"),
        in_specs=P("seq", None, unreduced={"data"}), out_specs=P("seq", None),
    )  # fmt: skip

    @jax.custom_vjp
    def f(x: Any, w: Any) -> Any:
        return jnp.einsum("btd,df->btf", x, gathered(w))

    def backward(saved: Any, g: Any) -> Any:
        x, w = saved
        spec = P(None, None, unreduced={"data", "seq"})
        of_w = jnp.einsum("btd,btf->df", x, g, out_sharding=spec)
        of_x = jnp.einsum("btf,df->btd", g, w, out_sharding=P("data", "seq", None))
        return of_x, summed(scattered(of_w))

    f.defvjp(lambda x, w: (f(x, w), (x, w)), backward)
    return jax.jit(jax.value_and_grad(lambda x, w: jnp.sin(f(x, w)).sum(), argnums=(0, 1)))(x, w)


@program
@under((2, 2), ("x", "y"))
def reduced_weights_that_vary_by_themselves(over: Any) -> Any:
    x = place(values((4, 2)), "x", "y")
    w = place(values((2, 6), seed=1), "y", None, reduced={"x"})

    @jax.jit
    @partial(jax.shard_map, out_specs=P("x", None))
    def f(x: Any, w: Any) -> Any:
        return lax.psum(x @ w, "y")

    value, (of_x, of_w) = jax.jit(
        jax.value_and_grad(lambda x, w: (f(x, w) ** 2).sum(), argnums=(0, 1))
    )(x, w)
    return value, of_x, parts(of_w), str(of_w.sharding), jax.sharding.reshard(of_w, P("y", None))


@program
@under((2,), ("x",))
def reduced_weights_in_another_type(over: Any) -> Any:
    x, y = (place(values((32, 8), jnp.bfloat16, seed=k), "x", None) for k in (0, 1))
    w = place(values((8, 8)), None, None, reduced={"x"})
    dot = jax.shard_map(lambda x, w: x @ w.astype(x.dtype), out_specs=P("x", None))
    loss = lambda x, w, y: jnp.mean(jnp.sum((dot(x, w) - y) ** 2, -1))  # noqa: E731
    value, of_w = jax.jit(jax.value_and_grad(loss, argnums=1))(x, w, y)
    return value, parts(of_w), str(of_w.sharding), jax.sharding.reshard(of_w, P())


@program
@under((2,), ("x",))
def one_operand_sharded_and_one_reduced(over: Any) -> Any:
    x, y = place(values(16), "x"), place(values(8, seed=1), None, reduced={"x"})
    found = []
    for function in (lax.mul, lax.add):
        summed = jax.shard_map(
            lambda x, y, function=function: lax.psum(function(x, y), "x"), out_specs=P()
        )
        kept = jax.shard_map(function, out_specs=P("x"))
        for f in (summed, kept):
            loss = lambda x, y, f=f: (f(x, y) ** 2).sum()  # noqa: E731
            of_x, of_y = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, y)
            found += [f(x, y), of_x, parts(of_y), jax.sharding.reshard(of_y, P())]
    return found


@program
@under((2,), ("x",))
def products_of_unreduced_and_reduced(over: Any) -> Any:
    u = jax.sharding.reshard(place(values(8)), P(unreduced={"x"}))
    r = place(values(8, seed=1), reduced={"x"})

    @jax.jit
    @partial(jax.shard_map, out_specs=P(unreduced={"x"}))
    def f(u: Any, r: Any) -> Any:
        return (u * r).sum()

    of_u, of_r = jax.jit(jax.grad(f, argnums=(0, 1)))(u, r)
    return parts(f(u, r)), of_u, parts(of_r), str(of_u.sharding), str(of_r.sharding)


@program
@under((2,), ("x",))
def eager_maps_with_reduced_and_unreduced(over: Any) -> Any:
    x = place(values(8), "x")
    gathered = jax.shard_map(
        lambda x: lax.all_gather(x, "x", tiled=True, to="reduced"), out_specs=P(reduced={"x"})
    )
    added = jax.shard_map(lambda x: lax.pcast(x, "x", to="unreduced"), out_specs=P(unreduced={"x"}))
    u = jax.sharding.reshard(place(values(8)), P(unreduced={"x"}))
    scattered = jax.shard_map(lambda x: lax.psum_scatter(x, "x", tiled=True), out_specs=P("x"))
    return [
        gathered(x),
        jax.grad(lambda x: (gathered(x) * gathered(x)).sum())(x),
        parts(added(x)),
        jax.sharding.reshard(added(x), P()),
        jax.grad(lambda x: added(x).sum())(x),
        scattered(u),
        jax.grad(lambda u: scattered(u).sum())(u),
    ]


@program
@under((2,), ("x",))
def transposes_that_are_unreduced(over: Any) -> Any:
    a, b = place(values((2, 4)), reduced={"x"}), place(values((2, 6), seed=1), None, "x")
    f = jax.shard_map(lambda a, b: a.T @ b, out_specs=P(None, "x"))
    value, (of_a, of_b) = jax.jit(
        jax.value_and_grad(lambda a, b: jnp.tanh(f(a, b)).sum(), argnums=(0, 1))
    )(a, b)
    spread = jax.shard_map(lambda x: lax.pcast(x, "x", to="varying"), out_specs=P("x"))
    of_x = jax.jit(jax.grad(lambda x: (spread(x) ** 3).sum()))(place(values(8), reduced={"x"}))
    return value, parts(of_a), of_b, parts(of_x), jax.sharding.reshard(of_x, P())


@program
@under((2, 2), ("x", "y"))
def sums_of_reduced_values(over: Any) -> Any:
    @partial(jax.shard_map, out_specs=P(reduced={"y"}))
    def f(x: Any) -> Any:
        row = lax.all_gather(x, "y", axis=1, tiled=True, to="reduced")
        return lax.psum(jnp.sum(row), "x")

    x = place(values((8, 4)), "x", "y")
    return jax.jit(jax.value_and_grad(f))(x), str(jax.jit(f)(x).sharding)


@program
@under((2,), ("x",))
def casts_without_checks(over: Any) -> Any:
    whole, sharded = place(values(8)), place(values(4), "x")
    as_addends = [
        jax.jit(
            jax.shard_map(lambda x: x, in_specs=spec, out_specs=P(unreduced={"x"}), check_vma=False)
        )
        for spec in (P(), P("x"))
    ]
    u, v = as_addends[0](whole), as_addends[1](sharded)
    back = jax.jit(lambda u: jax.sharding.reshard(u, P()))
    loss = lambda x: (jax.sharding.reshard(as_addends[1](x), P()) ** 2).sum()  # noqa: E731
    return parts(u), parts(v), v.shape, back(u), back(v), jax.jit(jax.grad(loss))(sharded)


@program
def casts_between_types() -> Any:
    needs("jax.lax.pcast")
    over = mesh((2, 2), ("x", "y"))
    seen: list[str] = []

    @partial(jax.shard_map, mesh=over, in_specs=(P("x"), P()), out_specs=P(("x", "y")))
    def f(x: Any, s: Any) -> Any:
        t = lax.pcast(s, ("x", "y"), to="varying")
        u = lax.psum(x * 2, "x")
        v = lax.pcast(u, ("x", "y"), to="varying")
        seen.extend(str(jax.typeof(each)) for each in (x, s, t, u, v))
        return lax.pcast(x, "y", to="varying") + t + v + lax.psum(v, "y")

    x, s = put(values((4, 3)), over, "x"), put(values(3, seed=1), over)
    found = jax.jit(lambda x, s: (f(x, s), f(x, s).sum(0), x.sum()))(x, s)
    return found, seen, jax.jit(jax.grad(lambda x, s: (f(x, s) ** 2).sum(), argnums=(0, 1)))(x, s)


@program
def sums_that_transpose_to_casts() -> Any:
    over = mesh(4, "x")

    def names(f: Any, x: Any, g: Any) -> list[str]:
        backward = jax.make_jaxpr(jax.vjp(f, x)[1])(g)
        return [str(each.primitive) for each in backward.eqns[0].params["jaxpr"].eqns]

    maps = partial(jax.shard_map, mesh=over)
    total = lambda x: lax.psum(x, "x")  # noqa: E731
    x, g = jnp.arange(4.0), jnp.ones(1)
    return [
        names(maps(lambda x: x, in_specs=P(), out_specs=P("x")), g, x),
        names(maps(total, in_specs=P("x"), out_specs=P()), x, g),
        names(maps(total, in_specs=P("x"), out_specs=P("x")), x, x),
    ]


@program
def replicated_sums_without_checks() -> Any:
    over = mesh((4, 2), ("x", "y"))

    @partial(jax.shard_map, mesh=over, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=False)
    def f(x: Any, w: Any) -> Any:
        return x * lax.psum(x, "x") + w * lax.pmean(x, ("x", "y")).sum()

    x, w = put(values((8, 3)), over, "x"), put(values(3, seed=1), over)
    loss = lambda x, w: (f(x, w) ** 2).mean()  # noqa: E731
    return jax.jit(f)(x, w), jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(x, w)


@program
def shardings_of_results_by_their_types() -> Any:
    over = mesh((2, 2, 2), ("x", "y", "z"))
    specs = [P(), P("x"), P(("y", "x")), P("z", "x"), P(None, ("z", "y")), P(("x", "y", "z"))]
    x = values((8, 8))
    found = []
    for spec in specs:
        f = jax.shard_map(lambda a: a - lax.pmean(a.sum(), ("x", "y", "z")),
                          mesh=over, in_specs=spec, out_specs=spec, check_vma=False)  # fmt: skip
        result = jax.jit(lambda x, f=f: (f(x), f(x).sum(0)))(
            jax.device_put(x, NamedSharding(over, spec))
        )
        found.append((result, str(result[0].sharding.spec)))
    return found


@program
def refused_types() -> Any:
    needs("jax.lax.pcast")
    over = mesh((2, 2), ("x", "y"))
    x = values((8, 4))
    maps = partial(jax.shard_map, mesh=over)
    double = lambda x: 2 * x  # noqa: E731
    swap = lambda c, _: (c[::-1], None)  # noqa: E731
    return [
        error(maps(double, in_specs=P("x", "y"), out_specs=P(None, "y")), x),
        error(jax.jit(maps(double, in_specs=P("x", "y"), out_specs=P())), x),
        error(maps(lambda x: lax.psum(x, "x"), in_specs=P("x", "y"), out_specs=P()), x),
        error(
            maps(lambda x, y: lax.scan(swap, (x, y), length=2)[0][0],
                 in_specs=(P("x"), P()), out_specs=P("x")), x, x[:4],
        ),
        error(
            maps(lambda x, y: lax.cond(True, lambda x, y: x, lambda x, y: y, x, y),
                 in_specs=(P("x"), P("y")), out_specs=P(("x", "y"))), x, x,
        ),
    ]  # fmt: skip
