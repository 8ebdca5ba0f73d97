"""Broken inputs: valid files of bytes, JSON and archives, changed by a seeded generator."""

from __future__ import annotations

import copy
import io
import json
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["EVIL", "broken_bytes", "broken_json", "broken_lines", "broken_text", "broken_zip"]

_DEEP = "\x01deep\x01"
_HUGE = "\x01huge\x01"
#: Texts that pages, paths and terminals may stumble over.
EVIL = (
    "../../outside",
    "/tmp/gpusim-fuzz-outside",
    "..\\..\\outside",
    "C:\\outside",
    "con:nul",
    "a\0b",
    "\x1b[2J\x1b]0;x\x07",
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    "]]></style></svg><script>",
    "' onmouseover='x",
    "&lt;b&gt; &amp;",
    "\ud800",
    "\u202e\ufeff\u0000",
    "9" * 5000,
    "x" * 20_000,
    "nan",
    "",
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**31, 2**62, 2**63, 2**64, -(2**63), 10**30, 1e308, -0.0),
    *(float("nan"), float("inf"), 0.5, [], {}, [[]], [None], {"a": 1}, [0, 1], [-1, 2**40]),
    *([2**40, 2**40, 2**40], [1] * 300, {"": ""}, ["a"], _DEEP, _HUGE),
)


def broken_bytes(data: bytes, draw: random.Random) -> bytes:
    """The data, changed once to four times: cut, flipped, overwritten, doubled, filled."""
    found = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        at = draw.randrange(len(found) + 1)
        kind = draw.randrange(9)
        if kind == 0:
            del found[at:]
        elif kind == 1 and found:
            found[at % len(found)] ^= 1 << draw.randrange(8)
        elif kind == 2:
            found[at:at] = draw.randbytes(draw.choice((1, 4, 64)))
        elif kind == 3:
            del found[at : at + draw.choice((1, 2, 8, 200))]
        elif kind == 4:
            found[at : at + 8] = draw.choice((b"\0" * 8, b"\xff" * 8, b"\x7f" + b"\xff" * 7))
        elif kind == 5:
            found[at:at] = found[at : at + 400]
        elif kind == 6:
            found[at:at] = draw.choice(EVIL).encode("utf-8", "surrogatepass")
        elif kind == 7 and found:
            found[at % len(found)] = draw.randrange(256)
        else:
            found[at : at + 4] = draw.randbytes(4)
    if draw.random() < 0.02:
        return draw.choice((b"", b"\0" * 100, draw.randbytes(300), bytes(found) * 20))
    return bytes(found)


def broken_text(text: str, draw: random.Random) -> bytes:
    """A text, changed as bytes, in words, or in its encoding."""
    if draw.random() < 0.4:
        return broken_bytes(text.encode(), draw)
    if draw.random() < 0.05:
        return text.encode(draw.choice(("utf-16", "utf-32", "utf-8-sig", "utf-7")))
    words = text.split(" ")
    for _ in range(draw.choice((1, 1, 2))):
        at = draw.randrange(len(words))
        kind = draw.randrange(5)
        if kind == 0:
            words[at] = draw.choice(EVIL)
        elif kind == 1:
            head, sign, _ = words[at].partition("=")
            words[at] = head + sign + str(draw.choice(VALUES))
        elif kind == 2:
            words.insert(at, draw.choice(words))
        elif kind == 3:
            words[at] = words[at] * draw.choice((0, 2, 500))
        else:
            words[at] = words[at].replace("=", draw.choice(("==", ":", "", "=-")))
    return " ".join(words).encode("utf-8", "surrogatepass")


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every place of a value of JSON: what holds it, and its key there."""
    found, left = [], [value]
    while left:
        holder = left.pop()
        keys = holder if isinstance(holder, dict) else range(len(holder))
        for key in keys:
            found.append((holder, key))
            if isinstance(holder[key], dict | list):
                left.append(holder[key])
    return found


def broken_json(text: str, draw: random.Random) -> bytes:
    """The text of a value of JSON with values and keys exchanged; often broken as text too."""
    if draw.random() < 0.25:
        return broken_bytes(text.encode(), draw)
    value = json.loads(text)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        places = _places(value) if isinstance(value, dict | list) else []
        if not places:
            break
        holder, key = draw.choice(places)
        kind = draw.randrange(6)
        if kind < 3:
            # A copy: what is put into it must not be there in the next case, nor in itself.
            holder[key] = copy.deepcopy(draw.choice((*VALUES, *EVIL)))
        elif kind == 3:
            holder[key] = _other_type(holder[key])
        elif kind == 4 and isinstance(holder, dict):
            holder[draw.choice(EVIL)] = holder.pop(key)
        elif isinstance(holder, dict):
            del holder[key]
        else:
            holder.insert(key, draw.choice(holder))
    changed = json.dumps(value, ensure_ascii=draw.random() < 0.7)
    deep = draw.choice(("[" * 200_000, "[" * 3000 + "]" * 3000, '{"a":' * 3000 + "1" + "}" * 3000))
    changed = changed.replace(json.dumps(_DEEP), deep).replace(json.dumps(_HUGE), "9" * 5000)
    if draw.random() < 0.1 and '": ' in changed:  # a key twice
        at = changed.index('": ')
        start = changed.rfind('"', 0, at)
        changed = changed[:start] + changed[start : at + 3] + "1, " + changed[start:]
    return changed.encode("utf-8", "surrogatepass")


def _other_type(value: Any) -> Any:
    if isinstance(value, str):
        return [value] if len(value) % 2 else len(value)
    if isinstance(value, bool) or value is None:
        return "true"
    if isinstance(value, int | float):
        return str(value)
    return dict(enumerate(value)) if isinstance(value, list) else [*value]


def broken_lines(text: str, draw: random.Random) -> bytes:
    """A text of JSON lines: one broken, or lines exchanged, doubled or left out."""
    lines = text.splitlines()
    at = draw.randrange(len(lines))
    kind = draw.randrange(8)
    if kind == 0:
        lines.insert(draw.randrange(len(lines)), lines.pop(at))
    elif kind == 1:
        lines.insert(at, draw.choice(lines))
    elif kind == 2:
        del lines[at]
    else:
        found = [line.encode() for line in lines]
        found[at] = broken_json(lines[at], draw)
        return b"\n".join(found) + b"\n"
    return ("\n".join(lines) + "\n").encode()


def broken_zip(
    data: bytes, draw: random.Random, member: Callable[[bytes, random.Random], bytes] = broken_bytes
) -> bytes:
    """An archive: its bytes broken, or made anew with a broken member or name, or a bomb."""
    if draw.random() < 0.4:
        return broken_bytes(data, draw)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        parts = [(one.filename, archive.read(one)) for one in archive.infolist()]
    at = draw.randrange(len(parts))
    name, content = parts[at]
    kind = draw.randrange(1, 6) if draw.random() < 0.98 else 0
    packing = zipfile.ZIP_STORED
    if kind == 2:
        parts[at] = draw.choice(EVIL).encode("utf-8", "replace").decode()[:500] + ".npy", content
    elif kind == 1:
        parts.append((draw.choice(EVIL).encode("utf-8", "replace").decode()[:500], content))
    elif kind == 0:  # a bomb: little data that unpacks to much
        parts[at], packing = (name, content + bytes(1 << 25)), zipfile.ZIP_DEFLATED
    elif kind == 3:
        del parts[at]
    else:
        parts[at] = name, member(content, draw)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", packing) as archive:
        for each, inside in parts:
            info = zipfile.ZipInfo(each or "x")
            info.compress_type = packing
            archive.writestr(info, inside)
    return made.getvalue()


def broken_header(data: bytes, draw: random.Random) -> bytes:
    """A .npy file: its header's text changed, and its length kept or wrong."""
    size = int.from_bytes(data[8:10], "little")
    head, rest = data[10 : 10 + size].decode("latin1"), data[10 + size :]
    shapes = ("(2**63,)", "(1099511627776,)", "(-1,)", "(4294967296, 4294967296)", "()", "(3.5,)")
    kinds = ("'|O'", "'<f8'", "'<U99999999'", "'|V1000000000'", "[('a','<f8')]", "'>i8'", "'m8[s]'")
    start = head.index("'shape':") + 9
    if draw.random() < 0.5:
        stop = head.index(")", start) + 1
        head = head[:start] + draw.choice(shapes) + head[stop:]
    else:
        at = head.index("'descr':") + 9
        head = head[:at] + draw.choice(kinds) + head[head.index(",", at) :]
    if draw.random() < 0.2:
        head = "(" * draw.choice((10, 200, 5000)) + head
    text = head.encode("latin1")
    return data[:8] + len(text).to_bytes(4, "little")[:2] + text + rest


def broken_safetensors(data: bytes, draw: random.Random) -> bytes:
    """A .safetensors file: bytes broken, or its header as JSON, with the right length or not."""
    if draw.random() < 0.25:
        return broken_bytes(data, draw)
    size = int.from_bytes(data[:8], "little")
    text = broken_json(data[8 : 8 + size].decode(), draw)
    length = len(text) if draw.random() < 0.9 else draw.choice((0, 2**63, 2**64 - 1, size, 10**8))
    return length.to_bytes(8, "little") + text + data[8 + size :]


def write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
