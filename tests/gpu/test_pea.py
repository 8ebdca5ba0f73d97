"""poptorch_experimental_addons on CUDA tensors: bits and gradients are those of the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import gpusim
import gpusim.poptorch_experimental_addons as pea
import gpusim.torch as gt
from gpusim.poptorch.axis import AXIS
from gpusim.torch.seeds import seeded

pytest.importorskip("cupy", reason="needs CuPy: pip install 'gpusim[cuda13]'")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

R = 3
OPERATIONS = {
    "all_reduce": lambda x: pea.collectives.all_reduce_cross_replica_sum(x, R),
    "inserted": lambda x: pea.collectives.all_reduce_cross_replica_sum(x, R, True),
    "all_gather": lambda x: pea.collectives.all_gather_cross_replica(x, R),
    "equal": lambda x: pea.collectives.all_gather_cross_replica_identical_grads_in(x, R),
    "all_to_all": lambda x: pea.collectives.all_to_all_single_cross_replica(x, R),
    "proxy": lambda x: pea.autograd_proxy(x.round(), 3 * x),
    "nearest": lambda x: pea.quantise_fpx(x, 2, 1, "nearest", bwd=True),
    "stochastic": lambda x: pea.quantise_fpx(x, 2, 1, bwd=True),
}


def program(x: Tensor) -> dict[str, Tensor]:
    found = {}
    for name, operation in OPERATIONS.items():
        found[name], back = torch.func.vjp(operation, x)
        found[f"{name}, back"] = back(found[name] * (1 + gt.axis_index(AXIS)))[0]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("map_", [gt.vmap, gt.pmap], ids=["vmap", "pmap"])
def test_bits_are_those_of_the_host(map_: Any, dtype: Any) -> None:
    x = torch.randn(R, 6, 5).to(dtype)
    results = []
    for own in (x, x.cuda()):
        with gpusim.reduction(order="ring", rounding="stochastic", seed=1), seeded(2):
            results.append(map_(program, axis_name=AXIS)(own))
    for name, value in results[0].items():
        assert results[1][name].is_cuda and torch.equal(results[1][name].cpu(), value), name


@pytest.mark.parametrize("p", [1, 2])
def test_distances_are_near_those_of_the_host(p: int) -> None:
    a, b = torch.randn(R, 30, 5), torch.randn(R, 40, 5)
    distances = gt.vmap(lambda a, b: pea.distance_matrix(a, b, p), axis_name=AXIS)
    torch.testing.assert_close(distances(a.cuda(), b.cuda()).cpu(), distances(a, b))
