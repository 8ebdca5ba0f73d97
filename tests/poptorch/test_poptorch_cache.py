"""Executable caching: a graph read from the cache is the graph that would be built."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import gpusim.torch as gt
from gpusim import poptorch
from gpusim.poptorch import Options
from gpusim.poptorch._logging import logger
from gpusim.poptorch.axis import AXIS
from gpusim.poptorch.replicas import cache, lockstep
from gpusim.poptorch.replicas.cache import Unwritable, graph_of, text_of

pytestmark = pytest.mark.usefixtures("ended")

X = torch.linspace(-1.0, 1.0, 64).reshape(4, 1, 4, 4)


class Model(nn.Module):
    """Convolution, attention, dropout, a buffer that changes, an index, and a constant."""

    def __init__(self, scale: float = 0.5) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.convolution = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.1, batch_first=True)
        self.last = nn.Linear(4, 2)
        self.scale = scale

    def forward(self, x: Tensor) -> Any:
        out = self.norm(self.convolution(x)).flatten(2).transpose(1, 2)
        out, _ = self.attention(out, out, out)
        out = self.last(out[:, -1]) * self.scale + torch.tensor([0.0, 1.0])
        if not self.training:
            return out
        return out, poptorch.identity_loss((out - x.mean()) ** 2, reduction="mean")


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each graph that is built."""
    found: list[int] = []
    original = lockstep.make_fx

    def counting(*args: Any, **kwargs: Any) -> Any:
        found.append(1)
        return original(*args, **kwargs)

    monkeypatch.setattr(lockstep, "make_fx", counting)
    return found


def options(folder: Path | None, replicas: int = 2) -> Options:
    chosen = Options().replicationFactor(replicas).randomSeed(3).broadcastBuffers(False)
    return chosen.enableExecutableCaching(None if folder is None else str(folder))


def trained(folder: Path | None, model: nn.Module | None = None, **how: Any) -> list[Tensor]:
    """What two calls return, and the weights after them."""
    model = Model() if model is None else model
    x = how.get("x", X)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = poptorch.trainingModel(model, options(folder, how.get("replicas", 2)), optimizer)
    returned = [tensor for _ in range(2) for tensor in train(x)]
    train.destroy()
    return [*returned, *(x.detach().clone() for x in model.state_dict().values())]


def inferred(folder: Path | None, model: nn.Module | None = None, **how: Any) -> list[Tensor]:
    model = (Model() if model is None else model).eval()
    chosen = options(folder, how.get("replicas", 2)).broadcastBuffers(True)
    infer = poptorch.inferenceModel(model, chosen)
    found = [infer(how.get("x", X))]
    infer.destroy()
    return found


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(one, two) for one, two in zip(left, right, strict=True))


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("run", [trained, inferred])
def test_a_graph_is_built_once_and_has_the_same_bits(
    tmp_path: Path, built: list[int], run: Callable[..., list[Tensor]], replicas: int
) -> None:
    plain = run(None, replicas=replicas)
    count = len(built)
    assert count >= 1 and [*tmp_path.iterdir()] == []
    assert equal(run(tmp_path, replicas=replicas), plain)
    assert len(built) == 2 * count and len([*tmp_path.iterdir()]) == count
    assert equal(run(tmp_path, replicas=replicas), plain)
    assert len(built) == 2 * count


def frozen(model: nn.Module) -> nn.Module:
    next(model.parameters()).requires_grad_(False)
    return model


OTHERS: dict[str, Callable[[Path], Any]] = {
    "a constant": lambda folder: trained(folder, Model(scale=0.25)),
    "a dtype": lambda folder: trained(folder, Model().half(), x=X.half()),
    "a batch": lambda folder: trained(folder, x=torch.cat([X, X])),
    "replicas": lambda folder: trained(folder, replicas=4),
    "inference": inferred,
    "a frozen parameter": lambda folder: trained(folder, frozen(Model())),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_model_has_another_graph(tmp_path: Path, built: list[int], other: str) -> None:
    trained(tmp_path)
    count = len(built)
    found = OTHERS[other](tmp_path)
    assert len(built) > count
    assert equal(found, OTHERS[other](None))


def test_other_circumstances_have_other_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    def key() -> str:
        return cache.digest_of(cache.ambient())

    found = {key()}
    torch.set_default_dtype(torch.float64)
    try:
        found.add(key())
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.autocast("cpu"):
        found.add(key())
    monkeypatch.setattr(torch, "__version__", "other")
    found.add(key())
    monkeypatch.setattr(cache, "sources", lambda: "other")
    found.add(key())
    assert len(found) == 5


def test_environments_folder_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger.name)
    monkeypatch.setenv("POPTORCH_CACHE_DIR", str(tmp_path / "new" / "folder"))
    for _ in range(2):
        poptorch.inferenceModel(Model().eval())(X)
    [file] = (tmp_path / "new" / "folder").iterdir()
    assert [r.getMessage() for r in caplog.records if "cache:" in r.getMessage()] == [
        f"Graph from the cache: {file}"
    ]


# ---------------------------------------------------------------- what is not kept


def summed(x: Tensor) -> Tensor:
    return gt.psum(x, AXIS)


def test_what_cannot_be_written_is_built_each_time(
    tmp_path: Path, built: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger.name)
    for _ in range(2):
        infer = poptorch.inferenceModel(summed, options(tmp_path))
        assert infer(torch.ones(2)).tolist() == [2.0, 2.0]
        infer.destroy()
    assert len(built) == 2 and [*tmp_path.iterdir()] == []
    assert any(
        "The graph is not kept, as it calls gpusim" in r.getMessage() for r in caplog.records
    )


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    infer = poptorch.inferenceModel(nn.Identity(), options(tmp_path / "file"))
    with pytest.raises(AssertionError, match=r"^Cache folder .*file is not writable$"):
        infer(torch.ones(2))


def test_a_full_disk_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = inferred(None)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert equal(inferred(tmp_path), plain) and [*tmp_path.iterdir()] == []
    assert any("is not kept: [Errno 28]" in r.getMessage() for r in caplog.records)


def test_damaged_files_are_built_again(
    tmp_path: Path, built: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    plain = inferred(tmp_path)
    [path] = tmp_path.iterdir()
    content = path.read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    for damaged in (b"", content[:40], content[:-1], content + b" ", flipped, sealed("[" * 99999)):
        path.write_bytes(damaged)
        caplog.clear()
        before = len(built)
        assert equal(inferred(tmp_path), plain) and len(built) == before + 1
        assert any("is damaged, and is built again" in r.getMessage() for r in caplog.records)
        assert path.read_bytes() == content
    path.unlink()
    path.mkdir()
    assert equal(inferred(tmp_path), plain)


def sealed(text: str) -> bytes:
    return hashlib.sha256(text.encode()).hexdigest().encode() + text.encode()


# ---------------------------------------------------------------- graphs as text


INPUT = ["placeholder", None, [], []]


def calling(target: Any, *args: Any) -> list[Any]:
    return ["call_function", target, [*args], []]


@pytest.mark.parametrize(
    "lines",
    [
        [None], [[]], [{}], [{"nodes": []}], [["call_module", "x", [], []]],
        [calling("builtins:eval", "1")],
        [calling("os.system.x", "true")],
        [calling("aten::from_file.", "/etc/passwd")],
        [calling("aten::__class__.mro")],
        [calling("aten::add.__class__")],
        [calling("gpusim::seeds.default")],
        [calling(None)],
        [INPUT, ["output", None, [{"node": 7}], []]],
        [INPUT, ["output", None, [{"torch": "save"}], []]],
        [INPUT, ["output", None, [{"nothing": 1}], []]],
        [INPUT, ["output", None, [{"node": 0, "slice": [0, 1, 1]}], []]],
        [INPUT, ["output", None, [], []]],
        [["get_attr", "x", [], []]],
        [["get_attr", ["float32", [3], "cpu", "00"], [], []]],
        [["get_attr", ["float32", [1], "cpu", "zz"], [], []]],
        [["get_attr", ["load", [1], "cpu", "00000000"], [], []]],
    ],
)  # fmt: skip
def test_texts_of_no_graph_are_refused(lines: list[Any]) -> None:
    with pytest.raises(cache.DAMAGE):
        graph_of("\n".join(map(json.dumps, lines)))


def of_everything(x: Tensor, y: Tensor) -> list[Any]:
    parts = torch.split(x[:, ::2], [1, 1], dim=1)
    more = torch.full_like(y, float("-inf"), dtype=torch.float16)
    constant = torch.tensor([1.5, 2.5])
    made = torch.empty((0, 2)), torch.arange(3, device="cpu")
    return [
        *parts,
        more,
        x + constant[0],
        None,
        3,
        x.to(memory_format=torch.contiguous_format),
        made,
    ]


def test_a_graph_comes_back_from_json() -> None:
    given = torch.arange(8.0).reshape(2, 4), torch.ones(3)
    graph = make_fx(of_everything)(*given)
    text = text_of(graph)
    again = graph_of(text)
    assert text_of(again) == text
    expected, found = of_everything(*given), again(*given)
    assert repr(expected) == repr(found)


def test_functions_are_not_written_and_not_read() -> None:
    nodes = torch.fx.Graph()
    nodes.output(nodes.call_function(len, ([],)))
    graph = torch.fx.GraphModule(nn.Module(), nodes)
    with pytest.raises(Unwritable, match="it calls <built-in function len>"):
        text_of(graph)
    with pytest.raises(ValueError, match="an unknown operator"):
        graph_of(json.dumps(calling("builtins:len", [])))


def test_constants_that_are_large_or_odd_are_not_written() -> None:
    for odd in (torch.ones(1 << 19), torch.eye(2).to_sparse(), nn.Parameter(torch.ones(1))):
        root = nn.Module()
        root.register_buffer("c", odd) if not isinstance(odd, nn.Parameter) else setattr(
            root, "c", odd
        )
        graph = torch.fx.Graph()
        graph.output(graph.get_attr("c"))
        with pytest.raises(Unwritable, match="not a small plain tensor"):
            text_of(torch.fx.GraphModule(root, graph))
