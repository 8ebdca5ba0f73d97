"""PopART's exceptions, which PopXL raises too; `popart` has them under the same names."""

from __future__ import annotations

from gpusim.errors import GpusimError

__all__ = ["popart_exception", "poplar_exception", "poplibs_error", "popart_internal_exception"]


class popart_exception(GpusimError):
    """A program that PopART refuses."""


class shape_exception(popart_exception, ValueError):
    """Shapes or numbers that an op cannot work with: PopART's exception, and Python's too."""


class dtype_exception(popart_exception, TypeError):
    """Data types that an op cannot work with: PopART's exception, and Python's too."""


class popart_internal_exception(popart_exception):
    """A fault of PopART's own."""


class poplar_exception(GpusimError):
    """What Poplar raises when a program runs."""


class poplibs_error(GpusimError):
    """What Poplar's libraries raise."""
