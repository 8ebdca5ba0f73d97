"""Random programs whose arrays are sharded: sums, products, losses, gradients, loops, moves.

A block draws arrays with their shardings, and a function of them. A program is some blocks side by
side: one jit with several results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

#: The meshes' shapes by the number of devices.
SHAPES: dict[int, tuple[tuple[int, ...], ...]] = {
    2: ((2,), (1, 2), (2, 1)),
    3: ((3,), (1, 3)),
    4: ((4,), (2, 2), (4, 1)),
    6: ((6,), (3, 2)),
    8: ((8,), (2, 4), (4, 2), (2, 2, 2)),
}
NAMES = ("d", "m", "k")
DTYPES = ("float32", "float16", "bfloat16", "float64", "complex64")

Block = tuple[Callable[..., Any], list[Any]]


@dataclass
class Program:
    """A function and its arrays, on their devices. `options` are those of jax.jit."""

    text: str
    function: Callable[..., Any]
    arguments: list[Any]
    options: dict[str, Any] = field(default_factory=dict)


class Draw:
    """Draws arrays on a mesh."""

    def __init__(self, rng: np.random.Generator, mesh: Mesh, dtype: str) -> None:
        self.rng, self.mesh, self.dtype = rng, mesh, dtype

    def one(self, *choices: Any) -> Any:
        return choices[self.rng.integers(len(choices))]

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def length(self, most: int = 5) -> int:
        return int(self.rng.integers(1, most + 1))

    def spec(self, dims: int, *, all_of: Sequence[int] = (), share: float = 0.8) -> list[Any]:
        """Axes of the mesh for dimensions; the first ones go to `all_of`."""
        found: list[list[str]] = [[] for _ in range(dims)]
        names = [*self.mesh.axis_names]
        self.rng.shuffle(names)
        wanted = [*all_of]
        for name in names:
            if wanted:
                found[wanted.pop(0)].append(name)
            elif dims and self.chance(share):
                found[self.rng.integers(dims)].append(name)
        return [tuple(each) if len(each) > 1 else (each[0] if each else None) for each in found]

    def shards(self, entry: Any) -> int:
        names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        return int(np.prod([self.mesh.shape[name] for name in names]))

    def values(self, shape: Sequence[int], dtype: Any = None) -> Any:
        """Values of several magnitudes, which no two orders add to the same bits."""
        kind = np.dtype(dtype or self.dtype)
        x = self.rng.normal(size=shape) * 2.0 ** self.rng.integers(-3, 4, shape)
        if kind.kind == "c":
            x = x + 1j * self.rng.normal(size=shape)
        return x.astype(kind)

    def put(self, values: Any, spec: Sequence[Any]) -> Any:
        return jax.device_put(values, NamedSharding(self.mesh, P(*spec)))

    def array(self, local: Sequence[int], spec: Sequence[Any], dtype: Any = None) -> Any:
        shape = [n * self.shards(entry) for n, entry in zip(local, spec, strict=True)]
        return self.put(self.values(shape, dtype), spec)

    def indices(self, shape: Sequence[int], most: int, spec: Sequence[Any]) -> Any:
        return self.put(self.rng.integers(0, most, shape).astype(np.int32), spec)


def sums(d: Draw) -> Block:
    dims = int(d.rng.integers(1, 4))
    x = d.array([d.length() for _ in range(dims)], d.spec(dims))
    axes = tuple(k for k in range(dims) if d.chance(0.6)) or (int(d.rng.integers(dims)),)
    reduce = d.one(jnp.sum, jnp.sum, jnp.mean)
    if x.dtype.kind != "c":
        reduce = d.one(reduce, reduce, jnp.max, jnp.min)
    keepdims = d.chance(0.3)
    return lambda x: reduce(x, axis=axes, keepdims=keepdims), [x]


def masked_sums(d: Draw) -> Block:
    """True sums, of arrays with zeros."""
    split = d.spec(2, all_of=[0])
    x = d.array([d.length(), d.length()], split)
    mask = d.put(d.rng.integers(0, 2, x.shape).astype(bool), split)
    row = int(d.rng.integers(x.shape[0]))
    return d.one(
        lambda x, mask: jnp.where(mask, x, 0).sum(0),
        lambda x, mask: (x * mask).sum(0),
        lambda x, mask: jnp.where(jnp.arange(x.shape[0])[:, None] == row, x, 0).sum(0) + mask.sum(),
    ), [x, mask]


EINSUMS = (
    "ij,jk->ik", "ij,kj->ik", "ij,ij->", "ij,ij->j", "bij,bjk->bik", "bij,bjk->ik", "ij,ik->jk",
    "bqhd,bkhd->bhqk", "ij,j->i", "i,i->",
)  # fmt: skip


def products(d: Draw) -> Block:
    text = d.one(*EINSUMS)
    given, result = text.split("->")
    left, right = given.split(",")
    contracted = [k for k, letter in enumerate(left) if letter not in result]
    split = d.spec(len(left), all_of=contracted[:1])
    axes = dict(zip(left, split, strict=True))
    used = {name for entry in split if entry for name in np.atleast_1d(entry)}
    free = [name for name in d.mesh.axis_names if name not in used]
    for letter in right:
        if letter not in axes:
            axes[letter] = free.pop() if free and d.chance(0.5) else None
    lengths = {letter: d.length() for letter in axes}
    arrays = [
        d.array([lengths[letter] for letter in names], [axes[letter] for letter in names])
        for names in (left, right)
    ]
    return lambda a, b: jnp.einsum(text, a, b), arrays


def losses(d: Draw) -> Block:
    batch, classes = d.spec(2, all_of=[0])
    logits = d.array([d.length(), d.length()], [batch, classes])
    targets = d.put(d.values(logits.shape), [batch, classes])
    labels = d.indices(logits.shape[:1], logits.shape[1], [batch])

    def squares(logits: Any, targets: Any, labels: Any) -> Any:
        return jnp.mean((logits - targets) ** 2)

    def entropy(logits: Any, targets: Any, labels: Any) -> Any:
        found = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(found, labels[:, None], 1).mean()

    def one_hot(logits: Any, targets: Any, labels: Any) -> Any:
        found = jax.nn.log_softmax(logits)
        return -(found * jax.nn.one_hot(labels, logits.shape[1], dtype=found.dtype)).sum(1).mean()

    return d.one(squares, entropy, one_hot), [logits, targets, labels]


def gradients(d: Draw) -> Block:
    """value_and_grad of a layer or two, whose batch is split, and sometimes its weights."""
    batch, inner = d.spec(2, all_of=[0])
    features, hidden, classes = d.length(4), d.length(3), d.length(3)
    x = d.array([d.length(3), features], [batch, None])
    w1 = d.array([features, hidden], [None, inner])
    w2 = d.array([hidden, classes], [inner, None])
    y = d.array([x.shape[0] // d.shards(batch), classes], [batch, None])
    act = d.one(jnp.tanh, jax.nn.relu, lambda x: x)
    rate = d.one(None, 0.125)

    def loss(weights: Any, x: Any, y: Any) -> Any:
        return jnp.mean((act(x @ weights[0]) @ weights[1] - y) ** 2)

    def step(w1: Any, w2: Any, x: Any, y: Any) -> Any:
        value, found = jax.value_and_grad(loss)((w1, w2), x, y)
        if rate is None:
            return value, found
        return value, [w - rate * g for w, g in zip((w1, w2), found, strict=True)]

    return step, [w1, w2, x, y]


def normalizations(d: Draw) -> Block:
    """Over a split axis: max and sum, or mean and variance."""
    x = d.array([d.length(), d.length()], d.spec(2, all_of=[1]))

    def layer(x: Any) -> Any:
        mean = x.mean(1, keepdims=True)
        return (x - mean) * lax.rsqrt(((x - mean) ** 2).mean(1, keepdims=True) + 1)

    return d.one(
        lambda x: jax.nn.softmax(x, 1),
        lambda x: jax.nn.logsumexp(x, 1),
        lambda x: jax.grad(lambda x: jax.nn.logsumexp(x, 1).sum())(x),
        layer,
        lambda x: (x.max(1), x.min(1), jnp.abs(x).max()),
        lambda x: x / jnp.sqrt((x * x).sum()),
    ), [x]


def convolutions(d: Draw) -> Block:
    """Of split input channels, and gradients for the kernel of a split batch."""
    batch, channels = d.spec(2, all_of=[d.one(0, 1)])
    x = d.array([d.length(2), d.length(2), 4, 3], [batch, channels, None, None])
    kernel = d.array([d.length(2), d.length(1), 2, 2], [None, channels, None, None])
    kernel = d.put(d.values((kernel.shape[0], x.shape[1], 2, 2)), [None, channels, None, None])

    def apply(x: Any, kernel: Any) -> Any:
        return lax.conv(x, kernel, (1, 1), "SAME")

    return d.one(apply, lambda x, kernel: jax.grad(lambda k: (apply(x, k) ** 2).sum())(kernel)), [
        x,
        kernel,
    ]


def scatters(d: Draw) -> Block:
    (rows, *_) = d.spec(1, all_of=[0])
    values = d.array([d.length(), d.length(3)], [rows, None])
    count = d.length(6)
    index = d.indices(values.shape[:1], count, [rows])
    table = d.put(d.values((count, values.shape[1])), [None, None])

    def lookup(values: Any, index: Any, table: Any) -> Any:
        return jax.vjp(lambda table: table[index], table)[1](values)[0]

    return d.one(
        lookup,
        lambda values, index, table: jax.ops.segment_sum(values, index, count),
        lambda values, index, table: table.at[index].add(values),
        lambda values, index, table: jax.nn.one_hot(index, count, dtype=table.dtype).T @ values,
    ), [values, index, table]


def loops(d: Draw) -> Block:
    """scan, fori_loop, while_loop and cond with sums inside."""
    x = d.array([d.length(), d.length(3)], d.spec(2, all_of=[0]))
    rounds = d.length(3)
    half = np.asarray(0.5, x.dtype)

    def scan(x: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            carry = carry + (x * half).sum(0)
            return carry, carry.max() if x.dtype.kind != "c" else carry.sum()

        return lax.scan(body, jnp.zeros(x.shape[1], x.dtype), None, length=rounds)

    def scanned_rows(x: Any) -> Any:
        return lax.scan(
            lambda c, row: (c + row.sum(), c), jnp.zeros((), x.dtype), jnp.stack([x, x * half])
        )

    def fori(x: Any) -> Any:
        return lax.fori_loop(
            0, rounds, lambda k, y: y * half + jnp.broadcast_to(y.sum(0), y.shape) * half, x
        )

    def until(x: Any) -> Any:
        return lax.while_loop(
            lambda state: (state[0] < rounds) & (jnp.abs(state[1]).sum() < 1e9),
            lambda state: (state[0] + 1, state[1] + state[1].sum(0) * half),
            (0, x),
        )

    def either(x: Any) -> Any:
        return lax.cond(
            jnp.real(x.sum()) > 0, lambda x: x.sum(0), lambda x: (x * half).sum(0) + x.sum(), x
        )

    def switched(x: Any) -> Any:
        branches = [lambda x: x.sum(0), lambda x: x[0] * half, lambda x: (x * x).sum(0)]
        return lax.switch(rounds - 1 + (x != x).sum(), branches, x)

    def derived(x: Any) -> Any:
        def loss(w: Any) -> Any:
            return lax.scan(lambda c, _: (c * half + (x @ w).sum(), None), w.sum(), None, 2)[0]

        return jax.grad(loss)(jnp.ones(x.shape[1], x.dtype))

    choices = [scan, scanned_rows, fori, until, either, switched]
    return d.one(*choices, *([derived] if x.dtype.kind != "c" else [])), [x]


#: What moves rows, by name: functions of an array, of indices of its rows, and of its shape.
MOVES: dict[str, Callable[..., Any]] = {
    "row": lambda x, at, order: x[x.shape[0] // 2],
    "last row": lambda x, at, order: x[-1],
    "row at": lambda x, at, order: x[at[0]],
    "element at": lambda x, at, order: x[at[0], at[1] % x.shape[1]],
    "rows at": lambda x, at, order: x[at],
    "rows at, filled": lambda x, at, order: x.at[at * 3].get(mode="fill", fill_value=0),
    "dynamic_slice": lambda x, at, order: lax.dynamic_slice_in_dim(x, at[0], 1, 0),
    "dynamic_slice of half": lambda x, at, order: lax.dynamic_slice(
        x, (at[0], at[1]), (x.shape[0] // 2, 1)
    ),
    "dynamic_update_slice": lambda x, at, order: lax.dynamic_update_slice_in_dim(
        x, x[:1] * 2, at[1], 0
    ),
    "concatenate": lambda x, at, order: jnp.concatenate([x, 2 * x], 0),
    "concatenate three": lambda x, at, order: jnp.concatenate([x[1:], x, x[:1]], 0),
    "stack": lambda x, at, order: jnp.stack([x, -x]),
    "pad": lambda x, at, order: jnp.pad(x, ((1, x.shape[0] * 2), (0, 3))),
    "roll": lambda x, at, order: jnp.roll(x, x.shape[0] // 2 + 1, 0),
    "roll by": lambda x, at, order: jnp.roll(x, at[0], 0),
    "reverse": lambda x, at, order: x[::-1],
    "tail": lambda x, at, order: x[x.shape[0] // 2 :],
    "steps": lambda x, at, order: x[::2],
    "take_along_axis": lambda x, at, order: jnp.take_along_axis(x, order, 0),
    "set": lambda x, at, order: x.at[at].set(1),
    "transpose": lambda x, at, order: x.T.reshape(-1),
    "reshape": lambda x, at, order: x.reshape(-1)[:7],
    "repeat": lambda x, at, order: jnp.repeat(x, 2, 0),
    "tile": lambda x, at, order: jnp.tile(x, (2, 1)),
    "mask": lambda x, at, order: jnp.where(jnp.arange(x.shape[0])[:, None] == at[0], 0, x)[at[1]],
    "split": lambda x, at, order: jnp.split(x, 2)[1] if x.shape[0] % 2 == 0 else x[:1],
    "diagonal": lambda x, at, order: jnp.diagonal(x),
    "in a loop": lambda x, at, order: lax.map(lambda k: x[k], at),
}
#: The same of real numbers, which have an order.
ORDERED: dict[str, Callable[..., Any]] = {
    "sort": lambda x, at, order: jnp.sort(x, 0),
    "argsort": lambda x, at, order: x[jnp.argsort(x[:, 0])],
    "top_k": lambda x, at, order: lax.top_k(x.T, min(2, x.shape[0]))[0],
    "argmax": lambda x, at, order: jnp.argmax(x, 0),
    "median": lambda x, at, order: jnp.sort(x, 0)[x.shape[0] // 2],
}


def moved_arrays(d: Draw) -> list[Any]:
    split = d.spec(2, all_of=[0])
    x = d.array([d.length(4), d.length(4)], split)
    return [x, d.indices((3,), x.shape[0], [None]), d.indices(x.shape, x.shape[0], split)]


def moves(d: Draw) -> Block:
    """Operations that move elements, and add none."""
    arrays = moved_arrays(d)
    ordered = ORDERED if d.dtype != "complex64" else {}
    found = d.one(*MOVES.values(), *ordered.values())
    return lambda x, at, order: (found(x, at, order), order.sum()), arrays  # and one of integers


def moved_sums(d: Draw) -> Block:
    """Sums and products of what was moved first: shards of other lengths, halos, padded rows."""
    split = d.spec(2, all_of=[0])
    x = d.array([d.length(3), d.length(4)], split)
    w = d.put(d.values((x.shape[1], 3)), [split[1], None])
    place = int(d.rng.integers(x.shape[0]))

    def pooled(x: Any, w: Any) -> Any:
        return lax.reduce_window(x, np.zeros((), x.dtype), lax.add, (2, 1), (1, 1), "SAME").sum(0)

    return d.one(
        lambda x, w: x[1:].sum(0),
        lambda x, w: (x[place:] @ w).sum(0),
        lambda x, w: x[:-1].T @ x[1:],
        lambda x, w: jnp.concatenate([x, x[:1]]).sum(0),
        lambda x, w: jnp.pad(x, ((1, 2), (0, 1))).sum(0),
        lambda x, w: jnp.roll(x, 1, 0).T @ x,
        lambda x, w: x[::2].sum(0) + x[place],
        lambda x, w: x.reshape(-1)[1:].sum(),
        lambda x, w: jnp.einsum("ij,kj->ik", x, x).sum(0),
        lambda x, w: (x[place] @ w, x[-1].sum()),
        lambda x, w: jnp.outer(x[:, 0], x[0]).sum(0),
        lambda x, w: jnp.tril(jnp.ones((x.shape[0],) * 2, x.dtype)) @ x,
        lambda x, w: jnp.triu(x @ x.T).sum(0),
        lambda x, w: jnp.trace(x @ x.T),
        pooled,
    ), [x, w]


def running_sums(d: Draw) -> Block:
    x = d.array([d.length(), d.length(3)], d.spec(2, all_of=[0]))
    return d.one(
        lambda x: jnp.cumsum(x, 0),
        lambda x: jnp.cumsum(x, 0)[-1].sum(),
        lambda x: jnp.diff(x.sum(1)),
        lambda x: lax.associative_scan(jnp.add, x),
    ), [x]


def explicit_sums(d: Draw) -> Block:
    """lax.psum in a shard_map beside a sum of the partitioner's."""
    x = d.array([d.length(), d.length(3)], [d.mesh.axis_names, None])
    axes = d.mesh.axis_names

    def whole(x: Any) -> Any:
        body = jax.shard_map(
            lambda x: lax.psum(x.sum(0), axes), mesh=d.mesh, in_specs=P(axes), out_specs=P()
        )
        return x.sum(0), body(x), (x * 2).sum()

    return whole, [x]


REAL = (losses, gradients, normalizations, convolutions)
BLOCKS = (
    sums, sums, masked_sums, products, products, losses, gradients, gradients, normalizations,
    convolutions, scatters, loops, loops, moves, moved_sums, moved_sums, running_sums,
    explicit_sums,
)  # fmt: skip


def mesh_of(rng: np.random.Generator) -> Mesh:
    """A mesh of all devices, sometimes with the devices in another order."""
    devices = np.array(jax.devices())
    shapes = SHAPES[len(devices)]
    shape = shapes[rng.integers(len(shapes))]
    if rng.random() < 0.3:
        devices = rng.permutation(devices)
    return Mesh(devices.reshape(shape), NAMES[: len(shape)])


def draw(seed: int) -> Program:
    """The program of a seed."""
    rng = np.random.default_rng(seed)
    d = Draw(rng, mesh_of(rng), DTYPES[rng.integers(len(DTYPES))])
    blocks = [block for block in BLOCKS if d.dtype != "complex64" or block not in REAL]
    chosen = [d.one(*blocks) for _ in range(1 + int(rng.integers(3)) // 2)]
    drawn = [block(d) for block in chosen]
    widths = [len(arrays) for _, arrays in drawn]

    def function(*arrays: Any) -> Any:
        given = iter(arrays)
        return [
            part(*(next(given) for _ in range(width)))
            for (part, _), width in zip(drawn, widths, strict=True)
        ]

    options = {"out_shardings": NamedSharding(d.mesh, P())} if rng.random() < 0.3 else {}
    names = " ".join(block.__name__ for block in chosen)
    return Program(
        f"seed {seed}: {names} of {d.dtype} on {dict(d.mesh.shape)}",
        function,
        [array for _, arrays in drawn for array in arrays],
        options,
    )
