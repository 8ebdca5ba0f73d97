"""A program of `gpusim resume`, and what is expected of it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Case"]


@dataclass(frozen=True)
class Case:
    """A program with its pairs of numbers of ranks.

    `wrong` names the pairs that are different, `refused` those that end with the program's own
    error; all others are the same. `at` names the states of which one is the first that differs.
    `source` is where a bug of this kind was published, or "common".
    """

    program: str
    save: tuple[int, ...] = (2,)
    load: tuple[int, ...] = (2,)
    wrong: frozenset[tuple[int, int]] = frozenset()
    refused: frozenset[tuple[int, int]] = frozenset()
    at: tuple[str, ...] = ()
    source: str = ""
    says: str = ""
    more: tuple[str, ...] = ()
    stop: int = 4  # the step of the first checkpoint

    @property
    def name(self) -> str:
        """The program in a few words.

        >>> Case("ddp.py --bug off-by-one", (2,), (4,)).name
        'ddp, off-by-one, 2 to 4'
        """
        words, _, bug = self.program.replace(".py", "", 1).partition(" --bug ")
        numbers = [",".join(map(str, ranks)) for ranks in (self.save, self.load)]
        words = words.replace(" --", " ")
        return ", ".join(filter(None, (words, bug, " to ".join(numbers))))

    def expected(self, save: int, load: int) -> str:
        """ "same", "different" or "refused"."""
        pair = (save, load)
        return "different" if pair in self.wrong else "refused" if pair in self.refused else "same"
