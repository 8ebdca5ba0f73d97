"""PopXL's own exceptions."""

from __future__ import annotations

__all__ = ["UndefinedValue"]


class UndefinedValue(Exception):
    """A property without a value, such as the IPU of a tensor that has not been placed."""
