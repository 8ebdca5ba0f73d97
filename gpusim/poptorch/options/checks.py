"""Checks that several groups of options share."""

from __future__ import annotations

__all__ = ["check_count"]


def check_count(**given: int) -> None:
    """ValueError for a number below 1; what is no number is left to the options' own check.

    >>> check_count(device_iterations=0)
    Traceback (most recent call last):
    ...
    ValueError: device_iterations=0: expected a number of at least 1
    """
    for name, value in given.items():
        if isinstance(value, int) and value < 1:
            raise ValueError(f"{name}={value!r}: expected a number of at least 1")
