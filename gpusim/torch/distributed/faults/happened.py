"""Which faults of a plan have happened: memory that the ranks and the launching process share."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

from .plans import Fault

__all__ = ["REASONS", "Happened"]

REASONS = {
    "": "",
    "beyond": "the rank did not come to it",
    "none": "the call has no tensor there",
    "empty": "the tensor is empty",
    "element": "the tensor has no such element",
    "bit": "the tensor's dtype has no such bit",
    "kind": "the tensor's dtype has no NaN",
    "layout": "the tensor is sparse, or its memory is not the host's",
    "caught": "nothing was written to the file",
}
"""Why a fault did not happen, by a word for it. The place of a word is its byte."""

_WORDS = tuple(REASONS)
_HAPPENED = 255


# Made in the launching process before the ranks are forked, so that all map the same memory. A
# byte belongs to one fault, and a fault to one rank: that rank's process alone writes it, and the
# launching process reads it when the rank has ended. So there is no lock, and SIGKILL loses none.
class Happened:
    """The end of each fault of a plan.

    **Arguments**: `faults` are the whole plan, all ranks' and attempts'.

    >>> from gpusim.torch.distributed.faults.plans import parse
    >>> faults = parse("kill rank=0 call=1, flip rank=1 call=2 bit=3, kill rank=1 call=9")
    >>> happened = Happened(faults)
    >>> happened.note(faults[0])
    >>> happened.note(faults[1], "empty")
    >>> [(str(fault), why) for fault, why in happened.left()][0]
    ('flip rank=1 call=2 bit=3', 'the tensor is empty')
    >>> happened.left()[1][1]
    'the rank did not come to it'
    """

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        self._bytes = mmap.mmap(-1, max(1, len(self.faults)))

    def note(self, fault: Fault, why_not: str = "") -> None:
        """Note that a fault happens now; or, by a word of `REASONS`, why it cannot."""
        code = _WORDS.index(why_not) if why_not else _HAPPENED
        self._bytes[self.faults.index(fault)] = code

    def has(self, fault: Fault) -> bool:
        """Whether the fault has happened."""
        return self._bytes[self.faults.index(fault)] == _HAPPENED

    def left(self, attempt: int | None = None) -> list[tuple[Fault, str]]:
        """The faults that did not happen, of one attempt or of all, and why."""
        found = []
        for place, fault in enumerate(self.faults):
            code = self._bytes[place]
            if code != _HAPPENED and attempt in (None, fault.attempt):
                word = _WORDS[code] if 0 < code < len(_WORDS) else "beyond"
                found.append((fault, REASONS[word]))
        return found
