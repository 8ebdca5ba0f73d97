"""The readers of what others wrote: how each is called, what it may raise, its memory."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpusim.errors import GpusimError
from tests.fuzz import samples
from tests.fuzz.mutations import (
    EVIL,
    VALUES,
    broken_bytes,
    broken_header,
    broken_json,
    broken_lines,
    broken_safetensors,
    broken_text,
    broken_zip,
)

__all__ = ["READERS", "Reader"]

MIB = 1 << 20


class CommandError(Exception):
    """A command ended with code 2; its text is on standard error."""


@dataclass(frozen=True)
class Reader:
    """A reader.

    **Attributes**: `make` writes a broken input into a folder; `read` reads it from there; `errors`
    are those that it documents; `names`, of which an error has one; `memory`, the most bytes that
    it may take at once, also where the input claims more.
    """

    name: str
    make: Callable[[random.Random, Path], None]
    read: Callable[[Path], object]
    errors: tuple[type[BaseException], ...]
    names: tuple[str, ...] = ()
    memory: int = 64 * MIB


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _one(
    name: str, data: Callable[[], bytes], broken: Callable[[bytes, random.Random], bytes]
) -> Callable[[random.Random, Path], None]:
    """A folder of one file, sometimes a link, a folder, or nothing in its place."""

    def make(draw: random.Random, folder: Path) -> None:
        path, kind = folder / name, draw.random()
        if kind < 0.005:
            path.mkdir()
        elif kind < 0.01:
            path.symlink_to("nowhere")
        elif kind > 0.005:
            path.write_bytes(broken(data(), draw))

    return make


def _as_text(
    broken: Callable[[str, random.Random], bytes],
) -> Callable[[bytes, random.Random], bytes]:
    return lambda data, draw: broken(data.decode(), draw)


# Records


def _record(draw: random.Random, folder: Path, name: str = "run") -> None:
    files = dict(samples.record())
    if draw.random() < 0.8:
        files["calls.jsonl"] = broken_lines(files["calls.jsonl"].decode(), draw)
    else:
        for key in [key for key in files if key.endswith(".npz")]:
            files[key] = broken_zip(files[key], draw, _member)
    _write(folder / name, files)


def _member(data: bytes, draw: random.Random) -> bytes:
    return (broken_header if draw.random() < 0.6 else broken_bytes)(data, draw)


def _two_records(draw: random.Random, folder: Path) -> None:
    _write(folder / "a", samples.record(1.5))
    _record(draw, folder, "run")


def _read_record(folder: Path) -> None:
    from gpusim.tools.compare.runs import read

    run = read(folder / "run")
    for event in run.events:
        for call in event.calls.values():
            run.arrays(call.operands)
            run.arrays(call.results)


def _command(*words: str) -> str:
    """Run a command of gpusim's here; CommandError with its text where it refuses."""
    from gpusim.tools.cli import main

    out, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(said):
        try:
            code = main(words)
        except SystemExit as error:
            code = error.code  # type: ignore[assignment]
    text = said.getvalue()
    if "Traceback" in text:
        raise AssertionError(text[-300:])
    if code == 2 or (code == 1 and text):
        raise CommandError(text)
    assert code in (0, 1), code
    return out.getvalue()


def _compare(folder: Path) -> None:
    _command("compare", str(folder / "a"), str(folder / "run"), "--json")
    _command("compare", str(folder / "run"), str(folder / "a"))


# Orders, plans, reductions


def _read_order(folder: Path) -> None:
    from gpusim import revealed

    found = revealed.read(folder / "order.json")
    for call in found.calls:
        if not call.unexplained and call.elements < 10_000:
            found.trees_of_call(call)


def _read_plan(folder: Path) -> None:
    from gpusim.torch.distributed.faults.plans import parse

    parse(_text(folder))


def _read_reduction(folder: Path) -> None:
    gpusim_reduction = __import__("gpusim").as_reduction
    text = _text(folder)
    assert gpusim_reduction(str(gpusim_reduction(text))) == gpusim_reduction(text)


def _text(folder: Path) -> str:
    return (folder / "text").read_bytes().decode("utf-8", "surrogateescape")


def _texts(*valid: str) -> Callable[[random.Random, Path], None]:
    def make(draw: random.Random, folder: Path) -> None:
        (folder / "text").write_bytes(broken_text(draw.choice(valid), draw))

    return make


def _make_mapping(draw: random.Random, folder: Path) -> None:
    fields = {"order": "ring", "accumulate": "float32", "wire": "bfloat16", "seed": 3}
    (folder / "text").write_bytes(broken_json(json.dumps(fields), draw))


def _read_mapping(folder: Path) -> None:
    import gpusim

    try:
        value = json.loads((folder / "text").read_bytes())
    except (ValueError, RecursionError):
        return  # not a mapping that a caller could have
    gpusim.as_reduction(value)


# Arrays


def _arrays(name: str) -> Callable[[Path], None]:
    def read(folder: Path) -> None:
        from gpusim.tools.study.files import read_arrays

        for values in read_arrays(folder / name, "*").values():
            np.asarray(values).reshape(-1)[:10].tobytes()

    return read


def _infer(folder: Path) -> None:
    from gpusim.tools.twins.inferring import read

    read(folder / "x.npz", "float32" if len(os.listdir(folder)) % 2 else None)


def _study(folder: Path) -> None:
    words = "--tensor * --orders ring --dtypes float32 --report"
    _command("study", "--input", str(folder / "x.npz"), *words.split(), str(folder / "page.html"))


def _read_store(folder: Path) -> None:
    from gpusim.tools.study.store import Store

    identity = json.loads(samples.store().splitlines()[0])["input"]
    Store(identity, folder / "x.store", resume=True).close()


# Traces of equal and resume, error files, logs


def _trace(draw: random.Random, folder: Path) -> None:
    files = dict(samples.trace())
    if draw.random() < 0.9:
        files["rank-0.jsonl"] = broken_lines(files["rank-0.jsonl"].decode(), draw)
    else:
        files["rank-0.bin"] = broken_bytes(files["rank-0.bin"], draw)
    _write(folder, files)


def _read_trace(folder: Path) -> None:
    from gpusim.tools.equal.traces import RankTrace

    trace = RankTrace(folder / "rank-0.jsonl")
    for event in trace.events:
        trace.array(event)


ERROR = json.dumps(
    {"message": {"message": "boom", "extraInfo": {"py_callstack": "a", "timestamp": "1"}}}
)


def _read_error(folder: Path) -> None:
    from gpusim.tools.error_files import recorded_error

    recorded_error(folder / "error.json")


# Simulated IPUs, PopTorch


def _holder(folder: Path) -> None:
    from gpusim.devices.holders import parse

    found = parse(0, (folder / "text").read_bytes())
    str(found), found.started
    assert found.user is None or found.user.isprintable()


HOLDER = json.dumps({"device": 1, "pid": 7, "user": "me", "command": "a b", "since": 1e9})


def _heartbeat(folder: Path) -> None:
    from gpusim.runtime import activity

    activity.read(folder)


def _heartbeat_file() -> bytes:
    import zlib

    from gpusim.runtime import activity

    raw = activity.HEADER.pack(1.0, 7, 4) + b"text"
    return activity.CHECKSUM.pack(zlib.crc32(raw)) + raw


def _executable(data: bytes, draw: random.Random) -> bytes:
    """Broken, and often signed anew: a digest protects from damage, not from a writer."""
    if draw.random() < 0.3:
        return broken_bytes(data, draw)
    body = broken_zip(data[:-64], draw, lambda text, draw: _header_or_part(text, draw))
    return body + hashlib.sha256(body).hexdigest().encode()


def _header_or_part(data: bytes, draw: random.Random) -> bytes:
    return broken_json(data.decode(), draw) if data[:1] == b"{" else broken_bytes(data, draw)


def _read_executable(folder: Path) -> None:
    from gpusim.poptorch.executor import saving

    version = json.loads(saving.parts_of(samples.executable())[saving.HEADER])["poptorch_version"]
    saving.read(folder / "model.poptorch", version, model=False)


def _executable_errors() -> tuple[type[BaseException], ...]:
    from gpusim.poptorch.executor import saving

    return saving.Invalid, OSError


OPTIONS = "deviceIterations(4)\nreplicationFactor(2)\nTraining.gradientAccumulation(8)\n"
OPTIONS += "outputMode(poptorch.OutputMode.Sum)\n"


def _options_errors() -> tuple[type[BaseException], ...]:
    from gpusim.poptorch.options.config_file import ConfigFileError

    return ConfigFileError, AttributeError, ValueError, TypeError, RuntimeError, OSError


def _read_options(folder: Path) -> None:
    from gpusim import poptorch

    poptorch.Options().loadFromFile(str(folder / "options.conf"))


# Sockets and variables


def _message(draw: random.Random, folder: Path) -> None:
    from gpusim.torch.distributed.runners.messages import HEADER

    content, payload = broken_json('{"call": [1, {"tensor": 0}], "group": "a"}', draw), b"x" * 40
    length, size = len(content), len(payload)
    if draw.random() < 0.3:
        length = draw.choice((0, 1, length - 1, 2**31, 2**32 - 1, 10**6))
    if draw.random() < 0.3:
        size = draw.choice((0, 1, 39, 41, 2**31, 2**40, 2**63, 2**64 - 1))
    raw = HEADER.pack(max(length, 0), draw.random() < 0.2, size) + content + payload
    (folder / "message").write_bytes(broken_bytes(raw, draw) if draw.random() < 0.3 else raw)


def _receive(folder: Path) -> None:
    from gpusim.torch.distributed.runners.messages import Channel

    data = (folder / "message").read_bytes()
    near, far = socket.socketpair()
    channel = Channel(near)

    def send() -> None:
        with contextlib.suppress(OSError):
            far.sendall(data)
        far.close()

    sender = threading.Thread(target=send)
    sender.start()
    try:
        while channel.receive() is not None:
            pass
    finally:
        near.close()
        sender.join()


class _Watching:
    """A hub's part that reads first messages, without the process that it is forked into."""

    token = "token"

    def __init__(self) -> None:
        from gpusim.tools.hub import Hub

        self.read = lambda *given: Hub.read(self, *given)  # type: ignore[arg-type]
        self.joining: dict[Any, Any] = {}
        self.admitted: list[Any] = []

    def forget(self, end: Any) -> None: ...

    def watch(self, end: Any, act: Any) -> None: ...

    def admit(self, member: Any) -> None:
        from gpusim.tools.members import Forming

        Forming(member.key, member.size).refusal(member)
        self.admitted.append(member)


HELLO = {"token": "token", "key": "k", "name": "main", "site": "a.py:1", "rank": 0, "size": 2}
HELLO |= {"timeout": 3.0, "joins": [1]}


def _hello(folder: Path) -> None:
    near, far = socket.socketpair()
    hub, received = _Watching(), bytearray()
    data = (folder / "text").read_bytes()[:100_000] + b"\n"
    near.setblocking(False)
    with near, far:
        for start in range(0, len(data), 50_000):
            far.sendall(data[start : start + 50_000])
            if near.fileno() >= 0:
                hub.read(near, 1, received)


VARIABLES = {
    "GPUSIM_IPUS": "8",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "POPDIST_NUM_TOTAL_REPLICAS": "4",
    "POPDIST_NUM_LOCAL_REPLICAS": "2",
    "POPDIST_REPLICA_INDEX_OFFSET": "2",
    "GPUSIM_THREADS": "2",
    "GPUSIM_KEEP_MIB": "64",
    "GPUSIM_KERNELS": "numpy",
}


def _variables(draw: random.Random, folder: Path) -> None:
    found = dict(VARIABLES)
    for name in draw.sample([*found], draw.choice((1, 1, 2, 4))):
        text = str(draw.choice((*EVIL, *VALUES, "0", "-1", "3.0", "1e9", " 2 ", "٣", "+1")))
        found[name] = text.replace("\0", "?").encode("utf-8", "replace").decode()[:9000]
    (folder / "variables.json").write_text(json.dumps(found))


def _read_variables(folder: Path) -> None:
    from unittest import mock

    from gpusim.devices.table import Table
    from gpusim.fallback import kernels, memory, threads
    from gpusim.runtime import environment

    given = json.loads((folder / "variables.json").read_text())
    refused: list[Exception] = []
    with mock.patch.dict(os.environ, given):
        for read in (
            environment.read,
            environment.popdist,
            Table.from_environment,
            threads.default_count,
            memory.default_limit,
            kernels.setting,
        ):
            try:
                read()
            except (GpusimError, ValueError) as error:
                assert any(name in str(error) for name in (*given, "GPUSIM")), error
                refused.append(error)
    if refused:
        raise refused[0]


# Pages


def _named_record(draw: random.Random, folder: Path) -> None:
    files = dict(samples.record(1.5))
    lines = [json.loads(line) for line in files["calls.jsonl"].splitlines()]
    text = draw.choice([each for each in EVIL if "\ud800" not in each])
    for line in lines:
        for key in ("site", "operation", "group", "op", "reduction", "torch", "error", "schedule"):
            if key in line and (key != "group") and draw.random() < 0.5:
                line[key] = text
    files["calls.jsonl"] = "".join(json.dumps(line) + "\n" for line in lines).encode()
    _write(folder / "a", samples.record())
    _write(folder / draw.choice(("b<b>", "b' onload='x", 'b"><i>', "run")), files)


def _page_of_compare(folder: Path) -> None:
    from tests.fuzz.pages import check_page

    other = next(each for each in folder.iterdir() if each.name != "a")
    page, picture = folder / "page.html", folder / "picture.svg"
    words = ("--html", str(page), "--picture", str(picture))
    _command("compare", str(folder / "a"), str(other), *words)
    check_page(page.read_text(encoding="utf-8"))
    if picture.exists():
        check_page(picture.read_text(encoding="utf-8"), picture=True)


def _page(name: str) -> Reader:
    from tests.fuzz import pages

    def make(draw: random.Random, folder: Path) -> None:
        (folder / "seed").write_text(str(draw.randrange(2**40)))

    def read(folder: Path) -> None:
        draw = random.Random((folder / "seed").read_text())
        getattr(pages, name)(draw, folder / "page.html")
        pages.check_page((folder / "page.html").read_text(encoding="utf-8"))

    return Reader(f"page-of-{name}", make, read, (), memory=128 * MIB)


def _readers() -> list[Reader]:
    data: tuple[type[BaseException], ...] = (ValueError, OSError)
    wrong: tuple[type[BaseException], ...] = (ValueError, TypeError, GpusimError)
    command: tuple[type[BaseException], ...] = (CommandError,)
    run, small = ("/run", "calls.jsonl"), 24 * MIB
    plans = ("kill rank=2 call=17, flip rank=1 call=9 bit=30", "late rank=0 call=2 seconds=30")
    texts = ("ring accumulate=float32 wire=int8:amax:64@ends", "tree rounding=stochastic seed=7")
    order = _one("order.json", lambda: samples.order().encode(), _as_text(broken_json))
    npz = _one("x.npz", samples.npz, lambda data, draw: broken_zip(data, draw, _member))
    npy = _one("x.npy", samples.npy, _member)
    tensors = _one("x.safetensors", samples.safetensors, broken_safetensors)
    store = _one("x.store", samples.store, _as_text(broken_lines))
    error = _one("error.json", ERROR.encode, _as_text(broken_json))
    holder = _one("text", HOLDER.encode, _as_text(broken_json))
    model = _one("model.poptorch", samples.executable, _executable)
    options = _one("options.conf", OPTIONS.encode, _as_text(broken_text))
    hello = _one("text", lambda: json.dumps(HELLO).encode(), _as_text(broken_json))
    torch = _one("x.pt", samples.torch_file, broken_zip)
    heartbeat = _one("instance-0", _heartbeat_file, broken_bytes)
    return [
        Reader("record", _record, _read_record, data, run),
        Reader("compare", _two_records, _compare, command, run, 128 * MIB),
        Reader("order", order, _read_order, data, ("order.json",)),
        Reader("plan", _texts(*plans), _read_plan, (ValueError,), ("fault", "plan")),
        Reader("reduction", _texts(*texts), _read_reduction, wrong),
        Reader("reduction-mapping", _make_mapping, _read_mapping, wrong),
        Reader("npy", npy, _arrays("x.npy"), data, ("x.npy",)),
        Reader("npz", npz, _arrays("x.npz"), data, ("x.npz",), small),
        Reader("safetensors", tensors, _arrays("x.safetensors"), data, ("x.safetensors",)),
        Reader("torch", torch, _arrays("x.pt"), data, ("x.pt",)),
        Reader("infer", npz, _infer, data, (), small),
        Reader("store", store, _read_store, data, ("x.store",)),
        Reader("trace", _trace, _read_trace, data, ("rank-0",)),
        Reader("error-file", error, _read_error, data),
        Reader("holder", holder, _holder, (OSError,)),
        Reader("heartbeat", heartbeat, _heartbeat, ()),
        Reader("poptorch-file", model, _read_executable, _executable_errors()),
        Reader("poptorch-options", options, _read_options, _options_errors()),
        Reader("message", _message, _receive, (ValueError,)),
        Reader("hello", hello, _hello, (OSError,)),
        Reader("variables", _variables, _read_variables, (GpusimError, ValueError)),
        Reader("page-of-compare", _named_record, _page_of_compare, command, (), 128 * MIB),
        *map(_page, ("study", "equal", "resume", "faults")),
    ]


READERS = {reader.name: reader for reader in _readers()}
