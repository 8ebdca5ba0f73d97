"""JSON that others wrote: parsed without recursion, within bounds, and strictly."""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["At", "parse"]

_TOKEN = re.compile(
    r"[ \t\r\n]*(?:([\[\]{},:])|(-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?(?![0-9.]))"
    r'|("(?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*")|(true|false|null)(?![A-Za-z]))'
)
_SPACE = re.compile(r"[ \t\r\n]*\Z")
_WORDS = {"true": True, "false": False, "null": None}
#: Digits of a number: far more than any that is meant.
_DIGITS = 40


def parse(text: str, *, depth: int = 64, values: int = 1_000_000) -> Any:
    """The value of a JSON text.

    **Arguments**: `depth` bounds how deeply lists and objects are nested, `values` their number
    with that of all else in them.

    **Raises**: ValueError, with line and column, for text that is not JSON (NaN and Infinity are
    not), for a key that an object has twice, and beyond the bounds.

    >>> parse('{"a": [1, 2.5, "b"]}')
    {'a': [1, 2.5, 'b']}
    >>> parse('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ...
    ValueError: line 1, column 10: the key 'a' is there twice
    >>> parse("[NaN]")
    Traceback (most recent call last):
    ...
    ValueError: line 1, column 2: 'NaN]': expected JSON
    """
    return _Parser(text, depth, values).run()


class _Parser:
    """`stack` holds the open lists and objects, `keys` the key that each object waits to fill."""

    def __init__(self, text: str, depth: int, values: int) -> None:
        self.text, self.depth, self.values = text, depth, values
        self.at = self.start = 0
        self.stack: list[Any] = []
        self.keys: list[str | None] = []
        self.result: list[Any] = []

    def run(self) -> Any:
        state = "value"  # "value", "first" (or the end), "key", "colon", "next"
        while True:
            if state == "next" and not self.stack:
                if not _SPACE.match(self.text, self.at):
                    self.start = self.at
                    raise self.error(f"{self.rest()}: expected the end")
                return self.result[0]
            state = self.step(state, *self.token())

    def token(self) -> tuple[str, str]:
        """The kind of the next token, and the token."""
        found = _TOKEN.match(self.text, self.at)
        if found is None:
            space = re.compile(r"[ \t\r\n]*").match(self.text, self.at)
            self.start = self.at if space is None else space.end()
            raise self.error(f"{self.rest()}: expected JSON")
        group = found.lastindex or 0
        self.start, self.at = found.start(group), found.end()
        return ("mark", "number", "string", "word")[group - 1], found[group]

    def step(self, state: str, kind: str, token: str) -> str:
        if kind == "mark" and token in "]}" and state in ("first", "next"):
            return self.close(token)
        if state in ("value", "first") and not (self.is_object() and self.keys[-1] is None):
            return self.value(kind, token)
        if state in ("key", "first") and kind == "string":
            self.set_key(self.string(token))
            return "colon"
        if state == "colon" and token == ":":
            return "value"
        if state == "next" and token == ",":
            return "key" if self.is_object() else "value"
        expected = {"key": "a key", "first": "a key", "colon": "':'", "next": "',' or the end"}
        raise self.error(f"{token!r:.40}: expected {expected.get(state, 'a value')}")

    def is_object(self) -> bool:
        return bool(self.stack) and isinstance(self.stack[-1], dict)

    def value(self, kind: str, token: str) -> str:
        self.values -= 1
        if self.values < 0:
            raise self.error("more values than are expected in such a file")
        if kind == "mark":
            if token not in "[{":
                raise self.error(f"{token!r}: expected a value")
            if len(self.stack) >= self.depth:
                raise self.error(f"nested deeper than {self.depth}")
            opened: Any = [] if token == "[" else {}
            self.put(opened)
            self.stack.append(opened)
            self.keys.append(None)
            return "first"
        found: Any = _WORDS.get(token)
        if kind == "string":
            found = self.string(token)
        elif kind == "number":
            found = self.number(token)
        self.put(found)
        return "next"

    def string(self, token: str) -> str:
        text: str = json.loads(token)  # of one string: escapes
        return text

    def number(self, token: str) -> int | float:
        if len(token) > _DIGITS:
            raise self.error(f"{token[:20]}...: a number of more than {_DIGITS} characters")
        if re.fullmatch(r"-?[0-9]+", token):
            return int(token)
        value = float(token)
        if value in (float("inf"), float("-inf")):
            raise self.error(f"{token}: expected a finite number")
        return value

    def set_key(self, key: str) -> None:
        if key in self.stack[-1]:
            raise self.error(f"the key {key!r:.40} is there twice")
        self.keys[-1] = key

    def put(self, value: Any) -> None:
        if not self.stack:
            self.result.append(value)
        elif isinstance(self.stack[-1], dict):
            self.stack[-1][self.keys[-1]] = value
            self.keys[-1] = None
        else:
            self.stack[-1].append(value)

    def close(self, token: str) -> str:
        if token != ("}" if self.is_object() else "]"):
            raise self.error(f"{token!r}: it closes what is not open")
        self.stack.pop()
        self.keys.pop()
        return "next"

    def rest(self) -> str:
        return (
            repr(self.text[self.start : self.start + 20])
            if self.start < len(self.text)
            else ("the end")
        )

    def error(self, message: str) -> ValueError:
        line = self.text.count("\n", 0, self.start) + 1
        column = self.start - self.text.rfind("\n", 0, self.start)
        return ValueError(f"line {line}, column {column}: {message}")


class At:
    """A value of a file of JSON, and its place there, which errors name.

    >>> At({"a": [1, "x"]}, "")["a"].items(2)[1].number(0, 9)
    Traceback (most recent call last):
    ...
    ValueError: a[1]: 'x': expected an integer from 0 to 9
    """

    def __init__(self, value: Any, place: str) -> None:
        self.value, self.place = value, place

    def error(self, expected: str) -> ValueError:
        return ValueError(f"{self.place or 'the file'}: {_brief(self.value)}: expected {expected}")

    def expect(self, kind: Any, name: str) -> Any:
        if not isinstance(self.value, kind) or (kind is int and isinstance(self.value, bool)):
            raise self.error(name)
        return self.value

    def __getitem__(self, key: str) -> At:
        self.expect(dict, "an object")
        if key not in self.value:
            raise ValueError(f"{self._path(key)}: missing")
        return At(self.value[key], self._path(key))

    def get(self, key: str, default: Any) -> At:
        self.expect(dict, "an object")
        return At(self.value.get(key, default), self._path(key))

    def _path(self, key: str) -> str:
        return f"{self.place}.{key}" if self.place else key

    def items(self, most: int) -> list[At]:
        self.expect(list, "a list")
        if len(self.value) > most:
            raise ValueError(
                f"{self.place}: {len(self.value):,} entries: expected at most {most:,}"
            )
        return [At(value, f"{self.place}[{k}]") for k, value in enumerate(self.value)]

    def number(self, least: int, most: int) -> int:
        self.expect(int, f"an integer from {least} to {most:,}")
        if not least <= self.value <= most:
            raise self.error(f"an integer from {least} to {most:,}")
        found: int = self.value
        return found

    def text(self) -> str:
        found: str = self.expect(str, "a string")
        return found

    def flag(self) -> bool:
        found: bool = self.expect(bool, "true or false")
        return found

    def choice(self, known: Any) -> str:
        found = self.text()
        if found not in known:
            raise self.error(f"one of {', '.join(known)}")
        return found


def _brief(value: Any) -> str:
    """A value for an error; lists and objects, which may be deep, by their kind."""
    if isinstance(value, list):
        return f"a list of {len(value):,}"
    if isinstance(value, dict):
        return "an object"
    return f"{value!r:.80}"
