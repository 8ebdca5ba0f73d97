"""Every gradient of a PopXL op beside finite differences of the op itself, in float64.

The table has an entry for every op with a gradient: a new op without one fails. Ops over replicas
are tested in groups. PopXL's conventions for them: the results of a gather are the same on all
replicas, and so are the values that a slice takes; such values and their gradients count once.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import gpusim.popxl as popxl
from gpusim.groups import Groups
from gpusim.popxl import ops
from gpusim.popxl._definition import Definition, no_gradient
from gpusim.popxl.ops import collectives
from gpusim.popxl.ops.branching import CONDITIONAL
from gpusim.popxl.ops.calling import CALL, REPEAT
from tests.oracles.budget import slow
from tests.popxl import popxl_cases
from tests.popxl import test_popxl_autodiff as autodiff
from tests.popxl import test_popxl_ops_elementwise as elementwise
from tests.popxl import test_popxl_ops_networks as networks
from tests.popxl import test_popxl_ops_shapes as shapes
from tests.popxl.popxl_cases import Case, Floats, Integers

DOUBLE = popxl.float64
STEP = 2.0**-13
TOLERANCE = 2e-5
X, SEED = Floats((3, 5)), Integers((2,), 0, 99, popxl.uint32)

#: Ops without a case beside PyTorch.
MORE = [
    Case("dropout", lambda t, s: ops.dropout(t, s, 0.4), [X, SEED], None),
    Case("shaped_dropout", lambda t, s: ops.shaped_dropout(t, s, (3, 1), 0.4), [X, SEED], None),
    Case("batch_norm_inference, statistics too", ops.batch_norm_inference,
         [Floats((2, 4, 3)), *[Floats((4,))] * 3, Floats((4,), 0.5, 2)], None),
    Case("scaled_add by one tensor", lambda x, y, b: ops.scaled_add(x, y, 0.5, b),
         [X, X, Floats((1,))], None),
    Case("a called graph's output in place", lambda t: ops.reshape_(ops.exp(t), (15,)), [X], None),
]  # fmt: skip
CASES = [
    case
    for cases in (
        elementwise.UNARY,
        elementwise.BINARY,
        shapes.REDUCTIONS,
        shapes.SHAPES,
        shapes.INDEXING,
        networks.PRODUCTS,
        networks.CONVOLUTIONS,
        networks.POOLS,
        networks.NORMS,
        networks.LOSSES,
        networks.IMAGES,
        autodiff.CASES,
        MORE,
    )
    for case in cases
    if case.differentiable
]
#: Functions whose gradient is defined not to be their derivative.
STOPPED = {"detach"}


def slopes(
    case: Case, replicas: int, groups: Groups | None = None, *, inputs: bool, outputs: bool
) -> tuple[np.ndarray, np.ndarray]:
    """For each replica its gradient along a random direction, and the finite difference.

    `inputs`, `outputs`: whether these are the same for all replicas of a group.
    """
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))

    def shared(values: Any, same: bool) -> Any:
        """The values, those of a group's first replica for all of it if they are the same."""
        if same and groups is not None:
            values = values[[groups.members[group][0] for group in groups.assignment]]
        return values

    values = [shared(v[:replicas], inputs) for v in popxl_cases.values_of(case, DOUBLE)]
    plain = popxl_cases.run(case, DOUBLE, values).outputs
    floating = [index for index, out in enumerate(plain) if out.dtype.kind == "f"]
    seeds = [shared(rng.uniform(-1, 1, plain[index].shape), outputs) for index in floating]
    gradients = popxl_cases.run(case, DOUBLE, values, cotangents=seeds).gradients
    wanted = [isinstance(given, Floats) and given.wanted for given in case.inputs]
    ways = [
        shared(rng.uniform(-1, 1, value.shape), inputs) if want else None
        for value, want in zip(values, wanted, strict=True)
    ]

    def loss(sign: float) -> np.ndarray:
        moved = [
            value if way is None else value + sign * STEP * way
            for value, way in zip(values, ways, strict=True)
        ]
        found = popxl_cases.run(case, DOUBLE, moved).outputs
        return dots([found[index] for index in floating], seeds)

    difference = (loss(1.0) - loss(-1.0)) / (2 * STEP)
    along = dots(gradients, [way for way in ways if way is not None])
    firsts = [members[0] for members in groups.members] if groups is not None else []
    return along[firsts] if inputs else along, difference[firsts] if outputs else difference


def dots(values: Sequence[Any], others: Sequence[Any]) -> np.ndarray:
    """For each replica the sum of the products of its elements."""
    rows = [
        (value * other).reshape(len(value), -1).sum(1)
        for value, other in zip(values, others, strict=True)
    ]
    return np.sum(rows, axis=0)


@pytest.mark.parametrize("replicas", [4, *slow(1, 2)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_finite_differences(case: Case, replicas: int) -> None:
    found, expected = slopes(case, replicas, inputs=False, outputs=False)
    if case.name in STOPPED:
        expected = np.zeros_like(expected)
    np.testing.assert_allclose(found, expected, TOLERANCE, TOLERANCE * case.scale)


def test_casts_pass_gradients_on() -> None:
    """Beside a difference that is as large as float32 needs it."""
    case = Case("cast", lambda t: ops.cast(ops.exp(ops.cast(t, popxl.float32)), DOUBLE), [X], None)
    found, expected = slopes(case, 4, inputs=False, outputs=False)
    np.testing.assert_allclose(found, expected, 5e-3, 5e-3)


# ---------------------------------------------------------------- over replicas


@dataclass(frozen=True)
class Collective:
    """A function of a tensor and the groups, and what the replicas of a group have in common."""

    build: Callable[[Any, Any], Any]
    same_inputs: bool = False
    same_outputs: bool = False
    shape: tuple[int, ...] = (4, 8)


def gathered(mode: str, axis: int = 0) -> Callable[[Any, Any], Any]:
    return lambda t, group: collectives.replicated_all_gather(t, axis, group, mode)


def sharded(t: Any, group: Any) -> Any:
    shard = collectives.replica_sharded_slice(t, group)
    return collectives.replicated_all_gather(ops.sin(shard), 0, group)


def repeated(t: Any, group: Any) -> Any:
    graph = popxl.gir().create_graph(
        lambda t: ops.sin(collectives.replicated_all_reduce(t, "mean", group)), t
    )
    return ops.repeat(graph, 3, t)[0]


COLLECTIVES = {
    **{
        f"all_reduce {op}": Collective(
            lambda t, group, op=op: collectives.replicated_all_reduce(t, op, group)
        )
        for op in ("add", "mean", "local")
    },
    **{
        f"reduce_scatter {op}": Collective(
            lambda t, group, op=op: collectives.replicated_reduce_scatter(t, op, group),
            shape=(5, 3),
        )
        for op in ("add", "mean")
    },
    "reduce_scatter local": Collective(
        lambda t, group: collectives.replicated_reduce_scatter(t, "local", group),
        same_inputs=True,
        shape=(5, 3),
    ),
    "replica_sharded_slice": Collective(
        collectives.replica_sharded_slice, same_inputs=True, shape=(5, 3)
    ),
    "all_gather new_axis": Collective(gathered("new_axis"), same_outputs=True),
    "all_gather concat 0": Collective(gathered("concat"), same_outputs=True),
    "all_gather concat 1": Collective(gathered("concat", 1), same_outputs=True),
    "all_gather of scalars": Collective(gathered("concat"), same_outputs=True, shape=()),
    "replicated_slice 0": Collective(
        lambda t, group: collectives.replicated_slice(t, 0, group), same_inputs=True
    ),
    "replicated_slice 1": Collective(
        lambda t, group: collectives.replicated_slice(t, -1, group), same_inputs=True
    ),
    "shards gathered": Collective(sharded, same_inputs=True, same_outputs=True, shape=(5, 3)),
    "all_reduce in a repeat": Collective(repeated),
    "all_reduce of products": Collective(
        lambda t, group: ops.sin(collectives.replicated_all_reduce(t * t, "add", group)) * t
    ),
}
GROUPS = [(1, 1, 1), (2, 1, 2), (2, 1, 1), (4, 1, 4), (4, 1, 2), (4, 2, 2), (4, 1, 1)]


def collective_case(name: str, stride: int, size: int) -> Case:
    collective = COLLECTIVES[name]

    def build(t: Any) -> Any:
        return collective.build(t, popxl.gir().replica_grouping(stride, size))

    return Case(name, build, [Floats(collective.shape)], None)


@pytest.mark.parametrize(("replicas", "stride", "size"), GROUPS)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_gradients_of_collectives_are_finite_differences(
    name: str, replicas: int, stride: int, size: int
) -> None:
    collective, groups = COLLECTIVES[name], Groups.from_stride(replicas, stride, size)
    case = collective_case(name, stride, size)
    found, expected = slopes(
        case,
        replicas,
        groups,
        inputs=collective.same_inputs,
        outputs=collective.same_outputs,
    )
    # Each replica's loss depends on its neighbours' values: only the sum is a gradient.
    np.testing.assert_allclose(found.sum(), expected.sum(), TOLERANCE, TOLERANCE)


@pytest.mark.parametrize("op", ["mul", "min", "max", "square_add"])
def test_other_reductions_have_no_gradient(op: str) -> None:
    ir = popxl.Ir(replication=2)
    graph = ir.create_graph(
        lambda t: collectives.replicated_all_reduce(t, op), popxl.TensorSpec((2,), DOUBLE)
    )
    with pytest.raises(NotImplementedError, match=f"no gradient for op='{op}'"):
        popxl.transforms.autodiff(graph)


# ---------------------------------------------------------------- over the IPUs of a replica

PLACES = [0, 1, 2]


def same_inputs(t: Any) -> Any:
    """The copies of one value, of which the first is differentiated."""
    copies = [t, ops.detach(t), ops.detach(t)]
    return collectives.all_reduce_identical_inputs(copies, PLACES)


def same_gradients(*ts: Any) -> Any:
    """The results, all of which get the first one's gradient; they count once."""
    first, *others = collectives.all_reduce_identical_grad_inputs(ts, PLACES)
    # first + (other - first): the value of the first, and the gradient for each
    return first + (sum_of(others) - ops.detach(sum_of(others)))


def sum_of(ts: Sequence[Any]) -> Any:
    return ts[0] + ts[1]


OVER_IPUS = {
    "all_reduce": Case("all_reduce", lambda *ts: collectives.all_reduce(ts, PLACES), [X] * 3, None),
    "mean": Case("mean", lambda *ts: collectives.all_reduce(ts, PLACES, "mean"), [X] * 3, None),
    "identical inputs": Case("identical inputs", same_inputs, [X], None),
    "identical gradients": Case("identical gradients", same_gradients, [X] * 3, None),
}


@pytest.mark.parametrize("replicas", [1, 2, 4])
@pytest.mark.parametrize("name", OVER_IPUS)
def test_gradients_between_ipus_are_finite_differences(name: str, replicas: int) -> None:
    found, expected = slopes(OVER_IPUS[name], replicas, inputs=False, outputs=False)
    np.testing.assert_allclose(found, expected, TOLERANCE, TOLERANCE)


# ---------------------------------------------------------------- the table is complete


def definitions() -> Iterator[Definition]:
    """All definitions of ops that PopXL's modules hold."""
    for module in pkgutil.walk_packages(popxl.__path__, "gpusim.popxl."):
        importlib.import_module(module.name)
        for value in vars(sys.modules[module.name]).values():
            found = value.values() if isinstance(value, dict) else [value]
            yield from (each for each in found if isinstance(each, Definition))


def used(case: Case) -> set[Definition]:
    """The definitions of a case's ops, those of called graphs included."""
    ir = popxl.Ir()
    specs = [
        popxl.TensorSpec(given.shape, popxl_cases.dtype_of(given, DOUBLE)) for given in case.inputs
    ]
    ir.create_graph(lambda *tensors: case.build(*tensors), *specs)
    return {op.definition for graph in ir._graphs.values() for op in graph._ops}


def test_every_op_with_a_gradient_is_in_the_table() -> None:
    cases = [*CASES, *(collective_case(name, 1, 1) for name in COLLECTIVES), *OVER_IPUS.values()]
    covered = set[Definition]().union(*map(used, cases))
    wanted = {d for d in definitions() if d.gradient not in (None, no_gradient)}
    wanted |= {CALL, REPEAT, CONDITIONAL}
    # which only gradient graphs have, and casts, which have a test of their own
    covered |= {popxl.ops.arithmetic.SUM, popxl.ops.casts.CAST}
    assert len(wanted) > 70
    assert {definition.op_type for definition in wanted - covered} == set()
