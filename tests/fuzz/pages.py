"""Pages with names that others chose: each has only the elements that gpusim writes."""

from __future__ import annotations

import base64
import random
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.fuzz.mutations import EVIL

__all__ = ["check_page", "equal", "faults", "resume", "study"]

ELEMENTS = frozenset(
    "html head meta title style body header main section article h1 h2 h3 h4 p pre code table "
    "thead tbody tr th td img footer div span strong em ul ol li a figure figcaption details br "
    "summary b small nav dl dt dd hr caption colgroup col kbd abbr".split()
)
ATTRIBUTES = frozenset(
    "lang charset name content class src alt href id title scope colspan rowspan open role "
    "aria-label aria-hidden tabindex width height style".split()
)
IN_PICTURES = frozenset("svg g path defs use rect line text tspan clippath metadata style".split())
PICTURE_PARTS = frozenset(
    "circle ellipse polygon polyline image title desc rdf:rdf cc:work dc:type dc:date dc:format "
    "dc:creator cc:agent dc:title lineargradient stop pattern mask".split()
)


class _Checker(HTMLParser):
    def __init__(self, picture: bool) -> None:
        super().__init__()
        self.picture = picture
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = IN_PICTURES | PICTURE_PARTS if self.picture else ELEMENTS
        assert tag in known, f"an element <{tag}> with {attrs!r:.200}"
        for name, value in attrs:
            assert not name.startswith("on"), f"<{tag} {name}={value!r:.100}>"
            assert self.picture or name in ATTRIBUTES, f"<{tag} {name}={value!r:.100}>"
            if name in ("src", "href", "xlink:href") and value is not None:
                safe = ("data:image/svg+xml;base64,", "data:image/png;base64,", "#", "https://")
                assert value.startswith(safe), f"<{tag} {name}={value!r:.100}>"
                if value.startswith(safe[0]):
                    drawing = base64.b64decode(value.removeprefix(safe[0])).decode()
                    check_page(drawing, picture=True)

    def unknown_decl(self, data: str) -> None:
        raise AssertionError(f"a declaration {data!r:.100}")


def check_page(text: str, *, picture: bool = False) -> None:
    """AssertionError if a page or SVG has an element or attribute that gpusim never writes."""
    checker = _Checker(picture)
    checker.feed(text)
    checker.close()


def _text(draw: random.Random) -> str:
    parts = [each for each in EVIL if "\ud800" not in each]
    return draw.choice(parts)[:300] + draw.choice(("", "a/b.py:3", *parts))[:300]


def _number(draw: random.Random) -> int:
    return draw.choice((0, 1, 2, 2**40))


def study(draw: random.Random, path: Path) -> None:
    """A study of arrays with such names."""
    import numpy as np

    from gpusim.study import sweep
    from gpusim.tools.study import report

    x = np.arange(32, dtype=np.float32).reshape(8, 4) / 3
    named = {_text(draw) or "x": x for _ in range(2)}
    report.write(sweep(named, orders=["ring"], dtypes=["float32"]), path)


def resume(draw: random.Random, path: Path) -> None:
    """A table of pairs whose states, sites and errors are such texts."""
    from gpusim.tools.resume import report
    from gpusim.tools.resume.findings import DIFFERENT, REFUSED, SAME, Finding, Pair
    from gpusim.tools.resume.running import Table

    plan: Any = SimpleNamespace(saves=(1, 2), loads=(1, 2))
    table = Table(plan, said=[_text(draw) for _ in range(2)])
    for save in (1, 2):
        found = Finding(_text(draw), _text(draw), _text(draw), 1, 2, _text(draw))
        verdict = draw.choice((SAME, DIFFERENT, REFUSED))
        refused = verdict == REFUSED
        findings = (found,) if verdict == DIFFERENT else ()
        error = _text(draw) if refused else ""
        table.pairs.append(Pair(save, 2, 3, verdict, findings, error))
    report.write(table, path)


def faults(draw: random.Random, path: Path) -> None:
    """A campaign whose reasons and places are such texts."""
    from gpusim.tools.faults import report
    from gpusim.tools.faults.campaign import Campaign, Judged
    from gpusim.tools.faults.verdicts import VERDICTS, Verdict
    from gpusim.torch.distributed.faults.plans import parse

    reference: Any = SimpleNamespace(calls=3)
    plan = parse("kill rank=1 call=2")
    judged = [
        Judged(plan, Verdict(draw.choice(VERDICTS), _text(draw)), _text(draw)) for _ in range(4)
    ]
    found = Campaign(2, reference, judged, smallest=draw.choice(judged))
    report.write(found, _text(draw), _text(draw), path)


def equal(draw: random.Random, path: Path) -> None:
    """A comparison that failed, or whose tensors have such names."""
    from gpusim.tools.equal import report
    from gpusim.tools.equal.comparing import Comparison

    trace: Any = SimpleNamespace(
        ranks=2, by_rank=[SimpleNamespace(end={}, events=[])], ends=lambda name: [None]
    )
    matching: Any = SimpleNamespace(pairs=[], unmatched=[])
    found = Comparison(trace, trace, matching, [], [], {_text(draw): [_text(draw)]})
    found.failure = _text(draw) or "x"
    found.said = [_text(draw)]
    report.write(found, path)
