"""An XLA FFI handler in Python, made with ctypes: `register` and what its functions are given.

The handler does not block XLA's threads. It creates a future, returns, and whoever computes the
results completes the future. XLA keeps the buffers until then.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
import sys
from collections.abc import Callable
from ctypes import (
    CFUNCTYPE,
    POINTER,
    PYFUNCTYPE,
    Structure,
    addressof,
    c_char,
    c_uint64,
    cast,
    sizeof,
    string_at,
)
from typing import Any

import jax
import jaxlib

from gpusim.optional import tested

#: The version of XLA's FFI whose structures are below.
MAJOR, MINOR = 0, 3

INTERNAL, ABORTED = 13, 10
"""Codes of XLA's errors."""

METADATA = 1
"""The kind of extension by which XLA asks for a handler's version."""

INSTANTIATE, EXECUTE = 0, 3
"""Stages of a handler."""

FENV_SIZE = 64
"""More bytes than a floating-point environment has anywhere."""

_environment = c_char * FENV_SIZE
_libc = ctypes.PyDLL("ucrtbase" if sys.platform == "win32" else None)
_libc.fegetenv.argtypes = _libc.fesetenv.argtypes = [ctypes.POINTER(_environment)]

_pointer, _size = ctypes.c_void_p, ctypes.c_size_t


class _Sized(Structure):
    """XLA's structures begin with their size and a list of extensions."""

    _fields_ = [("struct_size", _size), ("extensions", _pointer)]


class _Version(_Sized):
    _fields_ = [("major", ctypes.c_int), ("minor", ctypes.c_int)]


class _Extension(Structure):
    _fields_ = [("struct_size", _size), ("kind", ctypes.c_int), ("next", _pointer)]


class _Metadata(Structure):
    _fields_ = [("struct_size", _size), ("version", _Version), ("traits", ctypes.c_uint32)]


class _MetadataExtension(Structure):
    _fields_ = [("base", _Extension), ("metadata", POINTER(_Metadata))]


class _Api(_Sized):
    _fields_ = [
        ("version", _Version),
        ("internal", _pointer),
        *(
            (name, _pointer)
            for name in (
                "error_create",
                "error_get_message",
                "error_destroy",
                "handler_register",
                "stream_get",
                "type_register",
                "execution_context_get",
                "state_set",
                "state_get",
                "device_memory_allocate",
                "device_memory_free",
                "thread_pool_schedule",
                "thread_pool_num_threads",
                "future_create",
                "future_set_available",
                "future_set_error",
                "run_id_get",
                "device_ordinal_get",
            )
        ),
    ]


class _Buffer(_Sized):
    _fields_ = [
        ("dtype", ctypes.c_int),
        ("data", _pointer),
        ("rank", ctypes.c_int64),
        ("dims", POINTER(ctypes.c_int64)),
    ]


class _Buffers(_Sized):
    _fields_ = [
        ("count", ctypes.c_int64),
        ("kinds", _pointer),
        ("each", POINTER(POINTER(_Buffer))),
    ]


class _Bytes(Structure):
    _fields_ = [("data", _pointer), ("length", _size)]


class _Attributes(_Sized):
    _fields_ = [
        ("count", ctypes.c_int64),
        ("kinds", _pointer),
        ("names", POINTER(POINTER(_Bytes))),
        ("each", POINTER(_pointer)),
    ]


class _Frame(Structure):
    _fields_ = [
        ("struct_size", _size),
        ("extensions", POINTER(_Extension)),
        ("api", POINTER(_Api)),
        ("context", _pointer),
        ("stage", ctypes.c_int),
        ("arguments", _Buffers),
        ("results", _Buffers),
        ("attributes", _Attributes),
        ("future", _pointer),
    ]


class _Error(_Sized):
    _fields_ = [("message", ctypes.c_char_p), ("code", ctypes.c_int)]


class _Future(_Sized):
    _fields_ = [("future", _pointer)]


class _FutureError(_Future):
    _fields_ = [("error", _pointer)]


class _RunId(_Sized):
    _fields_ = [("context", _pointer), ("value", ctypes.c_int64)]


class _Ordinal(_Sized):
    _fields_ = [("context", _pointer), ("value", ctypes.c_int32)]


class _State(_Sized):
    _fields_ = [
        ("context", _pointer),
        ("stage", ctypes.c_int),
        ("type_id", _pointer),
        ("state", _pointer),
    ]


class _TypeInfo(_Sized):
    _fields_ = [("deleter", _pointer)]


_HANDLER = CFUNCTYPE(_pointer, _pointer)
_DELETER = CFUNCTYPE(None, _pointer)
_call = CFUNCTYPE(_pointer, _pointer)
"""The functions of XLA's interface, which take a structure and return an error or nothing."""
_short_call = PYFUNCTYPE(_pointer, _pointer)
"""Those that return at once. They keep the interpreter's lock, which each of a program's devices
would have to wait for again."""

# A frame is read as 64-bit words, all at once: ctypes objects for the structures in it take longer
# than all else that the handler does. The words' places are those of the structures above.
_WORDS = struct.Struct(f"={sizeof(_Frame) // 8}Q")


def _word(*fields: Any) -> int:
    """The word of a frame that holds a field of a structure in it."""
    return sum(int(field.offset) for field in fields) // 8


_EXTENSIONS, _API = _word(_Frame.extensions), _word(_Frame.api)
_CONTEXT, _STAGE, _FUTURE = _word(_Frame.context), _word(_Frame.stage), _word(_Frame.future)
_ARGUMENTS, _ARGUMENT = (_word(_Frame.arguments, f) for f in (_Buffers.count, _Buffers.each))
_RESULTS, _RESULT = (_word(_Frame.results, f) for f in (_Buffers.count, _Buffers.each))
_DATA = _Buffer.data.offset
_at = c_uint64.from_address


class Functions:
    """XLA's functions that the calls of programs need."""

    def __init__(self, api: _Api) -> None:
        self.api = api
        self.address = addressof(api)
        self.run_id_get = _short_call(api.run_id_get)
        self.device_ordinal_get = _short_call(api.device_ordinal_get)
        self.state_get = _short_call(api.state_get)
        self.future_create = _short_call(api.future_create)
        self.future_set_available = _call(api.future_set_available)


class Questions:
    """The structures in which XLA answers what is asked about a call; one call at a time."""

    def __init__(self, type_id: int) -> None:
        self.run = _RunId(sizeof(_RunId))
        self.device = _Ordinal(sizeof(_Ordinal))
        self.state = _State(sizeof(_State), None, None, INSTANTIATE, type_id, None)
        self.future = _Future(sizeof(_Future))
        self.at_run, self.at_device = addressof(self.run), addressof(self.device)
        self.at_state, self.at_future = addressof(self.state), addressof(self.future)


class Entry:
    """A call of one device, while the handler runs.

    **Attributes**: `run` and `device`, XLA's numbers, and the addresses of the buffers of
    `arguments` and `results`.
    """

    __slots__ = ("_address", "_functions", "_questions", "arguments", "device", "results", "run")

    def __init__(
        self, functions: Functions, questions: Questions, address: int, words: tuple[int, ...]
    ) -> None:
        self._functions, self._questions, self._address = functions, questions, address
        questions.run.context = questions.device.context = words[_CONTEXT]
        _check(functions.api, functions.run_id_get(questions.at_run))
        _check(functions.api, functions.device_ordinal_get(questions.at_device))
        self.run: int = questions.run.value
        self.device: int = questions.device.value
        self.arguments = _data(words[_ARGUMENTS], words[_ARGUMENT])
        self.results = _data(words[_RESULTS], words[_RESULT])

    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of all buffers, of arguments and results."""
        frame = _Frame.from_address(self._address)
        return [
            tuple(buffer.dims[: buffer.rank])
            for buffers in (frame.arguments, frame.results)
            for buffer in (buffers.each[k].contents for k in range(buffers.count))
        ]

    def future(self) -> Future:
        """Make the future of the call, which XLA waits for after the handler has returned."""
        questions = self._questions
        _check(self._functions.api, self._functions.future_create(questions.at_future))
        made = questions.future.future
        _at(self._address + 8 * _FUTURE).value = made
        return Future(self._functions, made)


def _data(count: int, table: int) -> list[int]:
    """The addresses of the elements of `count` buffers, to which a table points."""
    return [_at(_at(place).value + _DATA).value for place in range(table, table + 8 * count, 8)]


class Future:
    """The end of one device's call.

    XLA runs the rest of the device's program on the thread that declares the end, and may wait on
    it for other devices. It flushes subnormals there as on XLA's threads: the thread takes the
    floating-point environment of the one that made the future.
    """

    __slots__ = ("_environment", "_functions", "_future")

    def __init__(self, functions: Functions, future: int) -> None:
        self._functions, self._future = functions, future
        self._environment = _environment()
        _libc.fegetenv(self._environment)

    def complete(self) -> None:
        """The results are in their buffers."""
        _libc.fesetenv(self._environment)
        given = _Future(sizeof(_Future), None, self._future)
        _check(self._functions.api, self._functions.future_set_available(addressof(given)))

    def fail(self, message: str) -> None:
        """The call failed: XLA raises this message."""
        _libc.fesetenv(self._environment)
        api = self._functions.api
        error = _error(api, message, ABORTED)
        given = _FutureError(sizeof(_FutureError), None, self._future, error)
        _checked(api, api.future_set_error, given)


class CallFailed(Exception):
    """Why a call cannot begin; XLA raises the message."""


def _checked(api: _Api, function: int, given: Structure) -> Any:
    """Call a function of XLA's interface."""
    _check(api, _call(function)(addressof(given)))
    return given


def _check(api: _Api, error: int | None) -> None:
    """Raise the error that a function of XLA's interface has returned."""
    if error is not None:
        asked = _ErrorMessage(sizeof(_ErrorMessage), None, error, None)
        _call(api.error_get_message)(addressof(asked))
        text = (asked.message or b"").decode(errors="replace")
        _call(api.error_destroy)(addressof(_Future(sizeof(_Future), None, error)))
        raise RuntimeError(f"XLA's FFI refuses a call of gpusim: {text}")


class _ErrorMessage(_Sized):
    _fields_ = [("error", _pointer), ("message", ctypes.c_char_p)]


def _error(api: _Api, message: str, code: int) -> Any:
    given = _Error(sizeof(_Error), None, message.encode(errors="replace"), code)
    return _call(api.error_create)(addressof(given))


def _attributes(found: _Attributes) -> dict[str, str]:
    texts = {}
    for k in range(found.count):
        name, value = found.names[k].contents, cast(found.each[k], POINTER(_Bytes)).contents
        texts[ctypes.string_at(name.data, name.length).decode()] = ctypes.string_at(
            value.data, value.length
        ).decode()
    return texts


_HANDLERS: list[Handler] = []


class Handler:
    """A handler for one name, registered with XLA for CPUs.

    **Arguments**

    - `name`: the target of the custom calls.
    - `instantiate`: makes the state of a call in a compiled program from its attributes, which
      are texts. Each place in each program has one.
    - `execute`: begins a call on one device, from the state and an `Entry`. It returns at once;
      the one who computes completes the future that it has made.
    """

    def __init__(
        self,
        name: str,
        instantiate: Callable[[dict[str, str]], Any],
        execute: Callable[[Any, Entry], None],
    ) -> None:
        self._instantiate, self._execute = instantiate, execute
        self._states: dict[int, Any] = {}
        self._numbers = itertools.count(1)
        self._version: tuple[int, int] | None = None
        self._functions: Functions | None = None
        # No lock: `pop` and `append` of a list are one step each under the interpreter's lock.
        self._questions: list[Questions] = []
        # XLA keeps addresses of its parts, and calls the deleter while Python ends, when it clears
        # modules in any order: so the handler is never freed.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        _HANDLERS.append(self)
        self._type_id = ctypes.c_int64(0)
        self._deleter = _DELETER(self._delete)
        self._type_info = _TypeInfo(sizeof(_TypeInfo), None, cast(self._deleter, _pointer))
        self._entry = _HANDLER(self._enter)
        capsule = jax.ffi.pycapsule
        jax.ffi.register_ffi_type(
            f"{name}_state",
            {
                "type_id": capsule(addressof(self._type_id)),
                "type_info": capsule(addressof(self._type_info)),
            },
            platform="cpu",
        )
        entry = capsule(cast(self._entry, _pointer).value)
        try:
            jax.ffi.register_ffi_target(
                name, {"instantiate": entry, "execute": entry}, platform="cpu"
            )
        except Exception as error:
            self._check_version()
            raise RuntimeError(f"XLA refuses gpusim's handler: {error}") from error
        self._check_version()

    def _check_version(self) -> None:
        """Check the version that XLA has shown to `_enter` on the way."""
        if self._version is not None:
            check_version(self._version)

    def _enter(self, address: int) -> Any:
        """Handle a call of XLA's, on any of its threads."""
        words = _WORDS.unpack(string_at(address, _WORDS.size))
        try:
            if words[_EXTENSIONS] and self._answer_metadata(_Frame.from_address(address)):
                return None
            if words[_STAGE] % 2**32 == INSTANTIATE:  # an int, whose word has more in it
                self._enter_instantiate(_Frame.from_address(address))
            else:
                self._enter_execute(address, words)
        except BaseException as error:  # an exception must not leave through XLA
            message = str(error) if isinstance(error, CallFailed) else repr(error)
            return _error(_Api.from_address(words[_API]), message, INTERNAL)
        return None

    def _answer_metadata(self, frame: Any) -> bool:
        """Tell the handler's version, if that is what XLA asks."""
        if frame.extensions.contents.kind != METADATA:
            return False
        api = frame.api.contents
        self._version = (api.version.major, api.version.minor)
        extension = cast(frame.extensions, POINTER(_MetadataExtension)).contents
        metadata = extension.metadata.contents
        metadata.version.major, metadata.version.minor, metadata.traits = MAJOR, MINOR, 0
        return True

    def _enter_instantiate(self, frame: Any) -> None:
        api = frame.api.contents
        check_version((api.version.major, api.version.minor))
        number = next(self._numbers)
        self._states[number] = self._instantiate(_attributes(frame.attributes))
        type_id = addressof(self._type_id)
        state = _State(sizeof(_State), None, frame.context, INSTANTIATE, type_id, number)
        _checked(api, api.state_set, state)

    def _enter_execute(self, address: int, words: tuple[int, ...]) -> None:
        functions = self._functions
        if functions is None or functions.address != words[_API]:
            functions = self._functions = Functions(_Api.from_address(words[_API]))
        try:
            questions = self._questions.pop()
        except IndexError:
            questions = Questions(addressof(self._type_id))
        questions.state.context = words[_CONTEXT]
        _check(functions.api, functions.state_get(questions.at_state))
        state = self._states[questions.state.state]
        self._execute(state, Entry(functions, questions, address, words))
        self._questions.append(questions)

    def _delete(self, number: int) -> None:
        """XLA has dropped a program."""
        self._states.pop(number, None)


def check_version(version: tuple[int, int]) -> None:
    """Refuse an XLA whose FFI differs from the structures here.

    **Raises**: RuntimeError, which names both versions.
    """
    if version[0] != MAJOR or version[1] < MINOR:
        raise RuntimeError(
            f"gpusim.jax needs XLA's FFI {MAJOR}.{MINOR} (or a later {MAJOR}.x), but jaxlib "
            f"{jaxlib.__version__} has {version[0]}.{version[1]}; "
            f"gpusim.jax is tested with jax {' and '.join(tested('jax'))}"
        )
