"""An XLA FFI handler in Python, made with ctypes: `register` and what its functions are given.

The handler does not block XLA's threads. It creates a future, returns, and whoever computes the
results completes the future. XLA keeps the buffers until then.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, POINTER, Structure, addressof, cast, create_string_buffer, sizeof
from typing import Any

import jax
import jaxlib

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

_libc = ctypes.PyDLL(None)

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


_HANDLER = CFUNCTYPE(_pointer, POINTER(_Frame))
_DELETER = CFUNCTYPE(None, _pointer)
_call = CFUNCTYPE(_pointer, _pointer)
"""The functions of XLA's interface, which take a structure and return an error or nothing."""


class Buffer:
    """A buffer of XLA's: the address of its elements, and the shape that XLA gives it."""

    __slots__ = ("_buffer", "address")

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer.contents
        self.address: int = self._buffer.data or 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape; valid while the handler runs."""
        return tuple(self._buffer.dims[: self._buffer.rank])


class Future:
    """The end of one device's call.

    XLA runs the rest of the device's program on the thread that declares the end, and may wait on
    it for other devices. So each end needs a thread of its own, which flushes subnormals as XLA's
    threads do: it takes the floating-point environment of the thread that made the future.
    """

    __slots__ = ("_api", "_environment", "_future")

    def __init__(self, api: _Api, future: int) -> None:
        self._api, self._future = api, future
        self._environment = create_string_buffer(FENV_SIZE)
        _libc.fegetenv(self._environment)

    def complete(self) -> None:
        """The results are in their buffers."""
        _libc.fesetenv(self._environment)
        given = _Future(sizeof(_Future), None, self._future)
        _checked(self._api, self._api.future_set_available, given)

    def fail(self, message: str) -> None:
        """The call failed: XLA raises this message."""
        _libc.fesetenv(self._environment)
        error = _error(self._api, message, ABORTED)
        given = _FutureError(sizeof(_FutureError), None, self._future, error)
        _checked(self._api, self._api.future_set_error, given)


class CallFailed(Exception):
    """Why a call cannot begin; XLA raises the message."""


def _checked(api: _Api, function: int, given: Structure) -> Any:
    """Call a function of XLA's interface."""
    error = _call(function)(addressof(given))
    if error is not None:
        asked = _ErrorMessage(sizeof(_ErrorMessage), None, error, None)
        _call(api.error_get_message)(addressof(asked))
        text = (asked.message or b"").decode(errors="replace")
        _call(api.error_destroy)(addressof(_Future(sizeof(_Future), None, error)))
        raise RuntimeError(f"XLA's FFI refuses a call of gpusim: {text}")
    return given


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
    - `execute`: begins a call on one device, (state, run id, device, arguments, results, future
      maker). It returns at once; the one who computes completes the future.
    """

    def __init__(
        self,
        name: str,
        instantiate: Callable[[dict[str, str]], Any],
        execute: Callable[
            [Any, int, int, Sequence[Buffer], Sequence[Buffer], Callable[[], Future]], None
        ],
    ) -> None:
        self._instantiate, self._execute = instantiate, execute
        self._states: dict[int, Any] = {}
        self._numbers = itertools.count(1)
        self._version: tuple[int, int] | None = None
        _HANDLERS.append(self)  # XLA keeps addresses of its parts
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

    def _enter(self, given: Any) -> Any:
        """Handle a call of XLA's, on any of its threads."""
        frame = given.contents
        api = frame.api.contents
        try:
            if frame.extensions and frame.extensions.contents.kind == METADATA:
                self._version = (api.version.major, api.version.minor)
                extension = cast(frame.extensions, POINTER(_MetadataExtension)).contents
                metadata = extension.metadata.contents
                metadata.version.major, metadata.version.minor, metadata.traits = MAJOR, MINOR, 0
            elif frame.stage == INSTANTIATE:
                self._enter_instantiate(api, frame)
            else:
                self._enter_execute(api, frame)
        except BaseException as error:  # an exception must not leave through XLA
            message = str(error) if isinstance(error, CallFailed) else repr(error)
            return _error(api, message, INTERNAL)
        return None

    def _enter_instantiate(self, api: _Api, frame: Any) -> None:
        check_version((api.version.major, api.version.minor))
        number = next(self._numbers)
        self._states[number] = self._instantiate(_attributes(frame.attributes))
        type_id = addressof(self._type_id)
        state = _State(sizeof(_State), None, frame.context, INSTANTIATE, type_id, number)
        _checked(api, api.state_set, state)

    def _enter_execute(self, api: _Api, frame: Any) -> None:
        context = frame.context
        run = _checked(api, api.run_id_get, _RunId(sizeof(_RunId), None, context)).value
        device = _checked(api, api.device_ordinal_get, _Ordinal(sizeof(_Ordinal), None, context))
        type_id = addressof(self._type_id)
        state = _State(sizeof(_State), None, context, INSTANTIATE, type_id, None)
        number = _checked(api, api.state_get, state).state
        buffers = [
            [Buffer(found.each[k]) for k in range(found.count)]
            for found in (frame.arguments, frame.results)
        ]

        def future() -> Future:
            made = _checked(api, api.future_create, _Future(sizeof(_Future), None, None)).future
            frame.future = made
            return Future(api, made)

        arguments, results = buffers
        self._execute(self._states[number], run, device.value, arguments, results, future)

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
            "gpusim.jax is made for jax 0.10.2"
        )
