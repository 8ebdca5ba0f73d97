"""Compiled models in files: what they were compiled for, and optionally the model itself.

A file is a zip of these uncompressed parts. It holds no executable: a model is traced again when
it is loaded.

- `header.json`: versions, the arguments, batches and weights that the model was compiled for, the
  groupings of parameters, and the random numbers' state;
- `model.pickle`: model, options and optimizer, without their tensors;
- `tensors.safetensors`: those, by the model's names.

The zip's comment is the SHA-256 of all that comes before it.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

import gpusim
from gpusim.files import atomic_write
from gpusim.groups import CommGroupType
from gpusim.poptorch._logging import logger
from gpusim.poptorch.enums import VariableRetrievalMode
from gpusim.poptorch.executor.arguments import Arguments
from gpusim.poptorch.executor.described import Undescribed, as_json, from_json
from gpusim.poptorch.executor.grouping import Grouping
from gpusim.poptorch.executor.pickled import (
    pickled,
    read_tensors,
    tensors_as_bytes,
    unpickled,
)
from gpusim.poptorch.options import Options
from gpusim.poptorch.poptorch_core import createPoptorchError

__all__ = ["Exported", "Invalid", "Saved", "read", "write"]

FORMAT, FORMAT_VERSION = "gpusim.poptorch", 1
DEFAULT_NAME = "model.poptorch"
HEADER, PICKLE, TENSORS = "header.json", "model.pickle", "tensors.safetensors"
DIGEST = 64  # characters of a SHA-256


class Invalid(Exception):
    """A file is damaged, of another version, or of another format."""


@dataclass
class Exported:
    """The model itself.

    - `state`: the state of one of PyTorch's optimizers, which does not hold it itself.
    - `device`: the device's values of weights that the model's dtypes round, by name.
    """

    model: nn.Module
    options: Options
    optimizer: Any = None
    state: dict[str, Tensor] | None = None
    device: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Saved:
    """The content of a file.

    - `version`: of PopTorch's interface; `training`: whether the executor trains.
    - `arguments`: what the model was compiled for; None if only `load` can read them.
    - `layout`: the options that cut inputs into micro-batches, by name.
    - `weights`: dtype and shape of one replica's weights, by name.
    - `rng_state`, `exported`: None if they were not to be saved.
    """

    version: str
    training: bool
    arguments: Arguments | None
    layout: dict[str, Any]
    weights: dict[str, Any]
    groupings: dict[str, Grouping] = field(default_factory=dict)
    rng_state: list[int] | None = None
    exported: Exported | None = None

    def differs(
        self, training: bool, layout: dict[str, Any], weights: dict[str, Any]
    ) -> str | None:
        """Describe how an executor differs from that of the file; None if it does not."""
        if training != self.training:
            kinds = ("an inference model", "a training model")
            return f"it is of {kinds[self.training]}, and this is {kinds[training]}"
        for what, theirs, own in (
            ("option", self.layout, layout),
            ("weight", self.weights, weights),
        ):
            for name in {**theirs, **own}:
                if theirs.get(name) != own.get(name):
                    return (
                        f"{what} {name} is {theirs.get(name)} in the file, and this model's is "
                        f"{own.get(name)}"
                    )
        return None


# ---------------------------------------------------------------- writing


def write(filename: str | os.PathLike[str], saved: Saved) -> None:
    """Write a file, atomically. In a folder it is `model.poptorch`; folders are made as needed.

    **Raises**:

    - AssertionError: if the parent is not a folder.
    - poptorch.Error: for arguments of types that only a pickle can hold, without a model.
    - OSError, and what pickling raises.
    """
    path = Path(filename)
    parent = path.parent
    assert not parent.exists() or parent.is_dir(), f"Destination folder {parent} is not a directory"
    header = header_of(saved)
    pickle, tensors = (None, None) if saved.exported is None else exported_parts(saved, header)
    parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        logger.warning("save(): %s is a directory, saving model to %s", path, path / DEFAULT_NAME)
        path /= DEFAULT_NAME
    with atomic_write(path, "w+b") as file:
        with zipfile.ZipFile(file, "w") as archive:
            archive.comment = b"0" * DIGEST
            archive.writestr(zipfile.ZipInfo(HEADER), json.dumps(header, indent=1))
            if pickle is not None and tensors is not None:
                archive.writestr(zipfile.ZipInfo(PICKLE), pickle)
                archive.writestr(zipfile.ZipInfo(TENSORS), tensors_as_bytes(tensors))
        seal(file)


def header_of(saved: Saved) -> dict[str, Any]:
    assert saved.arguments is not None
    try:
        arguments = as_json(saved.arguments)
    except Undescribed as error:
        if saved.exported is None:
            raise createPoptorchError(
                f"{error}, which no file without the model can hold: use export_model=True"
            ) from None
        arguments = None
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "poptorch_version": saved.version,
        "gpusim_version": gpusim.__version__,
        "torch_version": torch.__version__,
        "training": saved.training,
        "arguments": arguments,
        "layout": saved.layout,
        "weights": saved.weights,
        "groupings": {
            name: [one.kind.name, one.shards, one.mode.name]
            for name, one in saved.groupings.items()
        },
        "rng_state": saved.rng_state,
        "model": saved.exported is not None,
    }


def exported_parts(saved: Saved, header: dict[str, Any]) -> tuple[bytes, dict[str, Tensor]]:
    exported = saved.exported
    assert exported is not None
    content = {**vars(exported), "arguments": None if header["arguments"] else saved.arguments}
    names = {id(x): f"model.{name}" for name, x in exported.model.named_parameters()}
    names |= {id(x): f"model.{name}" for name, x in exported.model.named_buffers()}
    accumulators = getattr(exported.optimizer, "_state_dict", {}).get("ipu_state") or {}
    names |= {id(x): f"optimizer.{name}" for name, x in accumulators.items()}
    names |= {id(x): f"optimizer.{name}" for name, x in (exported.state or {}).items()}
    names |= {id(x): f"device.{name}" for name, x in exported.device.items()}
    return pickled(content, names)


def seal(file: IO[bytes]) -> None:
    """Write the digest of the file into its last bytes, which the digest leaves out."""
    end = file.seek(0, os.SEEK_END) - DIGEST
    file.seek(0)
    digest, left = hashlib.sha256(), end
    while left:
        piece = file.read(min(left, 1 << 20))
        digest.update(piece)
        left -= len(piece)
    file.seek(end)
    file.write(digest.hexdigest().encode())


# ---------------------------------------------------------------- reading


def read(filename: str | os.PathLike[str], version: str, *, model: bool) -> Saved:
    """Read a file.

    **Arguments**

    - `version`: of PopTorch's interface, which has to be the file's.
    - `model`: whether to read the model too, if the file has one. It is unpickled, which runs code
      from the file: only read files that you trust.

    **Raises**:

    - Invalid: if the file is damaged, of another version or of another format.
    - OSError, and what unpickling raises, for example if the model's class is missing.
    """
    content = Path(filename).read_bytes()
    parts = parts_of(content)
    header = checked(parts, version)
    try:
        saved = Saved(
            version=version,
            training=header["training"],
            arguments=None if header["arguments"] is None else from_json(header["arguments"]),
            layout=dict(header["layout"]),
            weights=dict(header["weights"]),
            groupings={
                name: Grouping(CommGroupType[kind], int(shards), VariableRetrievalMode[mode])
                for name, (kind, shards, mode) in header["groupings"].items()
            },
            rng_state=header["rng_state"],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Invalid(f"its header makes no sense: {type(error).__name__}: {error}") from None
    if model and PICKLE in parts:
        unpickle(saved, parts)
    return saved


def parts_of(content: bytes) -> dict[str, bytes]:
    """The parts by name. Invalid if the file is damaged."""
    if not content.startswith(b"PK\3\4"):
        raise Invalid("it does not begin as PopTorch files do")
    if hashlib.sha256(content[:-DIGEST]).hexdigest().encode() != content[-DIGEST:]:
        raise Invalid("it is damaged, or a zip that PopTorch did not write")
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = archive.infolist()
            if any(one.compress_type != zipfile.ZIP_STORED for one in members):
                raise Invalid("its parts are compressed, which PopTorch's are not")
            parts = {one.filename: archive.read(one) for one in members}
    except (zipfile.BadZipFile, ValueError, OSError, RuntimeError, NotImplementedError) as error:
        raise Invalid(f"it is a zip that cannot be read: {error}") from None
    if [*parts] not in ([HEADER], [HEADER, PICKLE, TENSORS]) or len(parts) != len(members):
        raise Invalid(f"it has the parts {', '.join(one.filename for one in members)}")
    return parts


def checked(parts: dict[str, bytes], version: str) -> dict[str, Any]:
    """The header. Invalid if its version, its types or the parts are wrong."""
    try:
        header = json.loads(parts[HEADER])
    except (ValueError, RecursionError) as error:
        raise Invalid(f"its header is not JSON: {error}") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise Invalid("its header is not PopTorch's")
    if header.get("format_version") != FORMAT_VERSION:
        raise Invalid(
            f"it is of version {header.get('format_version')} of the format, and this gpusim reads "
            f"version {FORMAT_VERSION}"
        )
    if header.get("poptorch_version") != version:
        raise Invalid(
            "PopTorch version mismatch: File was created with version: "
            f"{header.get('poptorch_version')} and this is version {version}"
        )
    expected = {
        "training": (bool,),
        "arguments": (dict, type(None)),
        "layout": (dict,),
        "weights": (dict,),
        "groupings": (dict,),
        "rng_state": (list, type(None)),
        "model": (bool,),
    }
    for key, kinds in expected.items():
        if type(header.get(key, ...)) not in kinds:
            raise Invalid(f"its header's {key!r} is {header.get(key)!r:.80}")
    rng_state = header["rng_state"]
    if rng_state is not None and [type(number) for number in rng_state] != [int] * 3:
        raise Invalid(f"its header's 'rng_state' is {rng_state!r:.80}")
    if header["model"] != (PICKLE in parts):
        raise Invalid("its header is not of these parts")
    if header["arguments"] is None and not header["model"]:
        raise Invalid("The executable's inputs are missing")
    return header


def unpickle(saved: Saved, parts: dict[str, bytes]) -> None:
    try:
        tensors = read_tensors(parts[TENSORS])
    except ValueError as error:
        raise Invalid(str(error)) from None
    try:
        content = unpickled(parts[PICKLE], tensors)
    except (AttributeError, ImportError) as error:
        error.add_note("The classes of a saved model have to be where they were when it was saved.")
        raise
    arguments = content.pop("arguments")
    if arguments is not None:
        saved.arguments = arguments
    saved.exported = Exported(**content)
