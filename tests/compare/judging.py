"""A comparison of two runs against what is known of their edit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.compare.pair import Effect, Pair
from tests.compare.truth import Line, Truth, calls_of

__all__ = ["Judged", "judge"]


@dataclass
class Judged:
    """The faults of a comparison, by kind.

    **Attributes**:

    - `false`: sentences that the runs contradict: a place, a rank, a cause that is called proven.
    - `mismatches`: between the text, JSON and the exit code.
    - `cause`: the class of the cause, or "equal".
    - `right`: whether it is one that is expected, with the claims that are expected.
    """

    false: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    cause: str = ""
    certainty: str = ""
    place: str = ""
    right: bool = False
    missing: list[str] = field(default_factory=list)

    @property
    def word(self) -> str:
        """The verdict in a word."""
        if self.false:
            return "FALSE"
        if self.mismatches:
            return "mismatch"
        return "right" if self.right else "class"


@dataclass(frozen=True)
class Said:
    """An answer of `gpusim compare`: JSON, text, and the exit codes of both."""

    found: Mapping[str, Any]
    text: str
    codes: tuple[int, int]


def judge(
    pair: Pair, said: Said, records: Mapping[str, Path], truths: Mapping[str, Truth]
) -> Judged:
    """Judge a comparison of two records, a and b."""
    judged = Judged()
    verdict = said.found["verdict"]
    _codes(pair, said, judged)
    if verdict is None:
        judged.cause, judged.right = "equal", pair.equal
        if not pair.equal:
            judged.false.append("the runs are called equal")
        return judged
    cause, interval = verdict["cause"], verdict["interval"]
    judged.cause, judged.certainty = cause["class"], cause["certainty"]
    judged.place = place_of(interval)
    _class(pair, cause, judged)
    _text(said.text, verdict, judged)
    if pair.equal:
        judged.false.append("the runs are called different")
    elif pair.effect is None:
        judged.false += false_of_collective(interval, records)
    else:
        for name, truth in truths.items():
            judged.false += false_places(pair.effect.in_run(name), interval, name, truth)
    judged.false += false_ranks(verdict, records)
    return judged


def place_of(interval: Mapping[str, Any]) -> str:
    """The interval in short, by lines of run a."""
    shown = []
    for key in ("after", "until"):
        places = interval.get(key) or {}
        place = places.get("a") or places.get("b")
        if place:
            shown.append(f":{place['site'].rpartition(':')[2]}#{place['sequence']}")
    return f"{interval['kind']} {'-'.join(shown)}"


def _codes(pair: Pair, said: Said, judged: Judged) -> None:
    equal = said.found["equal"]
    if equal != (said.found["verdict"] is None):
        judged.mismatches.append("'equal' and 'verdict' disagree")
    for form, code in zip(("text", "--json"), said.codes, strict=True):
        if code != (0 if equal else 1):
            judged.mismatches.append(f"exit code {code} with {form}, equal is {equal}")


def _class(pair: Pair, cause: Mapping[str, Any], judged: Judged) -> None:
    judged.right = cause["class"] in pair.classes
    if not judged.right and cause["certainty"] == "proven":
        judged.false.append(f"{cause['class']} is called proven, it is {pair.classes}")
    for key, expected in pair.claims.items():
        if cause.get(key) != expected:
            judged.right = False
            judged.missing.append(f"{key} is {cause.get(key)}, expected {expected}")


def _text(text: str, verdict: Mapping[str, Any], judged: Judged) -> None:
    """The text has the places of the interval, and the words of the cause."""
    plain = " ".join(text.split())
    words = verdict["cause"].get("words")
    if not words or words not in plain:
        judged.mismatches.append("the text lacks the words of the cause")
    for key in ("until", "after"):
        places = verdict["interval"].get(key) or {}
        sites = {Path(place["site"]).name for place in places.values() if place}
        if sites and not any(site in plain for site in sites):
            judged.mismatches.append(f"the text lacks {key} {sorted(sites)}")
    if verdict["interval"]["kind"] != "turn" and "after" in verdict["interval"]:
        judged.mismatches.append("a lower bound of another kind than turn")


def false_places(effect: Effect, interval: Mapping[str, Any], name: str, truth: Truth) -> list[str]:
    """The sentences about a place in run `name` that its effect contradicts."""
    found = []
    until = (interval.get("until") or {}).get(name)
    after = (interval.get("after") or {}).get(name)
    if until and not truth.begun(effect, until["rank"], until["sequence"]):
        found.append(f"{effect} is behind {until} of {name}")
    if after and truth.over(effect, after["rank"], after["sequence"]):
        found.append(f"{effect} is before {after} of {name}")
    if interval["kind"] == "call" and until:
        places = truth.places(effect)
        begin, end = places.get(until["rank"], next(iter(places.values())))
        if not begin <= until["sequence"] < max(end, begin + 1):
            found.append(f"{effect} is not the call {until} of {name}")
    return found


def results_of(record: Path) -> dict[tuple[int, int], Any]:
    """The results of a record's calls, by rank and sequence."""
    found = {}
    for file in sorted(record.glob("calls*.jsonl")):
        for text in file.read_text().splitlines():
            line = json.loads(text)
            if line["kind"] == "result":
                calls = [(rank, number) for rank, number in line["calls"]]
                found.update(dict.fromkeys(calls, line["results"]))
    return found


def false_of_collective(interval: Mapping[str, Any], records: Mapping[str, Path]) -> list[str]:
    """Runs of one text differ first in the results of a collective whose operands are equal."""
    if interval["kind"] != "call":
        return []
    until = interval["until"]["a"]
    rank, sequence = until["rank"], until["sequence"]
    calls = [calls_of(records[name])[rank][: sequence + 1] for name in "ab"]
    results = [results_of(records[name]) for name in "ab"]
    for number in range(sequence):
        if results[0].get((rank, number)) != results[1].get((rank, number)):
            return [f"results of call {number} of rank {rank} differ before {until}"]
    if calls[0][-1].get("operands") != calls[1][-1].get("operands"):
        return [f"the operands of {until} differ"]
    if results[0].get((rank, sequence)) == results[1].get((rank, sequence)):
        return [f"the results of {until} are equal"]
    return []


def false_ranks(verdict: Mapping[str, Any], records: Mapping[str, Path]) -> list[str]:
    """Ranks that are said to have other operands, and have not; and the others."""
    found = []
    if verdict["kind"] == "operands" and verdict["a"].get("number") is not None:
        operands = [_operands_of(records[name], verdict[name]) for name in "ab"]
        differing = sorted(
            rank for rank in operands[0].keys() & operands[1].keys()
            if operands[0][rank] != operands[1][rank]
        )  # fmt: skip
        if differing != sorted(verdict["ranks"]):
            found.append(f"operands differ on the ranks {differing}, not on {verdict['ranks']}")
    after = verdict["interval"].get("after")
    if after:
        values = []
        for name in "ab":
            place = after[name]["rank"], after[name]["sequence"]
            call = calls_of(records[name])[place[0]][place[1]]
            values.append((call.get("operands"), results_of(records[name]).get(place)))
        same_ranks = verdict["kind"] != "results"
        if values[0][not same_ranks :] != values[1][not same_ranks :]:
            found.append(f"the call {after} is not equal in both runs")
    return found


def _operands_of(record: Path, call: Line) -> dict[int, Any]:
    """The operands of each rank's call in a collective."""
    key = call["group"], call["number"]
    found = {}
    for rank, calls in calls_of(record).items():
        for each in calls:
            if (each["group"], each.get("number")) == key and "operands" in each:
                found[rank] = each["operands"]
    return found
