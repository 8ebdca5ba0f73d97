"""Suites in the style of PyTorch's own: `python -m tests.tools.torch_suites [--simulated] [NAME]`.

Each class starts its ranks as PyTorch's tests do. The same classes run as they are, over gloo in
processes, and with `ranks()` on simulated ranks. The verdicts are printed as JSON, by test.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import unittest
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.common_distributed import (
    DistributedTestBase,
    MultiProcContinuousTest,
    MultiProcessTestCase,
    MultiThreadedTestCase,
    skip_if_lt_x_gpu,
)
from torch.testing._internal.common_utils import (
    FILE_SCHEMA,
    instantiate_parametrized_tests,
    parametrize,
)
from torch.testing._internal.distributed._tensor.common_dtensor import (
    DTensorOpTestBase,
    DTensorTestBase,
    with_comms,
)

SIMULATED = "TORCH_SUITES_SIMULATED"

if SIMULATED in os.environ:
    from gpusim.testing import ranks
else:

    def ranks(count: int | None = None) -> Any:
        """Leave the class as it is, with its processes."""

        def same(cls: Any) -> Any:
            if count is not None:
                cls.world_size = count
            return cls

        return same


def with_group(function: Callable[..., Any]) -> Callable[..., Any]:
    """Initialise the group in the rank first, as suites' decorators do."""

    @functools.wraps(function)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        self.init_pg()
        function(self, *args, **kwargs)

    return wrapper


@ranks()
class TestProcesses(MultiProcessTestCase):
    def setUp(self) -> None:
        super().setUp()
        # The test that runs is wrapped, the others are not.
        self.special_return_code_checks = {getattr(self.test_special_code, "__wrapped__", None): 7}
        self.skip_return_code_checks = [getattr(self.test_any_code, "__wrapped__", None)]
        self._spawn_processes()
        self.in_main = True

    def tearDown(self) -> None:
        super().tearDown()
        with contextlib.suppress(OSError):
            os.remove(self.file_name)

    @property
    def world_size(self) -> int:
        return 3

    def init_pg(self) -> None:
        dist.init_process_group(
            "gloo",
            init_method=f"{FILE_SCHEMA}{self.file_name}",
            rank=self.rank,
            world_size=self.world_size,
        )

    @with_group
    def test_all_reduce(self) -> None:
        x = torch.full((4,), float(self.rank))
        dist.all_reduce(x)
        self.assertEqual(x, torch.full((4,), 3.0))

    @with_group
    def test_one_fails(self) -> None:
        self.assertNotEqual(self.rank, 1)
        dist.barrier()

    def test_attributes_of_main(self) -> None:
        self.assertFalse(hasattr(self, "in_main"))  # setUp does not run in a rank

    @skip_if_lt_x_gpu(2)
    def test_gpus(self) -> None:
        self.fail("never")

    def test_skip(self) -> None:
        self.skipTest("in all ranks")

    @unittest.skip("of the class")
    def test_static_skip(self) -> None:
        self.fail("never")

    @unittest.expectedFailure
    def test_expected_failure(self) -> None:
        self.fail("known")

    @unittest.expectedFailure
    def test_unexpected_success(self) -> None:
        pass

    @with_group
    def test_subtests(self) -> None:
        for root in range(3):
            with self.subTest(root=root):
                x = torch.full((2,), float(self.rank))
                dist.broadcast(x, root)
                self.assertEqual(x, torch.full((2,), float(root)))

    @with_group
    def test_subtest_fails(self) -> None:
        for number in range(3):
            with self.subTest(number=number):
                self.assertNotEqual(number, 1)

    @with_group
    @parametrize("dtype", [torch.float32, torch.int64])
    def test_dtype(self, dtype: torch.dtype) -> None:
        x = torch.ones(2, dtype=dtype) * self.rank
        dist.all_reduce(x, dist.ReduceOp.MAX)
        self.assertEqual(x, torch.full((2,), 2, dtype=dtype))

    @with_group
    def test_raises(self) -> None:
        with self.assertRaises((ValueError, RuntimeError)):
            dist.broadcast(torch.ones(1), 7)

    @with_group
    def test_subgroup(self) -> None:
        group = dist.new_group([0, 2])
        if self.rank != 1:
            x = torch.ones(1)
            dist.all_reduce(x, group=group)
            self.assertEqual(x.item(), 2)

    @with_group
    def test_ddp(self) -> None:
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        model(torch.ones(1, 2) * (self.rank + 1)).sum().backward()
        self.assertEqual(model.module.weight.grad, torch.full((1, 2), 2.0))

    def test_exit_code(self) -> None:
        sys.exit(5)

    def test_special_code(self) -> None:
        sys.exit(7)

    def test_any_code(self) -> None:
        sys.exit(3 + self.rank)

    def test_store(self) -> None:
        store = dist.FileStore(self.file_name, self.world_size)
        store.set(f"of {self.rank}", str(self.rank))
        other = (self.rank + 1) % self.world_size
        self.assertEqual(store.get(f"of {other}"), str(other).encode())


instantiate_parametrized_tests(TestProcesses)


@ranks(2)
class TestBase(DistributedTestBase):
    def test_group(self) -> None:
        group = self.create_pg("cpu")
        x = torch.ones(2)
        dist.all_reduce(x, group=group)
        self.assertEqual(x[0].item(), self.world_size)
        self.assertEqual(self.is_master, self.rank == 0)

    def test_fails(self) -> None:
        self.create_pg("cpu")
        self.assertEqual(self.rank, 7)


@ranks()
class TestDTensor(DTensorTestBase):
    @property
    def world_size(self) -> int:
        return 4

    @with_comms
    def test_shard(self) -> None:
        x = torch.arange(16.0).reshape(8, 2)
        sharded = distribute_tensor(x, self.build_device_mesh(), [Shard(0)])
        self.assertEqual(sharded.to_local().shape, (2, 2))
        self.assertEqual(sharded.full_tensor(), x)

    @with_comms
    def test_two_axes(self) -> None:
        mesh = init_device_mesh(self.device_type, (2, 2), mesh_dim_names=("a", "b"))
        x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)])
        self.assertEqual(x.sum().full_tensor().item(), 16)
        self.assertEqual(mesh["a"].size(), 2)

    @with_comms
    def test_product(self) -> None:
        mesh = self.build_device_mesh()
        torch.manual_seed(0)
        a, b = torch.randn(8, 4), torch.randn(4, 6)
        rows = distribute_tensor(a, mesh, [Shard(0)])
        whole = distribute_tensor(b, mesh, [Replicate()])
        self.assertEqual(torch.mm(rows, whole).full_tensor(), a @ b)

    @with_comms
    def test_one_passes(self) -> None:
        self.assertEqual(self.rank, 0)

    @skip_if_lt_x_gpu(4)
    @with_comms
    def test_gpus(self) -> None:
        self.fail("never")


@ranks()
class TestThreads(MultiThreadedTestCase):
    @property
    def world_size(self) -> int:
        return 4

    def setUp(self) -> None:
        super().setUp()
        self._spawn_threads()

    def perThreadSetUp(self) -> None:
        super().perThreadSetUp()
        self.own = 10.0 * self.rank

    def test_gather(self) -> None:
        out = [torch.zeros(1) for _ in range(4)]
        dist.all_gather(out, torch.tensor([self.own]))
        self.assertEqual([each.item() for each in out], [0, 10, 20, 30])

    def test_scatter(self) -> None:
        x = torch.zeros(1)
        parts = [torch.tensor([float(rank)]) for rank in range(4)]
        dist.scatter(x, parts if self.rank == 1 else None, src=1)
        self.assertEqual(x.item(), self.rank)

    def test_one_fails(self) -> None:
        self.assertEqualOnRank(1, 2, rank=3)

    def test_skip(self) -> None:
        self.skipTest("in all ranks")

    @unittest.expectedFailure
    def test_expected_failure(self) -> None:
        self.fail("known")


@ranks()
class TestOps(DTensorOpTestBase):
    @property
    def world_size(self) -> int:
        return 2

    def test_add(self) -> None:
        x = distribute_tensor(torch.ones(4), self.build_device_mesh(), [Shard(0)])
        self.assertEqual((x + x).full_tensor(), torch.full((4,), 2.0))

    def test_wrong_shape(self) -> None:
        x = distribute_tensor(torch.ones(4), self.build_device_mesh(), [Shard(0)])
        self.assertEqual(x.to_local().shape, (3,))


@ranks()
class TestContinuous(MultiProcContinuousTest):
    world_size = 2
    pg: Any

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    @classmethod
    def device_type(cls) -> str:
        return "cpu"

    def test_sum(self) -> None:
        x = torch.ones(1) * self.rank
        dist.all_reduce(x)
        self.assertEqual(x.item(), 1)
        self.assertEqual(dist.get_rank(self.pg), self.rank)

    def test_size(self) -> None:
        self.assertEqual(self.world_size, dist.get_world_size())

    def test_z_one_passes(self) -> None:
        self.assertEqual(self.rank, 0)


class Verdicts(unittest.TestResult):
    """Return each test's outcome. A failure and an error are one: PyTorch's processes tell less."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[str, str] = {}
        self.texts: dict[str, str] = {}

    def note(self, test: Any, kind: str, text: str = "") -> None:
        name = ".".join(test.id().split(" ")[0].split(".")[-2:])
        if self.kinds.get(name) != "failed":
            self.kinds[name], self.texts[name] = kind, text

    def addSuccess(self, test: Any) -> None:
        self.note(test, "passed")

    def addError(self, test: Any, err: Any) -> None:
        self.note(test, "failed", self._exc_info_to_string(err, test))  # type: ignore[attr-defined]

    addFailure = addError

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self.addError(test, err)

    def addSkip(self, test: Any, reason: str) -> None:
        self.note(test, "skipped", reason)

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        self.note(test, "failed as expected")

    def addUnexpectedSuccess(self, test: Any) -> None:
        self.note(test, "passed unexpectedly")


def main(names: list[str]) -> None:
    """Run the tests of these names, or all, and print the verdicts."""
    loader = unittest.TestLoader()
    module: Any = sys.modules["tests.tools.torch_suites"]
    suite = (
        loader.loadTestsFromNames(names, module) if names else loader.loadTestsFromModule(module)
    )
    verdicts = Verdicts()
    suite.run(verdicts)
    print(json.dumps({"kinds": verdicts.kinds, "texts": verdicts.texts}))


if __name__ == "__main__":
    arguments = [name for name in sys.argv[1:] if name != "--simulated"]
    if len(arguments) < len(sys.argv) - 1:
        os.environ[SIMULATED] = "1"
    # By its name, which processes that are spawned import it by.
    __import__("tests.tools.torch_suites")
    sys.modules["tests.tools.torch_suites"].main(arguments)
