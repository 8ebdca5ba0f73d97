"""Numbers of things in messages: `1 rank`, `2 ranks`, `both ranks`, `rank 3`.

A leaf: it imports nothing of gpusim. All messages take their plurals from here, so that none says
"1 ranks" or "all 2 ranks"; `tests/project/test_words.py` looks for others.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["count", "every", "listed", "named", "plural"]


def plural(noun: str, number: float) -> str:
    """The noun, in the form that stands beside `number`.

    >>> plural("rank", 1), plural("call", 0), plural("entry", 2), plural("class", 3)
    ('rank', 'calls', 'entries', 'classes')
    """
    if number == 1:
        return noun
    if noun.endswith("y") and noun[-2:-1] not in ("a", "e", "o", "u"):
        return f"{noun[:-1]}ies"
    return f"{noun}es" if noun.endswith(("s", "x", "ch", "sh")) else f"{noun}s"


def count(number: int, noun: str) -> str:
    """How many there are.

    >>> count(1, "rank"), count(0, "call"), count(4096, "element")
    ('1 rank', '0 calls', '4,096 elements')
    """
    return f"{number:,} {plural(noun, number)}"


def every(number: int, noun: str) -> str:
    """All of them.

    >>> every(1, "rank"), every(2, "rank"), every(8, "rank")
    ('the rank', 'both ranks', 'all 8 ranks')
    """
    if number == 1:
        return f"the {noun}"
    return f"both {plural(noun, 2)}" if number == 2 else f"all {count(number, noun)}"


def listed(items: Sequence[object], word: str = "and") -> str:
    """The items in a sentence.

    >>> listed([3]), listed([0, 3]), listed("abc", "or")
    ('3', '0 and 3', 'a, b or c')
    """
    texts = [str(item) for item in items]
    if len(texts) < 2:
        return "".join(texts)
    return f"{', '.join(texts[:-1])} {word} {texts[-1]}"


def named(noun: str, items: Sequence[object], most: int = 8) -> str:
    """Some of them, by their names; those beyond `most` are counted.

    >>> named("rank", [3]), named("rank", [0, 2, 3])
    ('rank 3', 'ranks 0, 2 and 3')
    >>> named("rank", range(12), 3)
    'ranks 0, 1, 2 and 9 more'
    """
    shown = [str(item) for item in items[:most]]
    more = len(items) - most
    return f"{plural(noun, len(items))} {listed([*shown, f'{more} more'] if more > 0 else shown)}"
