"""Graphs for all replicas, kept in a folder: gradients and replicas are traced once for a model.

A model is traced anew each time, which says which graph it needs: the file's name is a digest of
all that this one is made of. What cannot be written as JSON is not kept.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

import gpusim
from gpusim.files import atomic_write

from .._logging import logger
from . import changes
from .written import Unwritable, graph_of, written

__all__ = ["Cache"]

#: What a traced graph has beside operators; of other functions nobody knows what they depend on.
FUNCTIONS = (changes._own,)
SUFFIX = ".graph.json"
DIGEST = 64
DAMAGE = (ValueError, KeyError, TypeError, AttributeError, IndexError, RuntimeError, RecursionError)


class Cache:
    """A folder of graphs, made if need be; None keeps nothing.

    AssertionError for a folder that cannot be written.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            raise AssertionError(f"Cache folder {folder} is not writable") from None
        assert os.access(folder, os.W_OK), f"Cache folder {folder} is not writable"

    @classmethod
    def of(cls, options: Any) -> Cache:
        """As `Options.enableExecutableCaching` says."""
        popart = {} if options is None else options._Popart.options
        enabled = popart.get("enableEngineCaching") and popart.get("cachePath")
        return cls(Path(popart["cachePath"]) if enabled else None)

    def graph(
        self, traced: GraphModule, about: dict[str, Any], build: Callable[[], GraphModule]
    ) -> GraphModule:
        """The graph of this, kept or built.

        **Arguments**

        - `traced`, `about`: what it is made of: a graph, and what JSON can write.
        - `build`: builds it.
        """
        if self._folder is None:
            return build()
        try:
            key = digest_of({**about, **ambient(), "traced": written(traced, FUNCTIONS)})
        except Unwritable as reason:
            logger.info("The graph is not kept, as %s", reason)
            return build()
        path = self._folder / f"{key}{SUFFIX}"
        found = self._read(path)
        if found is not None:
            logger.info("Graph from the cache: %s", path)
            return found
        graph = build()
        self._write(path, graph)
        return graph

    def _read(self, path: Path) -> GraphModule | None:
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.warning("%s cannot be read, and is built again: %s", path, error)
            return None
        digest, text = content[:DIGEST], content[DIGEST:]
        try:
            if hashlib.sha256(text).hexdigest().encode() != digest:
                raise ValueError("it is not whole")
            return graph_of(json.loads(text))
        except DAMAGE as error:
            logger.warning("%s is damaged, and is built again: %s", path, error)
            return None

    def _write(self, path: Path, graph: GraphModule) -> None:
        try:
            text = json.dumps(written(graph)).encode()
            with atomic_write(path, "wb") as file:
                file.write(hashlib.sha256(text).hexdigest().encode() + text)
        except Unwritable as reason:
            logger.info("The graph is not kept, as %s", reason)
        except OSError as error:
            logger.warning("%s is not kept: %s", path, error)


def digest_of(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def ambient() -> dict[str, Any]:
    """What tracing looks at beside the graph: programs, processors and torch's switches."""
    cuda = torch.cuda.is_available()
    return {
        "python": sys.version,
        "torch": [torch.__version__, torch.backends.cpu.get_cpu_capability()],
        "cuda": [torch.version.cuda, torch.cuda.get_device_name()] if cuda else None,
        "gpusim": sources(),
        "dtype": str(torch.get_default_dtype()),
        "autocast": [
            [torch.is_autocast_enabled(kind), str(torch.get_autocast_dtype(kind))]
            for kind in ("cpu", "cuda")
        ],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "attention": [
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
        ],
        "cudnn": torch.backends.cudnn.enabled,
    }


@functools.cache
def sources() -> str:
    """A digest of gpusim's programs: another version, or an edited one, makes other graphs."""
    root = Path(gpusim.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root)} {len(content)} ".encode() + content)
    return digest.hexdigest()
