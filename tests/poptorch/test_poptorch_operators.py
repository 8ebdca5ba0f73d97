"""Torch's operators on replicas against a loop of plain PyTorch: in place, indexing, reductions.

The operators are those that torch lists, on torch's own samples. An operator is equal to the loop,
or it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import gpusim.torch as gt
from gpusim import poptorch

from .operators import EXCLUDED, Case, cases, names, vary
from .poptorch_models import infer

#: The dtypes, and the number of samples of each sampling of torch's.
DTYPES = {torch.float32: 3, torch.int64: 2, torch.int32: 1, torch.bool: 1, torch.float16: 1}
Map = Callable[[Callable[..., Any], list[Tensor]], Sequence[Tensor]]


def in_lockstep(call: Callable[..., Any], stacked: list[Tensor]) -> Sequence[Tensor]:
    found: Sequence[Tensor] = infer(call, stacked, "lockstep")
    return found


def by_vmap(call: Callable[..., Any], stacked: list[Tensor]) -> Sequence[Tensor]:
    found: Sequence[Tensor] = gt.vmap(call, axis_name="i")(*stacked)
    return found


def by_pmap(call: Callable[..., Any], stacked: list[Tensor]) -> Sequence[Tensor]:
    def replica(*own: Tensor) -> Any:
        return call(*(x.clone() for x in own))  # memory of its own: as_strided looks at it

    found: Sequence[Tensor] = gt.pmap(replica, "i", schedule="one")(*stacked)
    return found


MAPS: dict[str, Map] = {"lockstep": in_lockstep, "vmap": by_vmap, "pmap": by_pmap}


def compare(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """float32 terms may be added in other orders: sums are as near as their largest terms allow."""
    assert len(found) == len(expected)
    for own, one in zip(found, expected, strict=True):
        tolerance = {"rtol": 1e-4, "atol": 1e-5}
        if one.dtype in (torch.float16, torch.bfloat16):
            tolerance = {"rtol": 1e-2, "atol": 1e-2}
        elif one.is_floating_point():
            tolerance["atol"] *= max(1.0, *one[one.isfinite()].abs().flatten().tolist())
        torch.testing.assert_close(own, one, equal_nan=True, **tolerance)


def loop(call: Callable[..., Any], replicas: list[list[Tensor]]) -> list[Tensor] | None:
    """What plain PyTorch returns, stacked; None for what it refuses or cannot be compared."""
    try:
        results = [call(*tensors) for tensors in replicas]
        return [torch.stack(column) for column in zip(*results, strict=True)]
    except (RuntimeError, IndexError, TypeError, ValueError, NotImplementedError):
        return None


def check(case: Case, replicas: int, refused: set[str]) -> bool:
    """Compare one case in all maps; whether there was anything to compare."""
    values = [[vary(x, r) for x in case.tensors] for r in range(replicas)]
    expected = loop(case.call, values)
    if expected is None:
        return False
    for name, mapped in MAPS.items():
        for mapped_count in {len(case.tensors), 1}:  # the others are constants, equal on all
            rest = case.tensors[mapped_count:]

            def call(*tensors: Tensor, rest: list[Tensor] = rest) -> list[Tensor]:
                return case.call(*tensors, *(x.clone() for x in rest))

            own = [one[:mapped_count] for one in values]
            wanted = expected if not rest else loop(call, own)
            if wanted is None:
                continue
            stacked = [torch.stack(column) for column in zip(*own, strict=True)]
            try:
                found = mapped(call, stacked)
            except Exception as error:
                if name == "pmap" or isinstance(error, KeyError):  # a fault, not a refusal
                    raise
                refused.add(f"{type(error).__name__}: {error}")
                continue
            compare(found, wanted)
    return True


REFUSED = {
    "allclose": "looks at values",
    "argwhere": "has a result whose shape depends on values",
    "as_strided_": "changes shapes in place",
    "as_strided_scatter": "has no rule of torch's",
    "batch_norm": "cannot update statistics that replicas share",
    "bincount": "has a result whose shape depends on values",
    "detach_": "cannot detach views",
    "index_put": "with masks looks at values",
    "index_put_": "with masks looks at values",
    "instance_norm": "cannot update statistics that replicas share",
    "masked_select": "has a result whose shape depends on values",
    "narrow": "looks at the value of a start that is a tensor",
    "native_batch_norm": "cannot update statistics that replicas share",
    "nonzero": "has a result whose shape depends on values",
    "one_hot": "without num_classes looks at values",
    "tensor_split": "looks at the value of indices that are a tensor",
    "unique_consecutive": "has a result whose shape depends on values",
    "unsafe_split_with_sizes": "has no rule of torch's",
}
"""Operators that some map refuses, and why. In models the replicas run in threads then."""


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in names() if name not in EXCLUDED])
def test_an_operator_is_that_of_a_loop(name: str) -> None:
    refused: set[str] = set()
    compared = 0
    for dtype, count in DTYPES.items():
        for case in cases(name, dtype, count):
            for replicas in (1, 3) if dtype is torch.float32 else (3,):
                compared += check(case, replicas, refused)
    assert compared, "no case was compared"
    if refused:
        assert name in REFUSED, refused


def test_every_operator_that_is_excluded_exists() -> None:
    assert {*EXCLUDED} <= {*names()}
    assert {*REFUSED} <= {*names()}


# ---------------------------------------------------------------- the rules that are gpusim's own

ALL = slice(None)
PLACES: dict[str, Callable[[Tensor], Any]] = {
    "i": lambda i: (i,),
    "i,i": lambda i: (i, i),
    ":,i": lambda i: (ALL, i),
    "i,:,i": lambda i: (i, ALL, i),
    ":,:,i": lambda i: (ALL, ALL, i),
    ":,i,i": lambda i: (ALL, i, i),
    ":,:,:,i": lambda i: (ALL, ALL, ALL, i),
    ":,i,:,i": lambda i: (ALL, i, ALL, i),
    "...,i": lambda i: (..., i),
    "1,i": lambda i: (1, i),
    ":,1:3,i": lambda i: (ALL, slice(1, 3), i),
}
SHAPES = {"square": (4, 4, 4, 4), "oblong": (4, 5, 6, 4)}
INDICES = {"vector": torch.tensor([0, 2, 1]), "matrix": torch.tensor([[0, 2], [1, 3]])}


@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MAPS)
def test_values_are_written_where_indices_say(
    name: str, shape: str, index: str, replicas: int
) -> None:
    x = torch.arange(1.0, 1.0 + torch.Size(SHAPES[shape]).numel()).reshape(SHAPES[shape])
    i = INDICES[index]
    values = [
        -torch.arange(1.0, 1.0 + x[at(i)].numel()).reshape(x[at(i)].shape) for at in PLACES.values()
    ]

    def write(x: Tensor, i: Tensor, *values: Tensor) -> list[Tensor]:
        found = []
        for at, value in zip(PLACES.values(), values, strict=True):
            own = x.clone()
            own[at(i)] = value
            found.append(own)
        return found

    tensors = [[vary(t, r) for t in (x, i, *values)] for r in range(replicas)]
    expected = loop(write, tensors)
    assert expected is not None
    stacked = [torch.stack(column) for column in zip(*tensors, strict=True)]
    compare(MAPS[name](write, stacked), expected)


PRODUCTS = {
    "addmv": ((3,), (3, 4), (4,)),
    "addmm": ((3, 5), (3, 4), (4, 5)),
    "addbmm": ((3, 5), (2, 3, 4), (2, 4, 5)),
    "baddbmm": ((2, 3, 5), (2, 3, 4), (2, 4, 5)),
    "addr": ((3, 4), (3,), (4,)),
}


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", MAPS)
def test_factors_of_zero_ignore_what_pytorch_ignores(
    name: str, product: str, in_place: bool
) -> None:
    for alpha, beta in ((0, 0), (0, 1), (1, 0), (2, 3)):
        for missing in range(3):

            def call(x: Tensor, a: Tensor, b: Tensor, *, of: Any = (alpha, beta)) -> list[Tensor]:
                function = getattr(x.clone(), f"{product}{'_' * in_place}")
                return [function(a, b, alpha=of[0], beta=of[1])]

            tensors = [torch.full(shape, 2.0) for shape in PRODUCTS[product]]
            tensors[missing].fill_(float("nan"))
            compare(MAPS[name](call, [x[None] for x in tensors]), [x[None] for x in call(*tensors)])


@pytest.mark.parametrize("product", [product for product in PRODUCTS if product != "addr"])
def test_products_of_integers_are_integers(product: str) -> None:
    def call(x: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        return [getattr(torch, product)(x, a, b, alpha=0.6, beta=1.2)]

    tensors = [
        torch.arange(torch.Size(shape).numel()).reshape(shape) for shape in PRODUCTS[product]
    ]
    for name in ("vmap", "lockstep"):
        compare(MAPS[name](call, [x[None] for x in tensors]), [x[None] for x in call(*tensors)])


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("replicas", [1, 3])
def test_squeezing_in_place_keeps_the_replicas(name: str, replicas: int) -> None:
    def call(x: Tensor) -> list[Tensor]:
        return [x.clone().squeeze_()]

    x = torch.arange(10.0).reshape(1, 5, 1, 2).expand(replicas, 1, 5, 1, 2)
    compare(MAPS[name](call, [x]), [x.reshape(replicas, 5, 2)])


def test_a_new_shape_in_place_is_refused_by_vmap_and_runs_in_a_model() -> None:
    def call(x: Tensor) -> list[Tensor]:
        own = x.clone()
        own.as_strided_((2, 2), (1, 2))
        return [own]

    x = torch.arange(18.0).reshape(2, 3, 3)
    with pytest.raises(RuntimeError, match="as_strided_ gives a tensor another shape in place"):
        by_vmap(call, [x])
    infer_ = poptorch.inferenceModel(lambda x: call(x)[0], poptorch.Options().replicationFactor(2))
    assert torch.equal(infer_(x.reshape(6, 3)), torch.cat([call(one)[0] for one in x]))
    infer_.destroy()
