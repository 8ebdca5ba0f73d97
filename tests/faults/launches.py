"""Launches whose ranks may die, for tests, and notes that ranks leave in files."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpusim.torch.distributed.faults.endings import Endings
from gpusim.torch.distributed.faults.plans import parse
from gpusim.torch.distributed.launching import run_ranks
from gpusim.torch.distributed.runners.threads import environment_of

__all__ = ["Notes", "gist", "launch"]


def launch(
    program: Callable[[int], Any], ranks: int, plan: str = "", attempt: int = 0, **variables: str
) -> Endings:
    """Run the program on ranks that are processes, with the faults of a plan."""
    environments = [environment_of(rank, ranks, ranks, **variables) for rank in range(ranks)]

    def run(rank: Any) -> Any:
        faulthandler.disable()  # pytest's would write of ranks that the watchdog ends
        return program(rank.index)

    endings = run_ranks(
        run,
        environments,
        None,
        "turns",
        processes=True,
        faults=parse(plan) if plan else (),
        attempt=attempt,
        mortal=True,
    )
    assert isinstance(endings, Endings)
    return endings


class Notes:
    """Lines that a rank leaves in a file, which are there whatever ends it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, rank: int, text: str) -> None:
        with open(self.folder / f"{rank}.txt", "a") as file:
            file.write(f"{text}\n")

    def of(self, rank: int) -> list[str]:
        path = self.folder / f"{rank}.txt"
        return path.read_text().splitlines() if path.exists() else []

    def tried(self, rank: int, action: Callable[[], Any]) -> None:
        """Note whether an action works, or the gist of its error."""
        try:
            action()
        except Exception as error:
            self.put(rank, gist(error))
        else:
            self.put(rank, "fine")


def gist(error: BaseException) -> str:
    """An error's type, and the words that tell gloo's errors apart."""
    words = ("Connection closed by peer", "Timed out waiting", "Application timeout", "Watchdog")
    found = next((each for each in words if each in str(error)), str(error)[:80])
    return f"{type(error).__name__}: {found}"
