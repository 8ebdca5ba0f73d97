"""The CUDA sources compile for GPUs, where there is a compiler, and the main kernels do not spill.
`python -m gpusim.cuda.report` compiles all of them for all architectures."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from gpusim.cuda import compile as compiling
from gpusim.cuda import report, sass, templates
from gpusim.cuda.device import Kernel
from tests.cuda import fake_cuda
from tests.oracles.budget import slow
from tests.oracles.machine_time import PATIENCE

ROOT = Path(__file__).parents[2]
# Not CuPy's NVRTC, which the fake CUDA may have replaced in this process.
needs_nvcc = pytest.mark.skipif(not shutil.which("nvcc"), reason="nvcc is not installed")


@pytest.fixture(autouse=True)
def nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiling, "compiler", lambda: "nvcc" if shutil.which("nvcc") else None)


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


@needs_nvcc
@pytest.mark.parametrize(("architecture", "unit"), CASES)
def test_the_main_folds_compile_and_do_not_spill(architecture: str, unit: str) -> None:
    kernels = main_kernels(unit)
    assert len(kernels) >= 10
    for kernel, needs in compiling.resources(kernels, architecture).items():
        assert (needs.stack, needs.spill_stores, needs.spill_loads) == (0, 0, 0), kernel
        assert needs.registers <= 168, kernel  # at least twelve warps on a multiprocessor


@needs_nvcc
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


needs_disassembler = pytest.mark.skipif(
    sass.disassembler() is None, reason="nvdisasm is not installed (nvidia-cuda-nvdisasm)"
)


def listings(kernels: list[Kernel], architecture: str, folder: Path) -> dict[Kernel, str]:
    """The machine code of kernels that do not spill."""
    cubin = folder / "unit.cubin"
    for kernel, needs in compiling.resources(kernels, architecture, cubin).items():
        assert (needs.stack, needs.spill_stores, needs.spill_loads) == (0, 0, 0), kernel
        wide = (
            kernel.name.endswith("SEQUENCE, true, 4, 8>") or "SEQUENCE, true, 8, 8>" in kernel.name
        )
        warps = report.warps(kernel, needs.registers, architecture)
        assert warps >= (24 if wide else 16), (kernel, needs)
    text = sass.listing(cubin)
    return {kernel: text[compiling.mangled(kernel)] for kernel in kernels}


WIDE = [
    Kernel("fold.cu", f"fold<{source}, float, {step}, false, SEQUENCE, true, {chunk}, 8>")
    for source, step, chunk in (
        ("float32", "EXACT", 4),
        ("float16", "FLOAT16", 8),
        ("bfloat16", "EXACT", 8),
    )
]


@needs_nvcc
@needs_disassembler
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_eight_members_are_in_flight_at_once(architecture: str, tmp_path: Path) -> None:
    """In the loop over batches, and in the last batch, which may have fewer members."""
    for kernel, text in listings(WIDE, architecture, tmp_path).items():
        wide = [batch for batch in sass.batches(text) if batch.bytes == 16]
        loops = [batch.loads for batch in wide if batch.loops]
        assert loops and min(loops) == 8, (kernel, wide)
        assert [batch.loads for batch in wide if not batch.loops].count(8) >= 1, (kernel, wide)


@needs_nvcc
@needs_disassembler
@pytest.mark.parametrize("architecture", ["sm_90", *slow("sm_80", "sm_100")])
def test_the_main_wires_do_not_spill_and_keep_memory_busy(
    architecture: str, tmp_path: Path
) -> None:
    for number, kernels in enumerate(templates.main_sends().values()):
        for kernel, needs in compiling.resources(
            kernels, architecture, cubin := tmp_path / f"{number}.cubin"
        ).items():
            assert (needs.stack, needs.spill_stores, needs.spill_loads) == (0, 0, 0), kernel
            chain = kernel.source == "chain.cu"
            assert needs.registers <= (80 if chain else 128), kernel  # 24 warps, and 16
            text = sass.listing(cubin)[compiling.mangled(kernel)]
            wide = [each.loads for each in sass.batches(text) if each.bytes == 16 and each.loops]
            ahead = int(kernel.name.rstrip(">").rpartition(", ")[2]) if chain else 1
            assert max(wide) == ahead, (kernel, wide)


@needs_nvcc
@needs_disassembler
@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_the_main_folds_keep_memory_busy(architecture: str, tmp_path: Path) -> None:
    kernels = templates.main_folds()
    assert set(WIDE) < set(kernels)
    for kernel, text in listings(kernels, architecture, tmp_path).items():
        wide = [batch for batch in sass.batches(text) if batch.bytes == 16 and batch.loops]
        if kernel.name.endswith(", 16>"):
            assert sass.copies(text) >= 16, kernel
        elif kernel.name.endswith(", 8>"):
            # Trees of any graph load one member at a time.
            assert max(batch.loads for batch in wide) == 8, (kernel, wide)
            assert "TREE" in kernel.name or min(batch.loads for batch in wide) == 8, (kernel, wide)


@needs_nvcc
@needs_disassembler
def test_pairs_of_float16_are_added_at_once(tmp_path: Path) -> None:
    """Members of 8 bits too: from sm_89 on, an instruction converts two."""
    kernel = Kernel("fold.cu", "fold<float8_e4m3fn, float, FLOAT16, false, SEQUENCE, true, 4, 16>")
    (text,) = listings([kernel], "sm_90", tmp_path).values()
    names = Counter(each.name.split(".")[0] for each in sass.instructions(text))
    converted = sum("E4M3" in each.name for each in sass.instructions(text))
    # Pairs of 16 members, in the whole batch and in the last one; no addition of float32s.
    assert names["HADD2"] + names["HFMA2"] >= 64 <= converted and names["FADD"] < 16, names


@needs_nvcc
def test_what_does_not_compile_is_an_error_with_the_compilers_words() -> None:
    with pytest.raises(RuntimeError, match="float17"):
        compiling.resources([Kernel("round.cu", "round_to<float17, float, 8>")], "sm_90")


@needs_nvcc
def test_no_operation_flushes_subnormal_numbers_or_is_fused(tmp_path: Path) -> None:
    kernels = [
        Kernel("fold.cu", "fold<float32, float, EXACT, false, SEQUENCE, true, 4, 8>"),
        Kernel("fold.cu", "fold<float8_e4m3fn, float, FLOAT16, false, TREE, true, 16, 8>"),
    ]
    source = tmp_path / "unit.cu"
    source.write_text(compiling.translation_unit(kernels))

    def ptx(*more: str) -> str:
        command = ["nvcc", "-ptx", "-arch=sm_90", *compiling.OPTIONS, f"-I{compiling.SOURCES}"]
        command += [*more, str(source), "-o", str(source.with_suffix(".ptx"))]
        subprocess.run(command, check=True, timeout=PATIENCE)
        return source.with_suffix(".ptx").read_text()

    text = ptx()
    assert "add.rn.f32" in text and ".ftz" not in text and "fma.rn.f32" not in text
    assert ".ftz" in ptx("-ftz=true")  # which this test would notice


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
def test_nvrtc_compiles_without_a_gpu() -> None:
    """In a process of its own: in this one CuPy may run on the fake CUDA, whose NVRTC is g++."""
    environment = {k: v for k, v in os.environ.items() if k != fake_cuda.SWITCH}
    environment["GPUSIM_TESTS"] = "area"  # all tests, whatever the share of this folder's is
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-rs", "tests/cuda/nvrtc_checks.py"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stdout + done.stderr
    if "4 passed" not in done.stdout:
        pytest.skip(f"NVRTC is not installed: {done.stdout}")


def test_the_page_on_gpus_has_the_number_of_kernels() -> None:
    count = sum(map(len, templates.units().values()))
    assert f"of all {count}." in (ROOT / "docs" / "cuda.md").read_text()


@needs_nvcc
def test_the_report_has_a_line_for_each_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--arch", "sm_90", "--unit", "ragged"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(templates.units()["ragged"])
    assert "ragged_copy<uint4, 4>" in lines[-1] and lines[-1].split()[3:5] == ["0", "0"]
    assert ("4x16" in lines[-1]) == (sass.disassembler() is not None)


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
