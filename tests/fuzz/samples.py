"""Valid inputs of every reader, made once in a process by what writes them."""

from __future__ import annotations

import functools
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import gpusim

__all__ = ["executable", "npy", "npz", "order", "record", "safetensors", "store", "torch_file"]

Files = dict[str, bytes]


def _files(folder: Path) -> Files:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@functools.cache
def record(scale: float = 1.0) -> Files:
    """A record of a folder: calls.jsonl, and an archive of arrays."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "run")
        x = np.arange(8, dtype=np.float32).reshape(4, 2) / 3
        with gpusim.record(folder, arrays=True):
            for step in range(3):
                gpusim.vmap(lambda v: gpusim.lax.psum(v, "i"), axis_name="i")(x * scale + step)
                gpusim.vmap(lambda v: gpusim.lax.all_gather(v, "i"), axis_name="i")(x)
        return _files(folder)


@functools.cache
def order() -> str:
    """A file of `gpusim reveal`."""
    rounded = {"bits": 24, "rounding": "nearest-even", "subnormals": "kept"}
    adders = [[[[1, 2], {"kind": "aligned", "bits": 24, "rounding": "toward-zero"}]], "rounded"]
    contents = {
        "format": "gpusim order",
        "version": 1,
        "engine": "an engine",
        "world_size": 4,
        "dtype": "float32",
        "op": "sum",
        "written": "2026-11-28",
        "calls": [{"elements": 3, "ranges": [[0, 2, 0], [2, 3, 1]], "repeats": 3}],
        "trees": [
            {"tree": [[0, 3], [1, 2]], "adders": adders[1], "accumulator": rounded},
            {"tree": [[[0, 1], 2], 3], "adders": "rounded", "accumulator": rounded},
        ],
    }
    return json.dumps(contents)


@functools.cache
def npy(dtype: str = "float32") -> bytes:
    found = io.BytesIO()
    np.save(found, np.arange(24).astype(dtype).reshape(4, 6))
    return found.getvalue()


@functools.cache
def npz() -> bytes:
    found = io.BytesIO()
    x = np.arange(24, dtype=np.float32).reshape(4, 6)
    np.savez(found, inputs=x, sum=x.sum(0), weights=x.astype(np.int32))
    return found.getvalue()


@functools.cache
def safetensors() -> bytes:
    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]},
        "b.c": {"dtype": "BF16", "shape": [4], "data_offsets": [32, 40]},
    }
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + np.arange(40, dtype=np.uint8).tobytes()


@functools.cache
def torch_file() -> bytes:
    import torch

    found = io.BytesIO()
    x = torch.arange(24.0).reshape(4, 6)
    torch.save({"w": x, "list": [x[0], {"half": x.to(torch.bfloat16)}], "step": 3}, found)
    return found.getvalue()


@functools.cache
def store() -> bytes:
    """The store of a sweep, written by the command."""
    from gpusim.tools.cli import main

    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "x.store")
        main([*"study --input lognormal --elements 32 --replicas 4,8 --store".split(), str(path)])
        return path.read_bytes()


@functools.cache
def trace() -> Files:
    """The trace of a rank, as `gpusim equal` writes it."""
    from gpusim.tools.equal import traces

    lines: list[dict[str, Any]] = [
        {"format": traces.FORMAT, "rank": 0, "ranks": 2},
        {
            "dtype": "float64",
            "shape": [2, 3],
            "start": 0,
            "kind": "parameter",
            "root": "model",
            "name": "w",
            "leaf": "",
            "step": 0,
            "count": 0,
            "order": 1,
            "claim": [["S0"], [0, 1], [2, 6]],
            "slice": [0, [0, 1]],
        },
        {"end": {"left_out": 0}},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    return {"rank-0.jsonl": text.encode(), "rank-0.bin": np.arange(6.0).tobytes()}


@functools.cache
def executable() -> bytes:
    """A compiled model of gpusim.poptorch with its header alone, which `save` wrote."""
    import torch

    from gpusim import poptorch

    model = poptorch.inferenceModel(torch.nn.Linear(2, 2))
    x = torch.ones(1, 2)
    model(x)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name, "model.poptorch")
        model.save(str(path))
        model.destroy()
        return path.read_bytes()
