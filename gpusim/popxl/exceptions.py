"""PopART's exceptions, which PopXL raises too. `popart` has them under the same names."""

from __future__ import annotations

from gpusim.errors import GpusimError

__all__ = [
    "popart_exception",
    "popart_internal_exception",
    "poplar_application_runtime_error",
    "poplar_exception",
    "poplibs_error",
]


class popart_exception(GpusimError):
    """A program that PopART refuses."""


class shape_exception(popart_exception, ValueError):
    """Shapes or numbers that an op cannot take: PopART's exception, and Python's too."""


class dtype_exception(popart_exception, TypeError):
    """Dtypes that an op cannot take: PopART's exception, and Python's too."""


class popart_internal_exception(popart_exception):
    """An internal error of PopART."""


class poplar_exception(GpusimError):
    """An error of Poplar at run time."""


class poplar_application_runtime_error(poplar_exception):
    """An error that a program on an IPU has raised."""


class poplibs_error(GpusimError):
    """An error of Poplar's libraries."""
