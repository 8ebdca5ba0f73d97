"""Types of command-line arguments that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable

__all__ = ["whole_number"]


def whole_number(smallest: int) -> Callable[[str], int]:
    """An argparse type: an integer of at least `smallest`."""

    def convert(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = smallest - 1
        if number < smallest:
            raise argparse.ArgumentTypeError(
                f"a whole number of at least {smallest} is needed, got {text!r}"
            )
        return number

    return convert
