"""What the tests of PopXL's ops share: programs of one op, run on replicas, beside PyTorch.
A case is an op, its inputs, and the same in PyTorch, whose float64 and autograd are the oracle."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import gpusim.popxl as popxl
from gpusim.popxl import ops

REPLICAS = 4
HALF, SINGLE = popxl.float16, popxl.float32
TOLERANCE = {SINGLE: 2e-5, HALF: 4e-3}


@dataclass(frozen=True)
class Floats:
    """Random numbers for each replica, in the case's own dtype; of gradients if `wanted`."""

    shape: tuple[int, ...]
    low: float = -2.0
    high: float = 2.0
    wanted: bool = True
    apart: bool = False  # no two alike, so that there is one greatest

    def draw(self, rng: np.random.Generator) -> Any:
        if self.apart:
            count = int(np.prod(self.shape))
            rows = [rng.permutation(count) for _ in range(REPLICAS)]
            steps = np.array(rows).reshape(REPLICAS, *self.shape) / max(count - 1, 1)
            return self.low + (self.high - self.low) * steps
        return rng.uniform(self.low, self.high, (REPLICAS, *self.shape))


@dataclass(frozen=True)
class Integers:
    """Random integers for each replica."""

    shape: tuple[int, ...]
    low: int
    high: int
    dtype: Any = popxl.int32

    def draw(self, rng: np.random.Generator) -> Any:
        return rng.integers(self.low, self.high, (REPLICAS, *self.shape))


@dataclass(frozen=True)
class Case:
    """An op, what it is given, and what PyTorch makes of that."""

    name: str
    build: Callable[..., Any]
    inputs: Sequence[Floats | Integers]
    reference: Callable[..., Any]
    differentiable: bool = True
    dtypes: Sequence[Any] = (SINGLE, HALF)
    scale: float = 1.0  # how much less exact than others a case is

    def __str__(self) -> str:
        return self.name


@dataclass
class Result:
    """What a program gives: outputs and gradients, (replicas, *shape) each."""

    outputs: list[Any]
    gradients: list[Any] = field(default_factory=list)


def dtype_of(given: Floats | Integers, dtype: Any) -> Any:
    return dtype if isinstance(given, Floats) else given.dtype


def values_of(case: Case, dtype: Any) -> list[Any]:
    """The inputs' numbers, (REPLICAS, *shape) each, as they are in the dtype."""
    rng = np.random.default_rng(zlib.crc32(case.name.encode()))
    drawn = ((given, given.draw(rng)) for given in case.inputs)
    return [value.astype(dtype_of(given, dtype).as_numpy()) for given, value in drawn]


def listed(made: Any) -> list[Any]:
    return [made] if isinstance(made, (popxl.Tensor, torch.Tensor)) else list(made)


def run(
    case: Case,
    dtype: Any,
    values: Sequence[Any],
    *,
    one_by_one: bool = False,
    arrays: str = "numpy",
    cotangents: Sequence[Any] = (),
) -> Result:
    """The case's outputs, and the gradients of its inputs if there are cotangents."""
    replicas = len(values[0])
    ir = popxl.Ir(replication=replicas)
    options = ir._pb_ir.getSessionOptions()
    options.oneByOne, options.arrays = one_by_one, arrays
    specs = [popxl.TensorSpec(g.shape, dtype_of(g, dtype)) for g in case.inputs]
    with ir.main_graph:
        streams = [popxl.h2d_stream(spec.shape, spec.dtype) for spec in specs]
        feeds = dict(zip(streams, values, strict=True))
        graph = ir.create_graph(lambda *tensors: case.build(*tensors), *specs)
        count = len(graph.outputs)
        wanted = [
            tensor
            for tensor, given in zip(graph.inputs, case.inputs, strict=True)
            if isinstance(given, Floats) and given.wanted
        ]
        info = None
        if cotangents:
            provided = [t for t in graph.outputs if t.dtype.is_floating_point]
            info = popxl.transforms.autodiff(graph, provided, wanted)
        call = ops.call_with_info(graph, *map(ops.host_load, streams))
        outputs = [stored(tensor) for tensor in call.outputs[:count]]
        gradients = []
        if info is not None:
            seeds = [
                popxl.h2d_stream(c.shape[1:], t.dtype)
                for c, t in zip(cotangents, provided, strict=True)
            ]
            feeds |= dict(zip(seeds, cotangents, strict=True))
            loaded = map(ops.host_load, seeds)
            back = ops.call(info.graph, *loaded, inputs_dict=info.inputs_dict(call))
            gradients = [stored(tensor) for tensor in back]
    with popxl.Session(ir, "ipu_model") as session:
        # a single replica has no axis of its own
        lead = slice(None) if replicas > 1 else 0
        given = {stream: value[lead] for stream, value in feeds.items()}
        results = session.run(given, downcast_inputs=False)

    def fetched(found: Any) -> Any:
        return results[found] if replicas > 1 else results[found][None]

    return Result(list(map(fetched, outputs)), list(map(fetched, gradients)))


def stored(tensor: Any) -> Any:
    stream = popxl.d2h_stream(tensor.shape, tensor.dtype)
    ops.host_store(stream, tensor)
    return stream


def expected(case: Case, values: Sequence[Any], cotangents: Sequence[Any]) -> Result:
    """PyTorch's outputs and gradients, in float64, replica by replica."""
    outputs, gradients = [], []
    for row in range(len(values[0])):
        tensors = []
        for given, value in zip(case.inputs, values, strict=True):
            floats = isinstance(given, Floats)
            kind = torch.float64 if floats else torch.bool if value.dtype == bool else torch.int64
            tensor = torch.tensor(value[row].tolist(), dtype=kind)
            tensors.append(tensor.requires_grad_(floats and bool(cotangents) and given.wanted))
        made = listed(case.reference(*tensors))
        outputs.append([tensor.detach().numpy() for tensor in made])
        if cotangents:
            floating = [t for t in made if t.is_floating_point()]
            wanted = [t for t in tensors if t.requires_grad]
            seeds = [torch.tensor(c[row].astype(np.float64)) for c in cotangents]
            found = torch.autograd.grad(
                floating, wanted, seeds, allow_unused=True, materialize_grads=True
            )
            gradients.append([gradient.numpy() for gradient in found])
    return Result(
        [np.stack(rows) for rows in zip(*outputs, strict=True)],
        [np.stack(rows) for rows in zip(*gradients, strict=True)],
    )


def cotangents_of(case: Case, dtype: Any, outputs: Sequence[Any]) -> list[Any]:
    if not case.differentiable:
        return []
    rng = np.random.default_rng(7)
    return [
        rng.uniform(-1, 1, out.shape).astype(dtype.as_numpy())
        for out in outputs
        if out.dtype.kind == "f"
    ]


def check(case: Case, dtype: Any, arrays: str = "numpy") -> None:
    """Outputs and gradients are PyTorch's, and no replica's bits depend on the others."""
    values = values_of(case, dtype)
    cotangents = cotangents_of(case, dtype, expected(case, values, ()).outputs)
    wanted = expected(case, values, cotangents)
    found = run(case, dtype, values, cotangents=cotangents, arrays=arrays)
    tolerance = TOLERANCE[dtype] * case.scale
    for name in ("outputs", "gradients"):
        for place, (mine, theirs) in enumerate(
            zip(getattr(found, name), getattr(wanted, name), strict=True)
        ):
            assert mine.shape == theirs.shape, (name, place)
            where = f"{name} {place} of {case.name}"
            if mine.dtype.kind != "f":
                np.testing.assert_array_equal(mine, theirs, err_msg=where)
                continue
            assert mine.dtype == dtype.as_numpy(), where
            size = np.abs(theirs[np.isfinite(theirs)]).max(initial=1.0)
            np.testing.assert_allclose(
                mine.astype(np.float64), theirs, tolerance, tolerance * size, err_msg=where
            )
    if arrays != "numpy":
        return
    for replicas in (1, 2):
        fewer = run(
            case,
            dtype,
            [value[:replicas] for value in values],
            cotangents=[cotangent[:replicas] for cotangent in cotangents],
        )
        assert_equal_bits(fewer, found, replicas, f"{case.name} on {replicas}")
    alone = run(case, dtype, values, cotangents=cotangents, one_by_one=True)
    assert_equal_bits(alone, found, REPLICAS, f"{case.name} one by one")


def assert_equal_bits(some: Result, all_: Result, count: int, what: str) -> None:
    pairs = zip((*some.outputs, *some.gradients), (*all_.outputs, *all_.gradients), strict=True)
    for part, whole in pairs:
        same = np.ascontiguousarray(part).view(np.uint8), np.ascontiguousarray(whole[:count])
        assert np.array_equal(same[0], same[1].view(np.uint8)), what
