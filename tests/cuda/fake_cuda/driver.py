"""The libraries that CuPy loads itself, libcuda and libnvrtc: each function is a C callback."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import mmap
import threading
import traceback
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_size_t, c_uint, c_void_p
from typing import Any

from . import compiler
from .runtime import CudaError, machine

INVALID_VALUE, INVALID_IMAGE, INVALID_HANDLE, NOT_FOUND, LAUNCH_FAILED = 1, 200, 400, 500, 719
NVRTC_INVALID_PROGRAM, NVRTC_COMPILATION = 4, 6
NAMES = {
    INVALID_VALUE: (b"CUDA_ERROR_INVALID_VALUE", b"invalid argument"),
    2: (b"CUDA_ERROR_OUT_OF_MEMORY", b"out of memory"),
    INVALID_IMAGE: (b"CUDA_ERROR_INVALID_IMAGE", b"device kernel image is invalid"),
    INVALID_HANDLE: (b"CUDA_ERROR_INVALID_HANDLE", b"invalid resource handle"),
    NOT_FOUND: (b"CUDA_ERROR_NOT_FOUND", b"named symbol not found"),
    700: (b"CUDA_ERROR_ILLEGAL_ADDRESS", b"an illegal memory access was encountered"),
    LAUNCH_FAILED: (b"CUDA_ERROR_LAUNCH_FAILED", b"unspecified launch failure"),
    801: (b"CUDA_ERROR_NOT_SUPPORTED", b"operation not supported by the fake CUDA"),
    999: (b"CUDA_ERROR_UNKNOWN", b"unknown error"),
}
MAX_THREADS, MAX_SHARED = 1024, 232448


over: list[bool] = []
atexit.register(over.append, True)


class Library:
    """What `ctypes.CDLL` gives CuPy: attributes that are C functions, returning 0 or an error."""

    def __init__(self, prefix: str, unknown: int) -> None:
        self._prefix, self._unknown = prefix, unknown

    def add(self, *types: Any, result: Any = c_int) -> Callable[[Any], Any]:
        ended = over

        def wrap(function: Callable[..., Any]) -> Any:
            def guarded(*arguments: Any) -> Any:
                if ended:  # CuPy's last objects go after Python has taken this module apart
                    return 0
                try:
                    found = function(*arguments)
                    return 0 if found is None else found
                except CudaError as error:
                    return error.status
                except Exception:
                    traceback.print_exc()
                    return self._unknown

            setattr(self, function.__name__, ctypes.CFUNCTYPE(result, *types)(guarded))
            return function

        return wrap


cuda = Library("cu", 999)
_handles = itertools.count(1 << 20)
_modules: dict[int, ctypes.CDLL] = {}
_functions: dict[int, tuple[ctypes.CDLL, int, str]] = {}
_launching = threading.Lock()
STACK = 1 << 16


@cuda.add(c_int, POINTER(c_char_p))
def cuGetErrorName(status: int, name: Any) -> None:
    name[0] = NAMES.get(status, NAMES[999])[0]


@cuda.add(c_int, POINTER(c_char_p))
def cuGetErrorString(status: int, text: Any) -> None:
    text[0] = NAMES.get(status, NAMES[999])[1]


@cuda.add(POINTER(c_void_p))
def cuCtxGetCurrent(context: Any) -> None:
    context[0] = machine.device + 1


@cuda.add(POINTER(c_int))
def cuCtxGetDevice(device: Any) -> None:
    device[0] = machine.device


@cuda.add(c_void_p)
def cuCtxSetCurrent(context: int) -> None:
    machine.set_device(context - 1)


@cuda.add(c_int)
def cuDevicePrimaryCtxRelease_v2(device: int) -> None:
    pass


@cuda.add(POINTER(c_void_p), c_void_p)
def cuModuleLoadData(module: Any, image: int) -> None:
    try:
        loaded = compiler.load(image)
    except ValueError as error:
        raise CudaError(INVALID_IMAGE) from error
    module[0] = handle = next(_handles)
    _modules[handle] = loaded


@cuda.add(POINTER(c_void_p), c_char_p)
def cuModuleLoad(module: Any, path: bytes) -> None:
    with open(path, "rb") as file:
        content = ctypes.create_string_buffer(file.read())
    cuModuleLoadData(module, ctypes.addressof(content))


@cuda.add(c_void_p)
def cuModuleUnload(module: int) -> None:
    _modules.pop(module)  # its functions stay: nothing is gained by closing it


@cuda.add(POINTER(c_void_p), c_void_p, c_char_p)
def cuModuleGetFunction(function: Any, module: int, name: bytes) -> None:
    loaded = _modules[module]
    try:
        address = ctypes.cast(getattr(loaded, name.decode()), c_void_p).value
    except AttributeError:
        raise CudaError(NOT_FOUND) from None
    assert address is not None
    function[0] = handle = next(_handles)
    _functions[handle] = loaded, address, name.decode()


@cuda.add(c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p)
def cuLaunchKernel(
    function: int,
    *rest: Any,
) -> None:
    *size, shared, stream, parameters, extra = rest
    x, y, z, block_x, block_y, block_z = size
    threads = block_x * block_y * block_z
    if machine.stream(stream).device != machine.device:
        raise CudaError(INVALID_HANDLE)
    if not (0 < threads <= MAX_THREADS and x * y * z and x < 1 << 31 and max(y, z) < 1 << 16):
        raise CudaError(INVALID_VALUE)
    if block_z > 64 or shared > MAX_SHARED or extra:
        raise CudaError(INVALID_VALUE)
    loaded, address, name = _functions[function]
    with _launching:
        machine.launches += 1
        wrong = loaded.fake_launch(
            c_void_p(address),
            (c_uint * 6)(*size),
            c_size_t(shared),
            c_void_p(parameters),
            c_void_p(_stacks()),
            c_size_t(STACK),
        )
    if wrong:
        print(f"fake CUDA: {name}: {wrong.decode()}")
        raise CudaError(LAUNCH_FAILED)


_memory: list[Any] = []


def _stacks() -> int:
    """Stacks for the threads of a block, one for all launches: one runs at a time."""
    if not _memory:
        _memory.append(mmap.mmap(-1, STACK * MAX_THREADS))
        _memory.append(c_uint.from_buffer(_memory[0]))
    return ctypes.addressof(_memory[1])


@cuda.add(POINTER(c_int), c_int, c_void_p)
def cuFuncGetAttribute(value: Any, attribute: int, function: int) -> None:
    value[0] = {0: MAX_THREADS, 4: 32, 5: 90, 6: 90, 8: MAX_SHARED}.get(attribute, 0)


@cuda.add(c_void_p, c_int, c_int)
def cuFuncSetAttribute(function: int, attribute: int, value: int) -> None:
    pass


@cuda.add(POINTER(c_int), c_void_p, c_int, c_size_t)
def cuOccupancyMaxActiveBlocksPerMultiprocessor(
    count: Any, function: int, block: int, shared: int
) -> None:
    count[0] = 2048 // block


@cuda.add(POINTER(c_int), POINTER(c_int), c_void_p, c_void_p, c_size_t, c_int)
def cuOccupancyMaxPotentialBlockSize(
    grid: Any, block: Any, function: int, by_block: int, shared: int, limit: int
) -> None:
    grid[0], block[0] = 264, min(limit or MAX_THREADS, MAX_THREADS)


nvrtc = Library("nvrtc", 11)


class Program:
    """A program of NVRTC."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.expressions: list[str] = []
        self.log = self.image = b""
        self.loaded: ctypes.CDLL | None = None


_programs: dict[int, Program] = {}


@nvrtc.add(c_int, result=c_void_p)
def nvrtcGetErrorString(status: int) -> int:
    texts = {NVRTC_INVALID_PROGRAM: b"INVALID_PROGRAM", NVRTC_COMPILATION: b"COMPILATION"}
    text = ctypes.create_string_buffer(b"NVRTC_ERROR_" + texts.get(status, b"INTERNAL"))
    _memory_of_texts.append(text)
    return ctypes.addressof(text)


_memory_of_texts: list[Any] = []


@nvrtc.add(POINTER(c_int), POINTER(c_int))
def nvrtcVersion(major: Any, minor: Any) -> None:
    major[0], minor[0] = 13, 0


@nvrtc.add(POINTER(c_void_p), c_char_p, c_char_p, c_int, c_void_p, c_void_p)
def nvrtcCreateProgram(
    program: Any, source: bytes, name: bytes, headers: int, texts: int, names: int
) -> None:
    program[0] = handle = next(_handles)
    _programs[handle] = Program(source.decode())


@nvrtc.add(POINTER(c_void_p))
def nvrtcDestroyProgram(program: Any) -> None:
    del _programs[program[0]]


@nvrtc.add(c_void_p, c_int, POINTER(c_char_p))
def nvrtcCompileProgram(handle: int, count: int, options: Any) -> int:
    program = _programs[handle]
    if not program.source.strip():  # CuPy asks which compiler this is
        program.image = f"// fake CUDA {compiler.fingerprint()}\n\0".encode()
        return 0
    given = [options[index].decode() for index in range(count)]
    try:
        program.image = compiler.compile_program(program.source, given, program.expressions)
    except compiler.CompileError as error:
        program.log = str(error).encode()
        return NVRTC_COMPILATION
    return 0


def _texts(kind: str, content: Callable[[Program], bytes]) -> None:
    """nvrtcGet<kind>Size and nvrtcGet<kind>."""

    def size_of(handle: int, size: Any) -> None:
        size[0] = len(content(_programs[handle]))

    def copy_of(handle: int, target: int) -> None:
        text = content(_programs[handle])
        ctypes.memmove(target, text, len(text))

    size_of.__name__, copy_of.__name__ = f"nvrtcGet{kind}Size", f"nvrtcGet{kind}"
    nvrtc.add(c_void_p, POINTER(c_size_t))(size_of)
    nvrtc.add(c_void_p, c_void_p)(copy_of)


_texts("PTX", lambda program: program.image)
_texts("CUBIN", lambda program: program.image)
_texts("ProgramLog", lambda program: program.log + b"\0")


@nvrtc.add(c_void_p, c_char_p)
def nvrtcAddNameExpression(handle: int, expression: bytes) -> None:
    _programs[handle].expressions.append(expression.decode())


@nvrtc.add(c_void_p, c_char_p, POINTER(c_char_p))
def nvrtcGetLoweredName(handle: int, expression: bytes, name: Any) -> None:
    program = _programs[handle]
    if program.loaded is None:
        image = ctypes.create_string_buffer(program.image)
        program.loaded = compiler.load(ctypes.addressof(image))
        program.loaded.fake_name.restype = c_char_p
    # The expressions come first among the entries.
    name[0] = program.loaded.fake_name(c_size_t(program.expressions.index(expression.decode())))
