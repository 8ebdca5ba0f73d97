"""The settings of a campaign: the text `seed=7 kinds=kill,flip faults=1..3`."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from gpusim.torch.distributed.faults.plans import KINDS, PlanError

__all__ = ["MOST", "Settings", "is_campaign", "read"]

MOST = 100
"""How many faults a drawn plan may have."""

LARGEST_SEED = 1 << 63


@dataclass(frozen=True)
class Settings:
    """How plans are drawn.

    **Attributes**: `seed` decides all. `kinds` are those of the faults, and `fewest` and `most` how
    many faults a plan has.
    """

    seed: int
    kinds: tuple[str, ...] = tuple(KINDS)
    fewest: int = 1
    most: int = 1

    def __str__(self) -> str:
        words = [f"seed={self.seed}"]
        if self.kinds != tuple(KINDS):
            words.append(f"kinds={','.join(self.kinds)}")
        if (self.fewest, self.most) != (1, 1):
            words.append(f"faults={self.fewest}..{self.most}")
        return " ".join(words)


def is_campaign(text: str | None) -> bool:
    """Whether the text of --faults is that of a campaign, and not one plan.

    >>> is_campaign("seed=7"), is_campaign("kill rank=1 call=2"), is_campaign(None)
    (True, False, False)
    """
    return any(re.match(r"(seed|faults|kinds)=", word) for word in (text or "").split()[:1])


def read(text: str) -> Settings:
    """Read the text.

    **Raises**: PlanError with the word that is wrong, and what is expected.

    >>> read("seed=7 kinds=kill,flip faults=1..3")
    Settings(seed=7, kinds=('kill', 'flip'), fewest=1, most=3)
    >>> try:
    ...     read("seed=7 kinds=kil")
    ... except PlanError as error:
    ...     print(error)
    kinds='kil': unknown kind of fault; did you mean 'kill'?
    """
    given: dict[str, str] = {}
    for word in text.split():
        key, equals, value = word.partition("=")
        if key not in ("seed", "kinds", "faults") or not equals:
            raise PlanError(
                f"{word!r:.60}: expected seed=S, kinds=KIND,KIND or faults=N or faults=N..M"
            )
        if key in given:
            raise PlanError(f"{word!r:.60}: {key}= was given before")
        given[key] = value
    if "seed" not in given:
        raise PlanError(f"{text!r:.60}: seed= is missing, as in: seed=7")
    seed = given["seed"]
    if not re.fullmatch(r"[0-9]{1,19}", seed) or int(seed) >= LARGEST_SEED:
        raise PlanError(f"seed={seed!r:.60}: expected a whole number from 0 below 2^63")
    return Settings(int(seed), _kinds(given.get("kinds")), *_faults(given.get("faults", "1")))


def _kinds(text: str | None) -> tuple[str, ...]:
    if text is None:
        return tuple(KINDS)
    kinds = tuple(dict.fromkeys(text.split(",")))
    for kind in kinds:
        if kind not in KINDS:
            near = difflib.get_close_matches(kind, list(KINDS), 1)
            hint = f"did you mean {near[0]!r}?" if near else f"expected some of {', '.join(KINDS)}"
            raise PlanError(f"kinds={kind!r:.60}: unknown kind of fault; {hint}")
    return kinds


def _faults(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,4})(?:\.\.([0-9]{1,4}))?", text)
    low, high = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= low <= high <= MOST:
        raise PlanError(
            f"faults={text!r:.60}: expected a number from 1 to {MOST}, or two as in faults=1..3"
        )
    return low, high
