"""PopTorch's exceptions, under PopTorch's module name.

A message is "'type': text"; both are attributes, with the location.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = ["Error", "ErrorCategory", "RecoverableError", "UnrecoverableError"]

PYTHON_ERROR = "poptorch_py_error"
COMPILER_ERROR = "poptorch_cpp_error"
POPART_ERROR = "popart_exception"


class ErrorCategory(IntEnum):
    """The remedy of an error: another program, a reset and another try, or other hardware."""

    Other = 0
    RuntimeRecoverable = 1
    RuntimeUnrecoverable = 2


class Error(Exception):
    """An error of PopTorch itself, as opposed to the ValueError of a wrong argument.

    Made by `createPoptorchError`, or with the whole text as its argument.
    """

    category = ErrorCategory.Other
    type = ""  #: the component that raised it, "poptorch_py_error" for PopTorch's Python
    message = ""  #: the text, without the component
    location = ""  #: where in a backend; empty if it came from none


class RecoverableError(Error):
    """A reset and another try may help; `recovery_action` says which reset."""

    category = ErrorCategory.RuntimeRecoverable
    recovery_action = ""  #: "IPU_RESET", "PARTITION_RESET" or "FULL_RESET"


class UnrecoverableError(Error):
    """The hardware has failed; a reset does not help."""

    category = ErrorCategory.RuntimeUnrecoverable


def createPoptorchError(msg: str) -> Error:
    """The error that PopTorch's Python raises, not yet raised.

    >>> error = createPoptorchError("Device is not attached")
    >>> error.type, error.message, error.location
    ('poptorch_py_error', 'Device is not attached', '')
    >>> raise error
    Traceback (most recent call last):
    ...
    gpusim.poptorch.poptorch_core.Error: 'poptorch_py_error': Device is not attached
    """
    return _error(PYTHON_ERROR, msg)


def compiler_error(message: str) -> Error:
    """The error that PopTorch's compiler raises, not yet raised.

    >>> compiler_error("Slicing step must be at least 1").type
    'poptorch_cpp_error'
    """
    return _error(COMPILER_ERROR, message)


def popart_error(message: str) -> Error:
    """The error that PopART raises under PopTorch, not yet raised.

    >>> popart_error("no pipeline").type
    'popart_exception'
    """
    return _error(POPART_ERROR, message)


def _error(kind: str, message: str) -> Error:
    error = Error(f"'{kind}': {message}")
    error.type, error.message = kind, message
    return error
