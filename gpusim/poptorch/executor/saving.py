"""Compiled models in files: what they were compiled for, and with it, if wanted, the model itself.

There is no executable to save: a model is traced again when it is loaded. Files are pickled, which
is the exception to gpusim's rule; they begin with a line that says what they are.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from gpusim.poptorch._logging import logger
from gpusim.poptorch.executor.arguments import Arguments
from gpusim.poptorch.executor.grouping import Grouping
from gpusim.poptorch.options import Options

__all__ = ["MAGIC", "Saved", "read", "write"]

MAGIC = b"gpusim.poptorch 1\n"
DEFAULT_NAME = "model.poptorch"


@dataclass
class Saved:
    """What is in a file.

    - `version`: of PopTorch's interface; `arguments`: what the model was compiled for.
    - `training`, `model`, `optimizer`: None if the model was not to be exported.
    - `rng_state`: None if it was not to be saved.
    """

    version: str
    arguments: Arguments
    options: Options
    groupings: dict[str, Grouping]
    training: bool | None = None
    model: nn.Module | None = None
    optimizer: Any = None
    rng_state: list[int] | None = None


def write(filename: str | os.PathLike[str], saved: Saved) -> None:
    """Write a file; a folder is given one with a name of its own. Folders are made as needed.

    AssertionError where a folder would have to be and something else is.
    """
    path = Path(filename)
    parent = path.parent
    assert not parent.exists() or parent.is_dir(), f"Destination folder {parent} is not a directory"
    parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        logger.warning("save(): %s is a directory, saving model to %s", path, path / DEFAULT_NAME)
        path /= DEFAULT_NAME
    path.write_bytes(MAGIC + pickle.dumps(saved))


def read(filename: str | os.PathLike[str], version: str) -> Saved:
    """Read a file. It is unpickled, which runs what is in it: read none that you do not trust.

    AssertionError for a file that `write` did not make, or that another version did.
    """
    content = Path(filename).read_bytes()
    assert content.startswith(MAGIC), "it does not begin as PopTorch files do"
    saved = pickle.loads(content[len(MAGIC) :])
    assert isinstance(saved, Saved), "The executable's inputs are missing"
    assert saved.version == version, (
        f"PopTorch version mismatch: File was created with version: {saved.version} and this is "
        f"version {version}"
    )
    return saved
