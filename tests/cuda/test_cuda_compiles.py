"""The CUDA sources compile for GPUs, where there is a compiler, and the main kernels do not spill.
`python -m gpusim.cuda.report` compiles all of them for all architectures."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gpusim.cuda import compile as compiling
from gpusim.cuda import report, templates
from gpusim.cuda.device import Kernel
from tests.oracles.budget import slow
from tests.oracles.machine_time import PATIENCE

needs_compiler = pytest.mark.skipif(
    compiling.compiler() is None, reason="neither nvcc nor the wheel nvidia-cuda-nvrtc is installed"
)


def main_kernels(unit: str) -> list[Kernel]:
    """The sums that have targets of speed: partial results in float32, or rounded to float16."""
    parts = {k: k.name.partition("<")[2].split(", ") for k in templates.units()[unit]}
    return [
        kernel
        for kernel, (_, computing, step, _, _, sums, *_) in parts.items()
        if computing == "float" and step in ("EXACT", "FLOAT16") and sums == "true"
    ]


CASES = [
    ("sm_80", "fold float16"),
    ("sm_90", "fold float8_e4m3fn"),
    *slow(("sm_75", "fold bfloat16"), ("sm_100", "fold float32")),
]


@needs_compiler
@pytest.mark.parametrize(("architecture", "unit"), CASES)
def test_the_main_folds_compile_and_do_not_spill(architecture: str, unit: str) -> None:
    kernels = main_kernels(unit)
    assert len(kernels) >= 10
    for kernel, needs in compiling.resources(kernels, architecture).items():
        assert (needs.stack, needs.spill_stores, needs.spill_loads) == (0, 0, 0), kernel
        assert needs.registers <= 168, kernel  # at least twelve warps on a multiprocessor


@needs_compiler
@pytest.mark.parametrize(
    ("architecture", "unit"),
    [
        ("sm_75", "logical"),
        ("sm_90", "ragged"),
        *slow(("sm_80", "round"), ("sm_100", "fold int16")),
    ],
)
def test_the_other_kernels_compile_and_do_not_spill(architecture: str, unit: str) -> None:
    for kernel, needs in compiling.resources(templates.units()[unit], architecture).items():
        assert needs.spill_stores == 0, kernel


@needs_compiler
def test_what_does_not_compile_is_an_error_with_the_compilers_words() -> None:
    with pytest.raises(RuntimeError, match="float17"):
        compiling.resources([Kernel("round.cu", "round_to<float17, float, 8>")], "sm_90")


@needs_compiler
def test_the_report_has_a_line_for_each_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--arch", "sm_90", "--unit", "ragged"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(templates.units()["ragged"])
    assert "ragged_copy<uint4, 4>" in lines[-1] and lines[-1].split()[3:5] == ["0", "0"]


def test_without_cupy_a_gpu_array_is_told_what_to_install() -> None:
    program = """
import sys
sys.modules["cupy"] = None
from gpusim.collectives.kernels import kernels
class OnGpu:
    __cuda_array_interface__ = {}
try:
    kernels(OnGpu()).fold(OnGpu())
except ImportError as error:
    assert "gpusim[cuda13]" in str(error), error
else:
    raise AssertionError
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE)
