"""The kernels compiled by NVRTC, through CuPy: for test_cuda_compiles.py, which runs this file."""

from __future__ import annotations

import struct

import pytest

from gpusim.cuda import compile as compiling
from gpusim.cuda import report
from gpusim.cuda.device import Kernel


@pytest.fixture(autouse=True)
def nvrtc() -> None:
    """CuPy with a real NVRTC. It is not imported with this file: doctests import every file."""
    try:
        pytest.importorskip("cupy").cuda.nvrtc.getVersion()
    except RuntimeError as error:  # CuPy does not find the library
        pytest.skip(str(error))


def test_nvrtcs_machine_code_is_whole() -> None:
    kernel = Kernel("fold.cu", "fold<float32, float, EXACT, false, SEQUENCE, true, 4, 8>")
    for architecture in compiling.ARCHITECTURES:
        cubin, _ = compiling.with_nvrtc(compiling.translation_unit([kernel]), architecture)
        # An ELF file of 64 bits: its last part is the table of segments.
        (table,) = struct.unpack_from("<Q", cubin, 32)
        size, count = struct.unpack_from("<2H", cubin, 54)
        assert cubin.startswith(b"\x7fELF") and len(cubin) == table + size * count
        assert compiling.mangled(kernel).encode() in cubin


@pytest.mark.parametrize(("architecture", "spilled"), [("sm_90", 0), ("sm_100", 64)])
def test_launches_have_registers_enough(architecture: str, spilled: int) -> None:
    """A launch's compiler is NVRTC; its version 13.0 spills a few bytes of two trees on sm_100."""
    parts = (
        "float32, float, EXACT, false, TREE, true, 4, 8",
        "float16, float, FLOAT16, false, TREE, true, 8, 8",
        "bfloat16, float, EXACT, false, SEQUENCE, true, 8, 8",
        "float16, float, FLOAT16, true, SEQUENCE, true, 8, 1",
    )
    kernels = [Kernel("fold.cu", f"fold<{part}>") for part in parts]
    for kernel, needs in compiling.resources(kernels, architecture).items():
        assert max(needs.spill_stores, needs.spill_loads) <= spilled, kernel
        assert report.warps(kernel, needs.registers, architecture) >= 16, kernel


def test_nvrtc_reports_resources() -> None:
    kernel = Kernel("ragged.cu", "ragged_check")
    assert compiling.compiler() == "nvrtc"
    assert compiling.resources([kernel], "sm_90")[kernel].registers > 8
    with pytest.raises(RuntimeError, match="float17"):
        compiling.resources([Kernel("round.cu", "round_to<float17, float, 8>")], "sm_90")
