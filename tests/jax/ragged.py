"""ragged_all_to_all on the devices of this process: results and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.interpreters import ad

import gpusim.jax
from gpusim.jax import ragged
from tests.collectives.test_ragged_all_to_all import Program, random_program, reference
from tests.jax.devices import DEVICES, mapped, same
from tests.oracles.budget import SEED, budget


def ragged_call(**options: Any) -> Callable[..., Any]:
    return lambda *arguments: lax.ragged_all_to_all(*arguments, axis_name="i", **options)


def random_plans_equal_the_reference() -> None:
    """Results, and the gradients: rows added where they were sent, zeros where rows arrived."""
    rng = np.random.default_rng([SEED, DEVICES])
    half = [*range(DEVICES)][::-1]
    partitions: list[Any] = [None, [half]]
    if DEVICES % 2 == 0:
        partitions += [[half[::2], half[1::2]], [[k, k + 1] for k in range(0, DEVICES, 2)]]
    names = "int8 bool complex64 float8_e4m3fn bfloat16 float16 float32 float64".split()
    with gpusim.jax.installed():
        for _ in range(budget(125) if DEVICES <= 64 else 2):
            groups = partitions[rng.integers(len(partitions))]
            row = ((), (3,), (2, 1, 2))[rng.integers(3)]
            dtype = np.dtype(names[rng.integers(len(names))])
            plan = random_program(
                rng, DEVICES, groups, row=row, per_member=int(rng.integers(1, 4)),
                rows=int(rng.integers(1, 4)),
            )  # fmt: skip
            arguments = {
                name: values.astype(dtype if name in ("operand", "output") else np.int32)
                for name, values in plan.arguments.items()
            }
            plan = Program(arguments, groups, 0)
            call = mapped(ragged_call(axis_index_groups=groups))
            same(call(*arguments.values()), reference(plan))
            if dtype.kind == "f" and dtype.itemsize >= 2:
                check_gradients(rng, plan, call)


def check_gradients(rng: np.random.Generator, plan: Program, call: Any) -> None:
    operand, output, *indices = plan.arguments.values()
    ct = rng.integers(-8, 9, output.shape).astype(output.dtype)  # sums of these are exact
    operand_ct, output_ct = np.zeros_like(operand), ct.copy()
    for _, sender, _, sent, receiver, written in plan.sends():
        operand_ct[sender, sent] += ct[receiver, written]
        output_ct[receiver, written] = 0

    def gradients(operand: Any, output: Any, ct: Any) -> Any:
        return jax.vjp(lambda *data: call(*data, *indices), operand, output)[1](ct)

    found = jax.jit(gradients)(operand, output, ct)
    same(found[0], operand_ct)
    same(found[1], output_ct)


def jaxs_own_cases_of_ragged_all_to_all() -> None:
    """JAX's tests of the collective, by their names, with arguments and results of our own."""
    size = DEVICES
    with gpusim.jax.installed():
        # a worked example, on two of the devices
        pair = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("i",))
        arguments = [
            np.array(each)
            for each in (
                [[1, 2, 2], [3, 4, 0]], [[0] * 4] * 2, [[0, 1]] * 2,
                [[1, 2], [1, 1]], [[0, 0], [1, 2]], [[1, 1], [2, 1]],
            )
        ]  # fmt: skip
        expected = np.array([[1, 3, 0, 0], [2, 2, 4, 0]])
        same(mapped(ragged_call(), mesh=pair)(*arguments), expected)  # jit(shard_map)
        same(mapped(ragged_call(), mesh=pair, check=True)(*arguments), expected)
        by_pmap = jax.pmap(ragged_call(), axis_name="i", devices=jax.devices()[:2])
        same(by_pmap(*arguments), expected)
        # under vmap outside, with all and with some arguments batched
        stacked = [np.stack([each, each]) for each in arguments]
        same(
            jax.jit(jax.vmap(mapped(ragged_call(), mesh=pair)))(*stacked), np.stack([expected] * 2)
        )
        some = jax.vmap(mapped(ragged_call(), mesh=pair), in_axes=(0, *[None] * 5))
        same(jax.jit(some)(stacked[0], *arguments[1:]), np.stack([expected] * 2))
        # each sends one row to each; with rows of several axes
        grid = np.arange(size * size * 6, dtype=np.float32).reshape(size, size, 2, 3)
        ones, along = (
            np.ones((size, size), np.int32),
            np.tile(np.arange(size, dtype=np.int32), (size, 1)),
        )
        same(
            mapped(ragged_call())(grid, np.zeros_like(grid), along, ones, along.T.copy(), ones),
            grid.swapaxes(0, 1),
        )
        # nothing is sent: the output is as it was
        none = np.zeros_like(ones)
        same(mapped(ragged_call())(grid, -grid, along, none, along.T.copy(), none), -grid)
        # groups under vmap, which JAX refuses
        members = [[*range(size)][::-1]]
        call = mapped(ragged_call(axis_index_groups=members))
        every = (grid, np.zeros_like(grid), along, ones, size - 1 - along.T, ones)
        twice = [np.stack([each, each]) for each in every]
        once = call(*every)
        same(jax.vmap(call)(*twice), np.stack([once, once]))
        # gradients under vmap outside, and the second derivative
        vmapped = jax.vmap(jax.grad(lambda x, *rest: (call(x, *rest) ** 2).sum() / 2))
        same(vmapped(*twice), twice[0])
        curved = jax.grad(lambda x: jax.grad(lambda x: (call(x, *every[1:]) ** 3).sum())(x).sum())
        same(jax.jit(curved)(grid), 6 * grid)
        # axes that JAX checks
        for wrong, message in (
            (np.ones((size, size), np.float32), "must be integer type"),
            (np.ones((size, size, 1), np.int32), "must be rank 1"),
        ):
            try:
                mapped(ragged_call())(grid, grid, wrong, ones, along, ones)
            except ValueError as error:
                assert message in str(error)
            else:
                raise AssertionError(message)


def jaxs_gradient_for_output_is_wrong_and_ours_is_right() -> None:
    """The minimal case: an empty slice begins where another does."""
    pair = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("i",))
    operand, output = np.ones((2, 2), np.float32), np.zeros((2, 3), np.float32)
    # device 1 sends both rows to device 0, at row 0; the other slices are empty, at row 0 too
    zero = np.zeros((2, 2), np.int32)
    sent, received = np.array([[0, 0], [2, 0]], np.int32), np.array([[0, 2], [0, 0]], np.int32)
    call = mapped(ragged_call(), mesh=pair)

    def gradient(output: Any) -> Any:
        return call(operand, output, zero, sent, zero, received).sum()

    right = np.array([[0, 0, 1], [1, 1, 1]], np.float32)
    with gpusim.jax.installed():
        same(jax.jit(jax.grad(gradient))(output), right)
        ours = ad.primitive_transposes[ragged.ragged_p]
        ad.primitive_transposes[ragged.ragged_p] = ragged.jax_transpose
        jax.clear_caches()
        try:
            found = np.asarray(jax.jit(jax.grad(gradient))(output))
            assert (found != right).any(), "JAX has mended its gradient: mend the documentation"
        finally:
            ad.primitive_transposes[ragged.ragged_p] = ours


def an_output_that_all_devices_share_has_a_right_gradient() -> None:
    """JAX gives the result the type of `output`: with types, gradients would be summed."""
    size = DEVICES
    rows = np.random.default_rng(11).normal(size=(size, size, 2)).astype(np.float32)
    along = np.tile(np.arange(size, dtype=np.int32), (size, 1))
    ones = np.ones((size, size), np.int32)

    def exchange(rows: Any, along: Any, places: Any, ones: Any) -> Any:
        return lax.ragged_all_to_all(
            rows, jnp.zeros(rows.shape, rows.dtype), along, ones, places, ones, axis_name="i"
        )

    with gpusim.jax.installed():
        for check in (False, True):
            call = mapped(exchange, check=check)
            gradient = jax.jit(jax.grad(lambda x: (call(x, along, along.T, ones) ** 2).sum() / 2))  # noqa: B023
            same(gradient(rows), rows)
