"""Programs with control flow and dynamic slices, in the common dialect of JAX and gpusim."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from gpusim import lax

REPLICAS = 4
NUMPY = SimpleNamespace(lax=lax, xp=np)

rng = np.random.default_rng(3)
X = rng.standard_normal((REPLICAS, 5))
N = np.array([2, 0, 5, 3])


# Each program gets its own row x, its own integer n and the dialect: (d, x, n) -> a pytree.


def sums_up(d: Any, x: Any, n: Any) -> Any:
    return d.lax.fori_loop(0, 5, lambda i, s: s + i * x, 0 * x)


def loops_to_its_own_bound(d: Any, x: Any, n: Any) -> Any:
    return d.lax.fori_loop(1, n + 1, lambda i, s: (s[0] + i, s[1] * x), (n, x))


def loops_from_its_own_bound(d: Any, x: Any, n: Any) -> Any:
    return d.lax.fori_loop(n, n.astype(np.int64) * 0 + 4, lambda i, s: s + i, n)


def goes_round_the_ring(d: Any, x: Any, n: Any) -> Any:
    ring = [(i, (i + 1) % REPLICAS) for i in range(REPLICAS)]

    def hop(i: Any, carry: Any) -> Any:
        total, block = carry
        return total + block * (i + 1), d.lax.ppermute(block, "i", ring)

    return d.lax.fori_loop(0, REPLICAS, hop, (0 * x, x))


def a_python_number_takes_the_dtype(d: Any, x: Any, n: Any) -> Any:
    return d.lax.fori_loop(0, 3, lambda i, s: s + x[i].astype(np.float32), 0)


def doubles_until_all_are_large(d: Any, x: Any, n: Any) -> Any:
    return d.lax.while_loop(
        lambda x: d.lax.pmin(d.xp.max(x), "i") < 10, lambda x: 2 * x + 1, d.xp.abs(x)
    )


def doubles_until_large(d: Any, x: Any, n: Any) -> Any:
    def body(state: Any) -> Any:
        steps, x = state
        return {"steps": steps["steps"] + 1}, 2 * x + 0.5

    return d.lax.while_loop(
        lambda s: d.xp.sum(s[1] ** 2) < 100, body, ({"steps": n * 0}, d.xp.abs(x))
    )


def collatz(d: Any, x: Any, n: Any) -> Any:
    def step(state: Any) -> Any:
        m, count = state
        return d.lax.cond(m % 2 == 0, lambda m: m // 2, lambda m: 3 * m + 1, m), count + 1

    return d.lax.while_loop(lambda s: s[0] != 1, step, (n + 1, 0))


def branches(d: Any, x: Any, n: Any) -> Any:
    return d.lax.cond(
        n > 2, lambda x, y: {"a": x + y, "b": 1.0}, lambda x, y: {"a": x * y, "b": x[0]}, x, x[::-1]
    )


def branches_on_what_all_have(d: Any, x: Any, n: Any) -> Any:
    total = d.lax.psum(n, "i")
    return d.lax.cond(total > 3, lambda x: d.lax.psum(x, "i"), lambda x: -x, operand=x)


def switches(d: Any, x: Any, n: Any) -> Any:
    cases = [lambda x: x, lambda x: -x, lambda x: x * x]
    return d.lax.switch(n - 1, cases, x), d.lax.switch(7, cases, x), d.lax.switch(n, cases[1:2], x)


def scans(d: Any, x: Any, n: Any) -> Any:
    def step(carry: Any, row: Any) -> Any:
        carry = 0.5 * carry + row["x"] * row["k"]
        return carry, (carry, row["k"])

    return d.lax.scan(step, n * 1.0, {"x": x, "k": np.arange(5)})


def scans_back(d: Any, x: Any, n: Any) -> Any:
    return d.lax.scan(lambda c, x: (c + x, (c, None, 2)), 0.0, x, reverse=True, unroll=2)


def scans_nothing(d: Any, x: Any, n: Any) -> Any:
    return d.lax.scan(lambda c, x: (c * 2, {"y": c[:2] + x}), x, x[:0])


def scans_by_length(d: Any, x: Any, n: Any) -> Any:
    def step(v: Any, _: Any) -> Any:
        v = v / d.lax.psum(d.xp.sum(v**2), "i")
        return v, d.lax.axis_index("i") + v[0]

    return d.lax.scan(step, x, length=3)


def maps(d: Any, x: Any, n: Any) -> Any:
    return d.lax.map(lambda row: (row[0] * x, row[1] + n), (x, np.arange(5)))


def selects(d: Any, x: Any, n: Any) -> Any:
    return d.lax.select(x > 0, x, -2 * x), d.lax.select(n > 2, x, 0 * x)


def slices(d: Any, x: Any, n: Any) -> Any:
    table = d.xp.outer(x[:4], d.xp.concatenate([x, x[:1]]))
    dl = d.lax
    return (
        dl.dynamic_slice(x, (n,), (3,)),
        dl.dynamic_slice(x, (n - 4,), (2,)),
        dl.dynamic_slice(x, (n - 4,), (2,), allow_negative_indices=False),
        dl.dynamic_slice(table, (n, 1), (2, 3)),
        dl.dynamic_slice(table, (1, n), (2, 3)),
        dl.dynamic_slice(table, (n, n - 9), (2, 3)),
        dl.dynamic_slice(table, d.xp.stack([n, n]), (1, 2)),
        dl.dynamic_slice(table, (9, -2), (1, 2)),
        dl.dynamic_slice_in_dim(table, n, 2),
        dl.dynamic_slice_in_dim(table, n.astype(np.int8), 2, axis=-1),
        dl.dynamic_index_in_dim(table, n, axis=1, keepdims=False),
        dl.dynamic_index_in_dim(table, n * 3),
    )


def slices_a_plain_table(d: Any, x: Any, n: Any) -> Any:
    return d.lax.dynamic_index_in_dim(np.arange(7), n, keepdims=False)


def scans_from_a_python_number(d: Any, x: Any, n: Any) -> Any:
    return d.lax.scan(lambda c, x: (c + x, (c, 2 * c)), 0, x.astype(np.float32))


def updates(d: Any, x: Any, n: Any) -> Any:
    table = d.xp.outer(x[:4], d.xp.concatenate([x, x[:1]]))
    ones = 0 * table + 1
    dl = d.lax
    return (
        dl.dynamic_update_slice(x, x[:2], (n,)),
        dl.dynamic_update_slice(table, x.reshape(1, 5), (n, n - 1)),
        dl.dynamic_update_slice(table, ones[:2, :2], (-1, n)),
        dl.dynamic_update_slice(table, ones[:2, :2], (-1, -9)),
        dl.dynamic_update_slice_in_dim(table, ones[:, :2], n, 1),
        dl.dynamic_update_slice_in_dim(x, x[:1], 4, axis=0),
        dl.dynamic_update_index_in_dim(table, ones[0], n, 0),
        dl.dynamic_update_index_in_dim(table, ones[:, :1], n, -1),
    )


def sorts_bubbles(d: Any, x: Any, n: Any) -> Any:
    def swap(i: Any, x: Any) -> Any:
        pair = d.lax.dynamic_slice_in_dim(x, i, 2)
        pair = d.lax.cond(pair[0] > pair[1], lambda p: p[::-1], lambda p: p, pair)
        return d.lax.dynamic_update_slice_in_dim(x, pair, i, 0)

    return d.lax.fori_loop(0, 5, lambda _, x: d.lax.fori_loop(0, 4, swap, x), x)


ALONE = [
    sums_up, loops_to_its_own_bound, loops_from_its_own_bound, a_python_number_takes_the_dtype,
    doubles_until_large, collatz, branches, switches, scans, scans_back, scans_nothing, maps,
    selects, slices, slices_a_plain_table, scans_from_a_python_number, updates, sorts_bubbles,
]  # fmt: skip
TOGETHER = [
    goes_round_the_ring, doubles_until_all_are_large, branches_on_what_all_have, scans_by_length
]  # fmt: skip
