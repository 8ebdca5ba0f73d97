"""Triton's kernels on ranks whose GPUs the host plays. Torch's builds for GPUs bring Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.torch.children import needs_linux

pytest.importorskip("triton")
pytestmark = needs_linux

PROGRAM = """
    import torch, torch.distributed as dist, triton, triton.language as tl

    DEVICE = triton.runtime.driver.active.get_active_torch_device()

    @triton.jit
    def double(x, n, B: tl.constexpr):
        at = tl.program_id(0) * B + tl.arange(0, B)
        tl.store(x + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)

    @triton.autotune(configs=[triton.Config({"B": size}) for size in (4, 8)], key=["n"])
    @triton.jit
    def tuned(x, n, B: tl.constexpr):
        at = tl.program_id(0) * B + tl.arange(0, B)
        tl.store(x + at, tl.load(x + at, mask=at < n) * B, mask=at < n)

    dist.init_process_group("nccl")
    x = torch.arange(3.0, device=DEVICE) + dist.get_rank()
    assert x.device == DEVICE == torch.device("cuda", torch.cuda.current_device())
"""


def torchrun(folder: Path, more: str, *, interpret: bool) -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(dedent(PROGRAM) + dedent(more))
    return subprocess.run(
        [sys.executable, *"-m gpusim torchrun -q --device cpu --ranks 2".split(), str(script)],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": str(int(interpret))},
    )


def test_kernels_are_defined_and_nothing_is_said(tmp_path: Path) -> None:
    done = torchrun(tmp_path, "dist.barrier()", interpret=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("launch", "kernel", "line"),
    [("double[(1,)](x, 3, 8)", "double", 6), ("tuned[(1,)](x, 3)", "tuned", 11)],
)
def test_a_launch_is_refused(launch: str, kernel: str, line: int, tmp_path: Path) -> None:
    done = torchrun(tmp_path, launch, interpret=False)
    assert done.returncode == 1
    said = f"the launch of the Triton kernel {kernel} ({tmp_path / 'train.py'}:{line}) needs a GPU"
    assert said in done.stderr and "TRITON_INTERPRET=1" in done.stderr


def test_a_question_to_the_driver_is_refused(tmp_path: Path) -> None:
    more = """
        driver = triton.runtime.driver.active
        assert driver.get_current_target().backend == "cuda"
        assert driver.get_current_device() == 0 and not hasattr(driver, "utils")
        driver.get_benchmarker()
    """
    done = torchrun(tmp_path, more, interpret=False)
    assert done.returncode == 1
    assert "triton's driver.active.get_benchmarker needs a GPU" in done.stderr


def test_triton_interprets_kernels(tmp_path: Path) -> None:
    more = """
        y = x.clone()
        double[(1,)](x, 3, 8)
        tuned[(1,)](y, 3)  # by its first configuration, without a measurement
        assert x.tolist() == [2 * (each + dist.get_rank()) for each in range(3)]
        assert y.tolist() == [4 * (each + dist.get_rank()) for each in range(3)]
        dist.all_reduce(x)
        assert x.tolist() == [2, 6, 10]
    """
    done = torchrun(tmp_path, more, interpret=True)
    assert done.returncode == 0, done.stderr
