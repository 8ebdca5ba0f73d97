"""PopXL's own exceptions."""

from __future__ import annotations

__all__ = ["UndefinedValue"]


class UndefinedValue(Exception):
    """A property that has no value, such as the IPU of a tensor that nothing has been placed on."""
