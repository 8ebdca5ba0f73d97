"""The fake CUDA refuses what a GPU refuses, runs kernels as one does, and finds wild accesses."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from tests.cuda import fake_cuda
from tests.oracles.machine_time import PATIENCE

if reason := fake_cuda.why_not():
    pytest.skip(reason, allow_module_level=True)
fake_cuda.install()
cupy = pytest.importorskip("cupy")
runtime = cupy.cuda.runtime


def kernel(code: str, name: str, *options: str) -> Any:
    """A kernel that CuPy compiles without flushing subnormals, unless the options ask for it."""
    cubin, _ = cupy.cuda.compiler.compile_using_nvrtc(code, options)
    module = cupy.cuda.function.Module()
    module.load(cubin)
    return module.get_function(name)


def test_memory_is_checked_by_every_copy() -> None:
    pointer = runtime.malloc(100)
    host = np.arange(100, dtype=np.uint8)
    runtime.memcpy(pointer + 60, host.ctypes.data, 40, runtime.memcpyHostToDevice)
    back = np.zeros(100, np.uint8)
    runtime.memcpy(back.ctypes.data, pointer, 100, runtime.memcpyDeviceToHost)
    assert (back[60:] == host[:40]).all() and (back[:60] == 0xA5).all()  # fresh memory is poisoned
    for target, source, size, kind in (
        (pointer + 61, host.ctypes.data, 40, runtime.memcpyHostToDevice),  # over the end
        (pointer - 1, host.ctypes.data, 40, runtime.memcpyHostToDevice),
        (host.ctypes.data, pointer, 101, runtime.memcpyDeviceToHost),
        (back.ctypes.data, host.ctypes.data, 1, runtime.memcpyDeviceToHost),  # not the device's
        (pointer, back.ctypes.data, 1, runtime.memcpyDeviceToDevice),
    ):
        with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorInvalidValue"):
            runtime.memcpy(target, source, size, kind)
    with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorInvalidValue"):
        runtime.memset(pointer, 0, 101)
    with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorInvalidValue"):
        runtime.free(pointer + 1)
    runtime.free(pointer)
    with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorInvalidValue"):
        runtime.free(pointer)
    with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorInvalidValue"):
        runtime.memcpy(back.ctypes.data, pointer, 1, runtime.memcpyDeviceToHost)


@pytest.mark.parametrize("place", [-1, 25])
def test_writes_beyond_an_array_are_found_when_it_is_freed(place: int) -> None:
    write = kernel('extern "C" __global__ void put(int* x, int at) { x[at] = 7; }', "put")
    pointer = runtime.malloc(100)
    write((1,), (1,), (pointer, np.int32(24)))
    write((1,), (1,), (pointer, np.int32(place)))
    with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorIllegalAddress"):
        runtime.free(pointer)


def test_allocations_fail_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = fake_cuda.machine()
    monkeypatch.setattr(machine, "limit", machine.used[0] + 1500)
    with cupy.cuda.using_allocator(cupy.cuda.MemoryPool().malloc):
        taken = cupy.empty(600, np.uint8)
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
            cupy.empty(600, np.uint8)
        del taken
        cupy.empty(600, np.uint8)


def test_numbers_and_structs_are_passed_by_value() -> None:
    code = """
    struct Two { double first; long long second; };
    extern "C" __global__ void add(double* out, const Two two, float third, signed char fourth) {
      out[threadIdx.x] = two.first + two.second + third + fourth + blockIdx.x;
    }"""
    two = np.array([(0.5, 1 << 40)], [("first", "f8"), ("second", "i8")]).view("V16")
    out = cupy.zeros(3)
    kernel(code, "add")((1,), (3,), (out, two, np.float32(0.25), np.int8(-3)))
    assert out.tolist() == [(1 << 40) - 2.25] * 3


def test_indices_of_grids_and_blocks() -> None:
    code = """
    extern "C" __global__ void count(int* out) {
      int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
      int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
      ++out[block * blockDim.x * blockDim.y * blockDim.z + thread];
    }"""
    out = cupy.zeros(2 * 3 * 4 * 5 * 6 * 7, np.int32)
    kernel(code, "count")((2, 3, 4), (5, 6, 7), (out,))
    assert bool((out == 1).all())


BARRIERS = """
extern "C" __global__ void turn(const int* x, int* y, int n) {
  __shared__ int part[64];
  for (int begin = 0; begin < n; begin += blockDim.x) {
    part[threadIdx.x] = x[begin + threadIdx.x];
    __syncthreads();
    y[begin + threadIdx.x] = part[blockDim.x - 1 - threadIdx.x];
    __syncthreads();
  }
}
extern "C" __global__ void total(const int* x, int* y) {
  int sum = x[threadIdx.x];
  for (int step = 16; step; step /= 2) sum += __shfl_down_sync(~0u, sum, step);
  __shared__ int warps[2];
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
  __syncthreads();
  y[threadIdx.x] = warps[0] + warps[1] + __shfl_xor_sync(~0u, x[threadIdx.x], 1);
}
extern "C" __global__ void apart(int* x) {
  if (threadIdx.x) __syncthreads(); else __syncwarp();
}"""


def test_threads_meet_at_barriers_and_exchange_values() -> None:
    x = cupy.arange(640, dtype=np.int32)
    y = cupy.zeros(640, np.int32)
    kernel(BARRIERS, "turn")((1,), (64,), (x, y, np.int32(640)))
    assert y.get().reshape(10, 64)[:, ::-1].reshape(-1).tolist() == list(range(640))
    kernel(BARRIERS, "total")((1,), (64,), (x, y))
    assert y[:64].tolist() == [63 * 32 + (k ^ 1) for k in range(64)]


def test_a_barrier_that_some_threads_never_reach_is_an_error() -> None:
    with pytest.raises(cupy.cuda.driver.CUDADriverError, match="LAUNCH_FAILED"):
        kernel(BARRIERS, "apart")((1,), (64,), (cupy.zeros(1, np.int32),))


SUM = 'extern "C" __global__ void sum(const {0}* x, {0}* y) {{ *y = x[0] + x[1]; }}'


@pytest.mark.parametrize(
    ("dtype", "options", "kept"),
    [
        ("float", (), True),
        ("float", ("-ftz=true",), False),
        ("float", ("--ftz=false", "-ftz=true"), False),  # NVRTC takes the last one
        ("float", ("-ftz=true", "--ftz=false"), True),
        ("double", ("-ftz=true",), True),  # which is about float32
    ],
)
def test_subnormals_are_flushed_where_the_last_option_says_so(
    dtype: str, options: tuple[str, ...], kept: bool
) -> None:
    values = {"float": np.float32(1e-40), "double": np.float64(1e-310)}
    x = cupy.asarray(np.stack([values[dtype]] * 2))
    y = cupy.ones(1, x.dtype)
    kernel(SUM.format(dtype), "sum", *options)((1,), (1,), (x, y))
    assert (y.get()[0] == 2 * values[dtype]) == kept and (y.get()[0] == 0) != kept


def test_cupys_own_kernels_flush_as_on_a_gpu_and_sum_as_numpy_does() -> None:
    x = np.float32([1e-40, 1.5])
    assert (cupy.asarray(x) + cupy.asarray(x)).tolist() == [0, 3]
    for dtype in ("int32", "float16", "float32", "float64", "complex64", "bool"):
        values = (np.arange(5000) % 60).astype(dtype).reshape(5, 1000)
        there = cupy.asarray(values)
        assert (there.sum(1).get() == values.sum(1)).all()  # exact, in any order
        assert there.max().get() == values.max() and int(there.argmax()) == int(values.argmax())


def test_devices_have_memory_streams_and_events_of_their_own() -> None:
    assert runtime.getDeviceCount() == 2
    with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorInvalidDevice"):
        cupy.cuda.Device(2).use()
    with cupy.cuda.Device(1):
        theirs, stream, event = cupy.arange(3), cupy.cuda.Stream(), cupy.cuda.Event()
    assert theirs.device.id == 1 and runtime.pointerGetAttributes(theirs.data.ptr).device == 1
    mine = cupy.zeros(3, theirs.dtype)
    mine.data.copy_from_device(theirs.data, mine.nbytes)  # between devices
    assert mine.tolist() == [0, 1, 2]
    with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorInvalidResourceHandle"):
        event.record(cupy.cuda.Stream())
    add = kernel('extern "C" __global__ void one(int* x) { *x = 1; }', "one")
    with pytest.raises(cupy.cuda.driver.CUDADriverError, match="INVALID_HANDLE"):
        add((1,), (1,), (mine,), stream=stream)


def test_events_measure_time_in_milliseconds() -> None:
    first, last = cupy.cuda.Event(), cupy.cuda.Event()
    first.record()
    cupy.arange(100_000).sum()
    last.record()
    assert 0 < cupy.cuda.get_elapsed_time(first, last) < 60_000
    with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorInvalidResourceHandle"):
        cupy.cuda.get_elapsed_time(first, cupy.cuda.Event(disable_timing=True))


def test_launches_and_programs_that_a_gpu_refuses() -> None:
    put = kernel('extern "C" __global__ void put(int* x) { *x = 7; }', "put")
    x = cupy.zeros(1, np.int32)
    for grid, block in (((1,), (1025,)), ((1, 65536), (1,)), ((1,), (1, 1, 65))):
        with pytest.raises(cupy.cuda.driver.CUDADriverError, match="INVALID_VALUE"):
            put(grid, block, (x,))
    with pytest.raises(cupy.cuda.driver.CUDADriverError, match="INVALID_VALUE"):
        put((1,), (1,), (x,), shared_mem=232449)
    with pytest.raises(cupy.cuda.driver.CUDADriverError, match="INVALID_IMAGE"):
        cupy.cuda.function.Module().load(b"\x7fELF a cubin for another machine")
    with pytest.raises(cupy.cuda.compiler.CompileException, match="not_declared"):
        kernel('extern "C" __global__ void bad(int* x) { *x = not_declared; }', "bad")
    with pytest.raises(cupy.cuda.compiler.CompileException, match="--surprise"):
        kernel('extern "C" __global__ void put(int* x) { *x = 7; }', "put", "--surprise")
    with pytest.raises(cupy.cuda.driver.CUDADriverError, match="NOT_FOUND"):
        kernel('extern "C" __global__ void put(int* x) { *x = 7; }', "other")


def test_functions_that_are_not_there_are_named() -> None:
    with pytest.raises(NotImplementedError, match="the fake CUDA has no memAdvise"):
        runtime.memAdvise(0, 0, 0, 0)
    with pytest.raises(NotImplementedError, match=r"the fake CUDA has no cublas\.strsm"):
        cupy.cuda.cublas.strsm(*[0] * 12)


def test_a_module_runs_on_it_as_python_runs_one() -> None:
    command = [sys.executable, "-m", "tests.cuda.fake_cuda", "tests.cuda.fake_cuda.about"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.stdout == "Fake GPU 2 [0, 1, 2]\n", done.stderr
    assert not done.stderr  # also when Python ends


def test_integers_divided_by_zero_end_the_launch() -> None:
    for barrier in ("", "__syncthreads();"):
        code = f'extern "C" __global__ void part(int* x, int by) {{ {barrier} x[0] = 7 / by; }}'
        divide, x = kernel(code, "part"), cupy.zeros(1, np.int32)
        with pytest.raises(cupy.cuda.driver.CUDADriverError, match="LAUNCH_FAILED"):
            divide((1,), (2,), (x, np.int32(0)))
        divide((1,), (2,), (x, np.int32(2)))
        assert x.get() == 3


def test_nvrtc_itself_is_asked_what_is_wrong_with_a_source() -> None:
    pytest.importorskip("nvidia.cu13", reason="needs NVRTC: pip install nvidia-cuda-nvrtc")
    with pytest.raises(cupy.cuda.compiler.CompileException, match="1 error detected in the comp"):
        kernel('extern "C" __global__ void f(float* x) { x[0] = 1.5 % 2; }', "f")
    # NVRTC takes what g++ does not: then the fake is to blame, and says only what g++ says.
    with pytest.raises(cupy.cuda.compiler.CompileException) as caught:
        kernel(
            'extern "C" __global__ void f(int* x) { asm("mov.u32 %0, %%laneid;" : "=r"(*x)); }', "f"
        )
    assert "g++" in str(caught.value) and "detected in the comp" not in str(caught.value)
