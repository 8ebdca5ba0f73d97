"""What is known of a silent bug in one of the programs."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Bug"]


@dataclass(frozen=True)
class Bug:
    """A program with one bug switched on, and where its first wrong tensor is.

    `at` names the modules or parameters of the outermost model there, in the order of computation.
    """

    program: str
    bug: str
    ranks: int
    options: str
    source: str
    says: str
    at: tuple[str, ...]

    @property
    def command(self) -> str:
        """The program with its arguments."""
        return f"{self.program} {self.options} --bug {self.bug}".replace("  ", " ")
