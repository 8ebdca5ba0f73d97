"""Files of compiled models: what they refuse, tensors in them, and that they are whole."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import io
import json
import os
import pickle
import resource
import signal
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from gpusim import poptorch
from gpusim.poptorch import (
    Error,
    Options,
)
from gpusim.poptorch.executor.arguments import Arguments
from gpusim.poptorch.executor.described import Undescribed, as_json, from_json
from gpusim.poptorch.executor.pickled import (
    DTYPES,
    pickled,
    read_tensors,
    tensors_as_bytes,
    unpickled,
)
from gpusim.poptorch.executor.saving import DIGEST
from tests.poptorch.saved import Line, Model, X, line

pytestmark = pytest.mark.usefixtures("ended")


# ---------------------------------------------------------------- loadExecutable


def test_an_executable_is_checked_against_the_model_and_its_options(tmp_path: Path) -> None:
    options = Options().replicationFactor(2)
    executor = poptorch.inferenceModel(Line(), options)
    executor.compileAndExport(tmp_path / "f", torch.ones(4), export_model=False)
    executor.destroy()
    path = tmp_path / "f"

    def refused(other: poptorch.PoplarExecutor, text: str) -> None:
        with pytest.raises(Error, match=rf"Invalid file .*f: {text}"):
            other.loadExecutable(path)
        assert not other.isCompiled()

    refused(poptorch.inferenceModel(Line()), "option replicationFactor is 2 in the file, and this")
    refused(
        poptorch.inferenceModel(Line(groups=2), options),
        r"weight w is \['float32', \[1\]\] in the file, and this model's is \[.*, \[2, 1\]\]",
    )
    refused(poptorch.inferenceModel(Model(), options), r"weight w is .* this model's is None")
    refused(
        poptorch.trainingModel(Line(), options),
        "it is of an inference model, and this is a training model",
    )
    good = poptorch.inferenceModel(Line(), options)
    good.loadExecutable(path)
    good.loadExecutable(path)
    assert torch.equal(good(torch.ones(4)), torch.ones(2))


@dataclasses.dataclass
class Pair:
    x: Tensor
    scale: float


def scaled(pair: Pair) -> Tensor:
    return pair.x * pair.scale


def test_arguments_of_other_types_need_the_pickle(tmp_path: Path) -> None:
    executor = poptorch.inferenceModel(scaled)
    executor.compile(Pair(torch.ones(2), 3.0))
    with pytest.raises(Error, match=r"argument pair is of type .*Pair, which no file without the"):
        executor.save(tmp_path / "f", export_model=False)
    assert not (tmp_path / "f").exists()
    executor.save(tmp_path / "f")
    executor.destroy()
    loaded = poptorch.load(tmp_path / "f")
    assert torch.equal(loaded(Pair(torch.ones(2), 3.0)), torch.full((2,), 3.0))
    loaded.destroy()
    with pytest.raises(Error, match="are of types that only poptorch"):
        poptorch.inferenceModel(scaled).loadExecutable(tmp_path / "f")


CONSTANTS: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
    | st.binary() | st.complex_numbers(allow_nan=False)
    | st.sampled_from([torch.float16, torch.device("cpu"), slice(1, None, 2), range(3)]),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple)
    | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.text()), inner),
    max_leaves=8,
)  # fmt: skip


@given(CONSTANTS)
def test_constants_come_back_from_json(value: Any) -> None:
    arguments = Arguments(("c", "x"), (value, torch.ones(2, 1)), {"more": [value]})
    found = from_json(json.loads(json.dumps(as_json(arguments))))
    assert found.args[0] == value and type(found.args[0]) is type(value)
    assert found.kwargs == {"more": [value]} and found.names == arguments.names
    assert found.args[1].shape == (2, 1) and found.args[1].is_meta


def test_constants_of_other_types_have_no_such_form() -> None:
    for value in (Pair(X, 1.0), object(), {1, 2}, torch.Size([1]), print):
        with pytest.raises(Undescribed, match="argument c is of type"):
            as_json(Arguments(("c",), (value,), {}))


@pytest.mark.parametrize(
    "found",
    [
        None, 3, {}, {"names": [], "args": [1], "kwargs": {}},
        {"names": ["x"], "args": [{"tensor": ["nothing", [1]]}], "kwargs": {}},
        {"names": ["x"], "args": [{"tensor": ["save", [1]]}], "kwargs": {}},
        {"names": ["x"], "args": [{"tensor": ["float32", [-1]]}], "kwargs": {}},
        {"names": ["x"], "args": [{"other": 1}], "kwargs": {}},
        {"names": ["x"], "args": [{"a": 1, "b": 2}], "kwargs": {}},
        {"names": ["x"], "args": [{"range": ["a"]}], "kwargs": {}},
        {"names": ["x"], "args": [{"dict": [[[1], 2]]}], "kwargs": {}},
        {"names": [1], "args": [1], "kwargs": {}},
        {"names": ["x"], "args": [1], "kwargs": [1]},
    ],
)  # fmt: skip
def test_json_that_describes_nothing_is_refused(found: Any) -> None:
    with pytest.raises(ValueError, match=r"its arguments make no sense: \w+: "):
        from_json(found)


# ---------------------------------------------------------------- what is refused


def refused(path: Path) -> str:
    """The message of both that read files; nothing is compiled."""
    executor = poptorch.inferenceModel(Line())
    with pytest.raises(Error) as one:
        executor.loadExecutable(path)
    with pytest.raises(AssertionError) as two:
        poptorch.load(path)
    assert not executor.isCompiled()
    start = f"Invalid file {path}: "
    assert str(two.value).startswith(start) and one.value.message == str(two.value)
    return str(two.value).removeprefix(start)


def test_every_byte_that_changes_is_noticed(tmp_path: Path) -> None:
    path = line(tmp_path)
    content = path.read_bytes()
    for place in range(0, len(content), 97):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        message = refused(path)
        assert message.startswith("it is damaged") or place < 4
    path.write_bytes(content)
    poptorch.load(path)


def test_every_length_but_the_whole_is_noticed(tmp_path: Path) -> None:
    path = line(tmp_path)
    content = path.read_bytes()
    for length in (0, 1, 3, 4, 63, 64, 65, *range(100, len(content), 211), len(content) - 1):
        path.write_bytes(content[:length])
        assert refused(path).startswith("it is damaged" if length >= 4 else "it does not begin as")
    path.write_bytes(content + b"0")
    assert refused(path).startswith("it is damaged")


def sealed(path: Path, parts: dict[str, bytes], **how: Any) -> Path:
    """A zip of parts, with the digest that it has to have."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", how.get("compression", zipfile.ZIP_STORED)) as archive:
        archive.comment = b"0" * DIGEST
        for name, content in parts.items():
            archive.writestr(zipfile.ZipInfo(name), content, how.get("compression"))
        if how.get("twice"):
            with pytest.warns(UserWarning, match="Duplicate name"):
                archive.writestr(how["twice"], parts[how["twice"]])
    body = buffer.getvalue()[:-DIGEST]
    path.write_bytes(body + hashlib.sha256(body).hexdigest().encode())
    return path


def parts_of(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_zips_of_others_are_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.zip"
    with zipfile.ZipFile(foreign, "w") as archive:
        archive.writestr("data.pkl", b"")
    assert refused(foreign) == "it is damaged, or a zip that PopTorch did not write"
    torch.save(Line(), foreign)
    assert refused(foreign) == "it is damaged, or a zip that PopTorch did not write"
    parts = parts_of(line(tmp_path))
    assert "has the parts other" in refused(sealed(foreign, {"other": b""}))
    assert "has the parts" in refused(sealed(foreign, {**parts, "../../more": b""}))
    assert "has the parts" in refused(
        sealed(foreign, {"header.json": parts["header.json"], "x": b""})
    )
    assert "compressed" in refused(sealed(foreign, parts, compression=zipfile.ZIP_DEFLATED))
    assert "has the parts" in refused(sealed(foreign, parts, twice="header.json"))
    body = b"PK\3\4 and no zip"
    foreign.write_bytes(body + hashlib.sha256(body).hexdigest().encode())
    assert refused(foreign).startswith("it is a zip that cannot be read: ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "its header is not PopTorch's"),
        (
            {"format_version": 2},
            "it is of version 2 of the format, and this gpusim reads version 1",
        ),
        (
            {"poptorch_version": "2.0"},
            "PopTorch version mismatch: File was created with version: 2.0 and this is version "
            + poptorch.__version__,
        ),
        ({"training": 1}, "its header's 'training' is 1"),
        ({"rng_state": "x"}, "its header's 'rng_state' is 'x'"),
        ({"rng_state": [1, 2]}, r"its header's 'rng_state' is [1, 2]"),
        ({"rng_state": [1, 2, 3.0]}, r"its header's 'rng_state' is [1, 2, 3.0]"),
        ({"model": False}, "its header is not of these parts"),
        (
            {"arguments": {"names": 3}},
            "its header makes no sense: ValueError: its arguments make no",
        ),
        (
            {"groupings": {"w": ["Nobody", 1, "AllReplicas"]}},
            "its header makes no sense: KeyError:",
        ),
        ({"groupings": {"w": 3}}, "its header makes no sense: TypeError:"),
    ],
)
def test_headers_that_make_no_sense_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    parts = parts_of(line(tmp_path))
    header = {**json.loads(parts["header.json"]), **change}
    path = sealed(tmp_path / "f", {**parts, "header.json": json.dumps(header).encode()})
    assert refused(path).startswith(message)


def test_headers_that_are_no_json_are_refused(tmp_path: Path) -> None:
    parts = parts_of(line(tmp_path))
    for text in (b"", b"\xff", b"[1, 2", b"[" * 100_000):
        message = refused(sealed(tmp_path / "f", {**parts, "header.json": text}))
        assert message.startswith("its header is not JSON: ")
    assert refused(sealed(tmp_path / "f", {**parts, "header.json": b"[]"})).startswith("its header")
    header = {**json.loads(parts["header.json"]), "arguments": None, "model": False}
    path = sealed(tmp_path / "f", {"header.json": json.dumps(header).encode()})
    assert refused(path) == "The executable's inputs are missing"


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_a_pickle_is_executed_by_load_alone(tmp_path: Path) -> None:
    parts = parts_of(line(tmp_path))
    sign = tmp_path / "hacked"
    path = sealed(tmp_path / "f", {**parts, "model.pickle": pickle.dumps(Bomb(sign))})
    executor = poptorch.inferenceModel(Line())
    executor.loadExecutable(path)
    assert torch.equal(executor(torch.ones(1)), torch.ones(())) and not sign.exists()
    executor.destroy()
    damaged = path.read_bytes()
    (tmp_path / "g").write_bytes(damaged[:-1] + b"x")
    refused(tmp_path / "g")
    assert not sign.exists(), "what is damaged is not unpickled at all"
    with pytest.raises(AttributeError):
        poptorch.load(path)
    assert sign.exists(), "the test's bomb is one"


# ---------------------------------------------------------------- tensors in files


TENSORS = {
    **{str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in DTYPES},
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "transposed": torch.arange(6.0).reshape(2, 3).T,
    'a "name"\n': torch.tensor([1]),
}


def equal(left: Tensor, right: Tensor) -> bool:
    same_kind = left.dtype == right.dtype and left.shape == right.shape

    one, two = (x.contiguous().reshape(-1).view(torch.uint8) for x in (left, right))
    return same_kind and torch.equal(one, two)


def test_tensor_files_are_those_of_safetensors() -> None:
    content = tensors_as_bytes(TENSORS)
    theirs = safetensors.torch.load(content)
    ours = read_tensors(content)
    assert ours.keys() == TENSORS.keys() == theirs.keys()
    assert all(equal(ours[name], x) and equal(theirs[name], x) for name, x in TENSORS.items())
    contiguous = {name: x.contiguous() for name, x in TENSORS.items()}
    back = read_tensors(safetensors.torch.save(contiguous, {"about": "theirs"}))
    assert all(equal(back[name], x) for name, x in TENSORS.items())


@pytest.mark.parametrize(
    "table",
    [
        "3", "{", '{"a": 3}', '{"a": {}}', '{"a": {"dtype": "F32", "shape": [1]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 3]}}',
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        '{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
        '{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [true], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}',
        '{"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
        ' "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
    ],
)  # fmt: skip
def test_tables_that_lie_are_refused(table: str) -> None:
    content = len(table).to_bytes(8, "little") + table.encode() + bytes(4)
    with pytest.raises(ValueError, match=r"^tensors: "):
        read_tensors(content)


@given(st.binary(max_size=40))
def test_any_bytes_are_tensors_or_an_error(content: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert read_tensors(content) == {}


def test_damaged_tensors_are_refused_by_load(tmp_path: Path) -> None:
    parts = parts_of(line(tmp_path))
    path = sealed(tmp_path / "f", {**parts, "tensors.safetensors": b"\xff" * 9})
    with pytest.raises(AssertionError, match=r"^Invalid file .*: tensors: 9 bytes are fewer than"):
        poptorch.load(path)


class Tagged(Tensor):
    """A tensor of the user's own class."""


def test_tensors_share_what_they_shared() -> None:
    whole = torch.arange(12.0)
    parameter = nn.Parameter(torch.ones(2), requires_grad=False)
    tagged = torch.ones(1)
    tagged.tag = "mine"
    value = {
        "views": [whole[2:4], whole.reshape(3, 4).T, whole],
        "same": (parameter, parameter, parameter.data),
        "bits": whole.view(torch.int32)[:1],
        "kinds": [torch.ones(1, dtype=torch.complex128), torch.eye(2).to_sparse(), tagged],
        "class": torch.ones(2).as_subclass(Tagged),
        "grad": torch.ones(1, requires_grad=True),
    }
    content, tensors = pickled(value, {id(parameter): "weight"})
    assert len([name for name in tensors if name.startswith("weight")]) == 1
    found = unpickled(content, read_tensors(tensors_as_bytes(tensors)))
    for one, two in zip(value["views"], found["views"], strict=True):
        assert torch.equal(one, two) and one.stride() == two.stride()
    found["views"][2][2] = 99.0
    assert found["views"][0][0] == 99 and found["views"][1][2, 0] == 99
    first, second, data = found["same"]
    assert first is second and type(first) is nn.Parameter and not first.requires_grad
    assert data.data_ptr() == first.data_ptr()
    assert found["bits"].data_ptr() == found["views"][2].data_ptr()
    assert torch.equal(found["kinds"][0], value["kinds"][0]) and found["kinds"][1].is_sparse
    assert found["kinds"][2].tag == "mine" and type(found["class"]) is Tagged
    assert found["grad"].requires_grad


# ---------------------------------------------------------------- whole or not at all


def left_in(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


@pytest.mark.parametrize("fails", ["write", "fsync", "replace", "interrupt"])
@pytest.mark.parametrize("before", [None, b"what was there"])
def test_a_file_that_cannot_be_written_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, before: bytes | None
) -> None:
    path = tmp_path / "model"
    if before is not None:
        path.write_bytes(before)
    executor = poptorch.inferenceModel(Line())
    executor.compile(torch.ones(1))
    full = OSError(errno.ENOSPC, "No space left on device")

    def failing(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt if fails == "interrupt" else full

    with monkeypatch.context() as patch:
        if fails in ("write", "interrupt"):
            patch.setattr(zipfile._ZipWriteFile, "write", failing)
        else:
            patch.setattr(os, fails, failing)
        with pytest.raises(KeyboardInterrupt if fails == "interrupt" else OSError):
            executor.save(path)
    assert left_in(tmp_path) == ([] if before is None else ["model"])
    assert before is None or path.read_bytes() == before
    executor.save(path)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()
    executor.destroy()
    poptorch.load(path)


def umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found


def test_a_file_that_the_system_cuts_off_is_not_there(tmp_path: Path) -> None:
    executor = poptorch.inferenceModel(nn.Linear(100, 100))
    executor.compile(torch.ones(1, 100))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            executor.save(tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert left_in(tmp_path) == []


def test_a_model_whose_class_is_gone_is_pythons_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = line(tmp_path)
    monkeypatch.delattr(sys.modules[Line.__module__], "Line")
    with pytest.raises(AttributeError, match="Line") as raised:
        poptorch.load(path)
    assert raised.value.__notes__[0].startswith("The classes of a saved model have to be where")


def test_what_cannot_be_pickled_leaves_no_file(tmp_path: Path) -> None:
    executor = poptorch.inferenceModel(lambda x: x + 1)
    executor.compile(torch.ones(1))
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        executor.save(tmp_path / "new" / "f")
    assert left_in(tmp_path) == []
    executor.save(tmp_path / "f", export_model=False)
    assert left_in(tmp_path) == ["f"]


def test_links_stay_links_and_devices_stay_devices(tmp_path: Path) -> None:
    executor = poptorch.inferenceModel(Line())
    executor.compile(torch.ones(1))
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real").write_bytes(b"")
    (tmp_path / "real").chmod(0o600)
    executor.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").stat().st_size > 100
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o600
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="pipe is not a regular file"):
        executor.save(tmp_path / "pipe")
    with pytest.raises(FileNotFoundError):
        poptorch.load(tmp_path / "none")
