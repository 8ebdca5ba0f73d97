"""torch.distributed with the order of a file: all_reduce has it, others where it is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import gpusim
from gpusim import ReplicaError
from gpusim.revealed import trees_of
from gpusim.torch.distributed import launch
from gpusim.twins import TWINS
from tests.contract.order_files import order, random_trees, write
from tests.torch.distributed_programs import start

VALUES = [torch.randn(64, generator=torch.Generator().manual_seed(i)) for i in range(4)]


def results(reduction: Any, call: Any) -> list[Any]:
    """What each rank has after a call on its values."""

    def program(rank: int) -> Any:
        start()
        return call(VALUES[rank].clone())

    return launch(program, 4, reduction=reduction)


def all_reduced(x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
    dist.all_reduce(x, op)
    return x


def scattered(x: Tensor) -> Tensor:
    out = torch.empty(16)
    dist.reduce_scatter_tensor(out, x)
    return out


@pytest.fixture
def file(tmp_path: Path) -> Path:
    trees = random_trees(np.random.default_rng(1), 4, 64)
    return write(tmp_path / "order.json", order(trees, 4))


def test_all_reduce_has_the_order_of_a_file(file: Path) -> None:
    arrays = [value.numpy() for value in VALUES]
    expected = gpusim.collectives.psum(arrays, reduction=file).value
    for given in (file, str(file)):
        for found in results(given, all_reduced):
            assert found.numpy().tobytes() == expected.tobytes()
    largest = results(file, lambda x: all_reduced(x[:3], dist.ReduceOp.MAX))
    assert torch.equal(largest[0], torch.stack(VALUES)[:, :3].amax(0))
    numbers = results(file, lambda x: all_reduced(torch.arange(5)))
    assert numbers[3].tolist() == [0, 4, 8, 12, 16]


def test_what_the_file_lacks_is_refused_on_every_rank(file: Path) -> None:
    for call, message in (
        (lambda x: all_reduced(x[:63].clone()), "63 elements: .* knows sums of 4 ranks"),
        (lambda x: all_reduced(x.double()), "float64 members: .* knows sums of 4 ranks"),
        (scattered, "reduce_scatter: .* has the order of all_reduce. A function as `reduction`"),
    ):
        with pytest.raises(ReplicaError, match=message):
            results(file, call)


def test_gloos_files_serve_what_torch_makes_of_its_all_reduce(tmp_path: Path) -> None:
    trees = trees_of(TWINS["gloo-ring"].schedule, 4, 64, 4)
    contents = order(trees, 4) | {"engine": "torch.distributed gloo, torch 2.13.0"}
    path = write(tmp_path / "order.json", contents)

    def averaged(x: Tensor) -> Tensor:
        return all_reduced(x, dist.ReduceOp.AVG)

    for call in (all_reduced, scattered, averaged):
        found, expected = (results(each, call) for each in (path, "gloo-ring"))
        assert [each.tolist() for each in found] == [each.tolist() for each in expected]
