"""The programs that are run, and how they are traced.

Imports no torch, so that wrong usage is said at once.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

__all__ = ["Program", "Settings"]


@dataclass(frozen=True)
class Settings:
    """How a program is traced.

    **Attributes**: `folder`, where; `steps`, optimizer steps after which the program ends, 0 for
    all; `dtype`, "float64", "wide" for narrower ones that the program names too, or "" to leave it;
    `limit`, bytes of all ranks' files; `batches`, what the other program read (`data.Loaders`);
    `weights`, a file of weights that are written before the first step; `noise`, whether
    outputs are changed by one rounding each; `large`, elements from which on a tensor
    is written as sums over blocks (`traces.coarse`).
    """

    folder: str
    steps: int = 3
    dtype: str = "float64"
    limit: int = 4 << 30
    batches: str = ""
    weights: str = ""
    noise: bool = False
    large: int = 1 << 20


@dataclass(frozen=True)
class Program:
    """A program and the ranks that it runs on.

    **Attributes**: `words`, the script and its arguments, or -m and a module; `options`, of
    `gpusim torchrun`.
    """

    words: tuple[str, ...]
    ranks: int
    options: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{shlex.join(self.words)} on {self.ranks} rank{'s' * (self.ranks > 1)}"
