"""torch.distributed on simulated ranks: the bits of real gloo processes, and what a rank owns."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Shard

import gpusim
from gpusim import GpusimError, Reduction
from gpusim.torch.distributed import launch, private
from gpusim.torch.distributed.own.seeds import seeds_of, sow
from tests.oracles.budget import FULL
from tests.oracles.machine_time import until
from tests.oracles.owned import busy_threads
from tests.torch.distributed_programs import start
from tests.torch.gloo_cases import CASES, SIZES, assert_equal_bits, case_name, real, run
from tests.torch.gloo_ranks import Case

legacy: Any = np.random  # the global generator


def test_bits_are_those_of_real_processes(tmp_path: Path) -> None:
    """Of all programs, whatever runs their ranks: test_distributed_bits.py."""
    for case, expected in zip(CASES, real(CASES, tmp_path / "real"), strict=True):
        assert_equal_bits(expected, run(case, tmp_path), case_name(case))


@pytest.mark.parametrize(
    "case",
    [
        *((name, 4, {"seed": 3}) for name in ("ddp", "fsdp2", "messages", "groups", "functional")),
        ("collectives", 4, {"sizes": SIZES, "dtypes": ["float32"], "seed": 3}),
    ],
    ids=case_name,
)
def test_free_threads_have_the_same_bits(case: Case, tmp_path: Path) -> None:
    """In programs that draw from no global generator."""
    assert_equal_bits(run(case, tmp_path), run(case, tmp_path, schedule="free"))


def test_runs_with_dropout_repeat(tmp_path: Path) -> None:
    case: Case = ("ddp", 4, {"seed": 1, "dropout": 0.5})
    first = run(case, tmp_path)
    for _ in range(20 if FULL else 4):
        assert_equal_bits(first, run(case, tmp_path))


def test_casts_that_are_lost_are_said() -> None:
    """Rank 0 comes back to autocast with other weights while rank 1 waits inside."""

    def program(rank: int) -> None:
        start()
        layer, x = torch.nn.Linear(4, 4), torch.ones(1, 4)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                before = layer(x)
                if rank:
                    dist.recv(torch.empty(1), 0)
            if not rank:
                with torch.no_grad():
                    layer.weight += 1
                with torch.autocast("cpu", torch.bfloat16):
                    assert not torch.equal(before, layer(x))
                dist.send(torch.ones(1), 1)

    with pytest.warns(RuntimeWarning, match="entered torch.autocast again while others waited"):
        launch(program, 2)


# What belongs to a rank


def test_each_rank_has_the_state_of_a_process() -> None:
    before = (os.getcwd(), list(sys.argv), torch.initial_seed(), dict(os.environ))
    expected = []
    for rank in range(3):
        sow(seeds_of(0, rank))
        expected.append([torch.rand(1).item(), legacy.randn(), legacy.randn(), random.random()])
    torch.manual_seed(5)
    legacy.seed(6)
    own = [torch.rand(1).item(), legacy.randn()]
    torch.manual_seed(5)
    legacy.seed(6)

    def program(rank: int) -> list[float]:
        start()
        os.environ["OWN"] = str(rank)
        sys.argv = ["program", str(rank)]
        os.chdir("/" if rank else "/tmp")
        torch.set_default_dtype(torch.float64 if rank else torch.float32)
        torch.use_deterministic_algorithms(rank == 1)
        drawn: list[float] = []
        dist.barrier()
        for draw in (lambda: torch.rand(1, dtype=torch.float32).item(), legacy.randn):
            drawn.append(draw())
            dist.barrier()
        drawn += [legacy.randn(), random.random()]
        dist.barrier()
        assert os.environ["OWN"] == os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(rank)
        assert os.environ["WORLD_SIZE"] == "3"
        assert sys.argv == ["program", str(rank)]
        assert os.getcwd() == ("/" if rank else "/tmp")
        assert torch.zeros(1).dtype == (torch.float64 if rank else torch.float32)
        assert torch.are_deterministic_algorithms_enabled() == (rank == 1)
        assert os.popen("echo $OWN").read().strip() == str(rank)
        return drawn

    assert launch(program, 3) == expected
    after = (os.getcwd(), list(sys.argv), torch.initial_seed(), dict(os.environ))
    assert before[0] == after[0] and before[1] == after[1] and before[3] == after[3]
    assert torch.zeros(1).dtype == torch.float32
    assert not torch.are_deterministic_algorithms_enabled()
    assert [torch.rand(1).item(), legacy.randn()] == own


def test_contexts_of_dtensor_belong_to_the_rank() -> None:
    """torch keeps the operators of loss_parallel once for a process; ranks interleave inside."""
    from torch.distributed.tensor import distribute_tensor
    from torch.distributed.tensor.experimental import implicit_replication
    from torch.distributed.tensor.parallel import loss_parallel

    before = private.dispatcher._custom_op_handlers
    entered = (*before,)

    def program(rank: int) -> None:
        start()
        mesh = dist.init_device_mesh("cpu", (3,))
        logits = distribute_tensor(torch.arange(12.0).reshape(2, 6), mesh, [Shard(1)])
        if rank == 1:  # outside, while the others are inside
            dist.barrier()
            assert (*private.dispatcher._custom_op_handlers,) == entered
            with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
                logits + torch.ones(2, 6)
            dist.barrier()
        else:
            with loss_parallel(), implicit_replication():
                dist.barrier()
                assert len(private.dispatcher._custom_op_handlers) > len(entered)
                logits + torch.ones(2, 6)
                dist.barrier()
        with loss_parallel():
            loss = F.cross_entropy(logits, torch.tensor([1, 2]))
            dist.barrier()
        plain = F.cross_entropy(logits.full_tensor(), torch.tensor([1, 2]))
        torch.testing.assert_close(loss.full_tensor(), plain)

    launch(program, 3)
    assert private.dispatcher._custom_op_handlers is before and (*before,) == entered


def test_nothing_of_a_launch_is_left() -> None:
    world, hook = dist.distributed_c10d._world, sys.excepthook
    threads = busy_threads()
    launch(lambda rank: start() and None, 4)
    assert dist.distributed_c10d._world is world
    assert sys.excepthook is hook
    assert not dist.is_initialized()
    assert until(lambda: busy_threads() <= threads)


def test_launch_arguments() -> None:
    assert launch(lambda rank, a, b: (rank, a, b), 2, (5, "x")) == [(0, 5, "x"), (1, 5, "x")]
    with pytest.raises(TypeError, match="launch needs a function"):
        launch(3, 2)
    with pytest.raises(ValueError, match="ranks=0: expected an integer from 1"):
        launch(print, 0)
    with pytest.raises(ValueError, match="schedule='quick': expected one of"):
        launch(print, 2, schedule="quick")
    with pytest.raises(ValueError, match="reduction='nope': expected an order"):
        launch(print, 2, reduction="nope")
    with pytest.raises(ValueError, match="expected op='sum'"):
        launch(print, 2, reduction=Reduction(op="max"))
    with pytest.raises(GpusimError, match="another launch is running"):
        launch(lambda rank: launch(print, 2), 2)


def test_pmap_runs_in_a_rank() -> None:
    def program(rank: int) -> list[float]:
        start()
        mapped = gpusim.pmap(lambda x: gpusim.lax.psum(x, "i"), "i")(np.arange(3.0) + rank)
        x = torch.from_numpy(np.array(mapped))
        dist.all_reduce(x)
        return x.tolist()

    assert launch(program, 2) == [[9.0] * 3] * 2
