"""Works, their futures and hooks, and the names of groups are as with gloo."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gpusim
from gpusim.torch.distributed import launch
from tests.torch.children import needs_linux
from tests.torch.distributed_programs import start
from tests.torch.gloo_ranks import Case
from tests.torch.test_dispatcher import BOTH, assert_like_gloo

pytestmark = needs_linux

HOOKS: list[Case] = [
    ("builtin_hooks", 3, {"hook": "FP16_COMPRESS"}),
    ("builtin_hooks", 2, {"hook": "ALLREDUCE"}),
]
UNEVEN: list[Case] = [("uneven", 3, {"initial": False})]


@BOTH
def test_works_answer_as_those_of_gloo(processes: bool, tmp_path: Path) -> None:
    cases: list[Case] = [("works", 3, {}), ("names", 2, {})]
    assert_like_gloo(cases, tmp_path / "real", processes=processes)


@BOTH
def test_hooks_in_cpp_and_joins_have_the_bits_of_gloo(processes: bool, tmp_path: Path) -> None:
    assert_like_gloo([*HOOKS, *UNEVEN], tmp_path / "real", processes=processes)


@pytest.mark.slow
@BOTH
def test_more_joins_have_the_bits_of_gloo(processes: bool, tmp_path: Path) -> None:
    cases: list[Case] = [
        ("uneven", ranks, {"initial": initial, **options})
        for ranks in (2, 5)
        for initial in (False, True)
        for options in ({}, {"zero": True}, {"find_unused_parameters": True})
    ]
    assert_like_gloo(cases, tmp_path / "real", processes=processes)


@BOTH
def test_a_work_may_be_dropped_or_held_by_cpp_alone(processes: bool) -> None:
    """C++ would wait for ever for a work whose Python object is gone."""

    def program(rank: int) -> list[float]:
        start()
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
        x, y = torch.ones(1), torch.ones(1)
        model.reducer._set_forward_pass_work_handle(dist.all_reduce(x, async_op=True), False)
        dist.all_reduce(y, async_op=True)
        gc.collect()
        dist.barrier()
        model(torch.ones(1, 1)).sum().backward()
        return [x.item(), y.item()]

    assert launch(program, 3, processes=processes) == [[3.0, 3.0]] * 3


def test_results_are_those_of_the_backend() -> None:
    """gloo gathers into a tensor as into its parts, and refuses results that are not there yet."""

    def program(rank: int) -> list[Any]:
        found: list[Any] = []
        for backend in ("gloo", "nccl"):
            dist.init_process_group(backend)
            target = torch.zeros(4)
            work = dist.all_gather_into_tensor(target, torch.ones(2), async_op=True)
            try:
                found.append(len(work.result()))
            except RuntimeError as error:
                found.append(str(error)[:39])
            work.wait()
            found += [len(work.result()), len(work.get_future().value()), work._get_op_type()]
            dist.barrier()
            dist.destroy_process_group()
        return found

    first, last = launch(program, 2)
    early = "Work needs to be completed before calli"
    assert first == [early, 2, 2, 4, 1, 1, 1, 5]
    assert last == [2, 2, 2, 4, 1, 1, 1, 5]


class Custom(dist.ProcessGroup):
    """A backend of a program's own, whose all-reduce gives 42."""

    def allreduce(self, tensors: Any, *options: Any) -> Any:
        for tensor in tensors:
            tensor.fill_(42)
        self.work = Waited()
        return self.work


class Waited(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


@BOTH
def test_backends_that_a_program_registers_are_its_own(processes: bool) -> None:
    """Each rank registers one under the same name; the creator gets the rank's store."""

    def program(rank: int) -> list[Any]:
        def create(store: Any, rank: int, size: int, timeout: Any) -> Custom:
            store.set(f"from {rank}", str(rank))
            assert store.get(f"from {(rank + 1) % size}") == str((rank + 1) % size).encode()
            return Custom(rank, size)

        dist.Backend.register_backend("custom42", create)
        dist.init_process_group("custom42")
        x = torch.ones(2)
        dist.all_reduce(x)
        found = [x.tolist(), type(dist.group.WORLD).__name__, dist.get_backend()]
        dist.destroy_process_group()
        with pytest.raises(gpusim.GpusimError, match="custom42 is a backend that the program"):
            dist.init_process_group("cpu:custom42,cuda:gloo")
        dist.init_process_group("gloo")
        dist.all_reduce(x)
        return [*found, x.tolist()]

    expected = [[42.0, 42.0], "Custom", "custom42", [126.0, 126.0]]
    assert launch(program, 3, processes=processes) == [expected] * 3
    assert not hasattr(dist.Backend, "CUSTOM42")


@BOTH
def test_the_fake_backend_computes_nothing(processes: bool) -> None:
    """torch's own, of any size; its operators have torch's kernels while ranks run."""

    def program(rank: int) -> list[Any]:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=64)
        x, whole = torch.full((2,), 3.0), torch.zeros(128)
        dist.all_reduce(x)
        dist.all_gather_into_tensor(whole, x)
        return [dist.get_world_size(), dist.get_rank(), x.tolist(), whole.sum().item()]

    found = launch(program, 2, processes=processes)
    assert found == [[64, rank, [3.0, 3.0], 384.0] for rank in range(2)]
