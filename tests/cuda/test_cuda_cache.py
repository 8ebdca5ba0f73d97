"""Kernels are compiled once in a process, kept on disk, and never flush subnormal numbers."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpusim.cuda import cache, launch
from gpusim.cuda import compile as compiling
from gpusim.cuda.device import Kernel
from tests.cuda import device_arrays
from tests.cuda.host_cuda.device import HostDevice
from tests.cuda.host_cuda.driver import Nvrtc
from tests.oracles.machine_time import PATIENCE

KEY = "key.cubin"
KERNEL = Kernel("round.cu", "round_to<float16, float, 16>")
OTHER = Kernel("ragged.cu", "ragged_check")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.ENVIRONMENT, str(tmp_path / "some" / "cache"))
    return tmp_path / "some" / "cache"


class Maker:
    """Makes a content, and counts."""

    def __init__(self, content: bytes = b"machine code") -> None:
        self.content, self.made = content, 0

    def __call__(self) -> bytes:
        self.made += 1
        return self.content


# In a process


def test_threads_that_need_one_result_wait_for_the_one_that_makes_it() -> None:
    everyone, calls = threading.Barrier(12), []

    @cache.once
    def made(key: int) -> object:
        calls.append(key)
        return object()

    def ask(_: int) -> object:
        everyone.wait(PATIENCE)
        return made(3)

    with ThreadPoolExecutor(12) as pool:
        results = set(pool.map(ask, range(12)))
    assert calls == [3] and len(results) == 1
    made.cache_clear()
    assert made(3) not in results


def test_different_results_are_made_in_parallel() -> None:
    meeting = threading.Barrier(4)
    made = cache.once(lambda key: meeting.wait(PATIENCE))  # breaks unless all four are in it
    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(made, range(4))) == [0, 1, 2, 3]


def test_an_error_is_not_kept() -> None:
    outcomes: Iterator[Any] = iter([ValueError("busy"), 5])

    @cache.once
    def made() -> int:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    with pytest.raises(ValueError, match="busy"):
        made()
    assert made() == made() == 5


# On disk


def test_a_file_is_made_once_in_a_folder_of_the_users_own(folder: Path) -> None:
    make = Maker()
    assert cache.cached(KEY, make) == cache.cached(KEY, make) == b"machine code"
    assert make.made == 1
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in folder.iterdir()] == [KEY]  # and no drafts


@pytest.mark.parametrize("kept", [0, 5, 31, 32, 40, -1])
def test_a_truncated_file_is_made_anew(folder: Path, kept: int) -> None:
    cache.cached(KEY, Maker())
    path, make = folder / KEY, Maker()
    path.write_bytes(path.read_bytes()[:kept])
    assert cache.cached(KEY, make) == b"machine code" and make.made == 1
    assert cache.cached(KEY, make) == b"machine code" and make.made == 1  # it is whole again


def test_a_damaged_file_is_made_anew(folder: Path) -> None:
    cache.cached(KEY, Maker())
    path, make = folder / KEY, Maker()
    content = bytearray(path.read_bytes())
    content[3] ^= 1
    path.write_bytes(content)
    assert cache.cached(KEY, make) == b"machine code" and make.made == 1


def test_where_nothing_can_be_kept_it_is_made_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder" / KEY).mkdir(parents=True, mode=0o700)  # in place of the file
    (tmp_path / "shared").mkdir(mode=0o700)
    (tmp_path / "shared").chmod(0o777)  # others could put their machine code there
    for place in (tmp_path / "file" / "below", tmp_path / "folder", tmp_path / "shared", ""):
        monkeypatch.setenv(cache.ENVIRONMENT, str(place))
        make = Maker()
        assert cache.cached(KEY, make) == cache.cached(KEY, make) == b"machine code"
        assert make.made == 2
    assert not list((tmp_path / "shared").iterdir())


def test_the_folder_is_the_users_folder_of_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cache.ENVIRONMENT, raising=False)
    monkeypatch.setenv("HOME", "/home/user")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert cache.folder() == Path("/caches/gpusim")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the standard
    assert cache.folder() == Path("/home/user/.cache/gpusim")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as without a home
    assert cache.folder() is None
    make = Maker()
    assert cache.cached(KEY, make) == b"machine code" and make.made == 1


def _compete(place: str, start: Any, results: Any) -> None:
    os.environ[cache.ENVIRONMENT] = place
    start.wait(PATIENCE)
    for number in range(50):
        content = bytes([number]) * 100_000
        assert cache.cached(f"{number}.cubin", lambda content=content: content) == content
    results.put(True)


def test_processes_may_write_the_same_file(folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start, results = context.Barrier(3), context.Queue()
    workers = [
        context.Process(target=_compete, args=(str(folder), start, results)) for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert {path.name for path in folder.iterdir()} == {f"{n}.cubin" for n in range(50)}


# Kernels


@pytest.fixture
def nvrtc(folder: Path) -> Iterator[Nvrtc]:
    """The stand-in's NVRTC, from a process that has compiled nothing but what the check needs."""
    with device_arrays.installed():
        os.environ[cache.ENVIRONMENT] = str(folder)
        import cupy

        cupy.cuda.nvrtc.compiled.clear()
        yield cupy.cuda.nvrtc


def anew(kernel: Kernel = KERNEL, architecture: str = "sm_90") -> bytes:
    """The machine code, as another process would get it."""
    compiling.machine_code.cache_clear()
    compiling._sources_digest.cache_clear()
    return compiling.machine_code(kernel, architecture)


def test_another_process_finds_the_machine_code(nvrtc: Nvrtc) -> None:
    first = anew()
    assert first.endswith(b"\0")  # which CuPy drops
    assert anew() == first and len(nvrtc.compiled) == 1
    anew(OTHER)
    assert len(nvrtc.compiled) == 2


def test_other_sources_options_architectures_and_compilers_are_compiled(
    nvrtc: Nvrtc, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    anew()
    changed = tmp_path / "sources"
    changed.mkdir()
    for path in compiling.SOURCES.glob("*.cu*"):
        (changed / path.name).write_bytes(path.read_bytes())
    (changed / "philox.cuh").write_text("// another\n")
    changes = [
        ("SOURCES", changed),
        ("OPTIONS", (*compiling.OPTIONS, "--extra-device-vectorization")),
    ]
    for number, (name, value) in enumerate(changes, start=2):
        with monkeypatch.context() as patch:
            patch.setattr(compiling, name, value)
            anew()
            assert len(nvrtc.compiled) == number
    monkeypatch.setattr(nvrtc, "getVersion", lambda: (13, 1))
    anew()
    assert len(nvrtc.compiled) == 4
    anew()
    assert len(nvrtc.compiled) == 4


def test_threads_compile_a_kernel_once(nvrtc: Nvrtc) -> None:
    x = device_arrays.to_device(np.ones((3, 40), np.float16))
    everyone = threading.Barrier(12)

    def fold(_: int) -> Any:
        everyone.wait(PATIENCE)
        return launch.fold(x, order="tree").get()

    with ThreadPoolExecutor(12) as pool:
        assert {found.tobytes() for found in pool.map(fold, range(12))} == {
            np.full(40, 3, np.float16).tobytes()
        }
    assert len(nvrtc.compiled) == 1


def test_the_last_word_on_flushing_is_ours(nvrtc: Nvrtc) -> None:
    anew()
    ((_, options),) = nvrtc.compiled
    assert [option for option in options if "ftz" in option or "fast" in option] == ["-ftz=false"]


@pytest.mark.parametrize(("version", "has_cache"), [((12, 8), False), ((12, 9), True)])
def test_nvrtcs_own_cache_is_left_out(
    version: tuple[int, int], has_cache: bool, nvrtc: Nvrtc, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvrtc, "getVersion", lambda: version)
    anew()
    ((_, options),) = nvrtc.compiled
    assert ("--no-cache" in options) is has_cache


def test_what_does_not_compile_is_an_error_with_nvrtcs_words(
    nvrtc: Nvrtc, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(program: int, options: Any) -> None:
        raise nvrtc.NVRTCError("NVRTC_ERROR_COMPILATION (6)")

    monkeypatch.setattr(nvrtc, "compileProgram", refuse)
    monkeypatch.setattr(nvrtc, "getProgramLog", lambda program: "unit.cu(1): error: float17")
    with pytest.raises(RuntimeError, match=r"NVRTC for sm_90: NVRTC_ERROR_COMPILATION[\s\S]*17"):
        anew()
    assert not nvrtc._programs  # each is destroyed


# Subnormal numbers


class Flushing(HostDevice):
    """A device whose kernels write zeros for the subnormal numbers of float32."""

    def __init__(self, below: float, source: str) -> None:
        super().__init__()
        self.below, self.source = below, source
        self.written: list[np.ndarray] = []

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        self.written.append(super().empty(shape, dtype))
        return self.written[-1]

    def run(self, launch: launch.Launch) -> None:
        super().run(launch)
        out = self.written[-1]
        if launch.kernel.source == self.source:
            out[np.abs(out) < self.below] = 0


@pytest.mark.parametrize("source", ["fold.cu", "round.cu"])
def test_a_device_that_flushes_is_refused(source: str) -> None:
    launch.require_subnormals(HostDevice(), "GPU 3")
    # 2^-126 is float32's smallest normal number, 2^-6 that of e4m3fn.
    device = Flushing(2.0**-126 if source == "fold.cu" else 2.0**-6, source)
    with pytest.raises(RuntimeError, match=r"GPU 3 flush subnormal.*-ftz=false.*GPUSIM_CACHE_DIR"):
        launch.require_subnormals(device, "GPU 3")


def test_no_result_leaves_a_device_that_flushes(monkeypatch: pytest.MonkeyPatch) -> None:
    def flush(device: Any, name: str) -> None:
        raise RuntimeError(f"the kernels of {name} flush subnormal numbers")

    with device_arrays.installed():
        x = device_arrays.to_device(np.ones((3, 4), np.float32))
        monkeypatch.setattr(launch, "require_subnormals", flush)
        launch._checked.cache_clear()
        for call in (
            lambda: launch.fold(x),
            lambda: launch.round_to(x, np.float16),
            lambda: launch.ragged_copy(x, x, np.array([[0, 0, 1, 0, 1]])),
        ):
            for _ in range(2):  # it is asked again: an error is not kept
                with pytest.raises(RuntimeError, match="GPU 0 flush"):
                    call()
