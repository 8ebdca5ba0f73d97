"""The agreement of instances that share an axis: on a map's arguments and results, and on each
collective before it runs."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from ..collectives.dispatch import agreed
from ..libraries import to_host
from ..optional import load
from ..runtime.world import MAIN_TAG
from .arguments import PYTHON_SCALARS, is_array
from .axis_environment import AxisEntry, Sharding
from .call_site import call_site
from .contribution import Contribution
from .lockstep import channel, sharded_axis
from .scheduler import enclosing_replica

#: Values of at most this many bytes are compared between instances where they must be equal.
SMALL_VALUE = 4096
#: Messages show the values of arrays of at most this many elements.
SHOWN_ELEMENTS = 4
DIGEST_BYTES = 16  # of XXH3, which is as fast as memory


def agree_on_arguments(
    what: str, shared: Iterable[tuple[int, Any, str]], sharding: Sharding | None
) -> None:
    """Check that the arguments of a map that all replicas share are equal on all instances.

    **Arguments**: `shared` holds the number of each leaf, the leaf, and why all replicas share it.

    **Raises**: CollectiveMismatchError, which names the leaf, if they are not.
    """
    if sharding is None or not sharding.world.checks_values:
        return
    terms = {
        f"leaf {number} of the arguments, which must be equal on all instances ({why})": text
        for number, leaf, why in shared
        if (text := _described(leaf)) is not None
    }
    if terms:
        sharding.world.agree(f"{what} at {call_site()}", {"map": what, **terms})


def agree_on_results(what: str, results: Sequence[Any], sharding: Sharding | None) -> None:
    """Check that replicated results have the same bits on all instances.

    **Raises**: CollectiveMismatchError if the bits differ.
    """
    if sharding is not None and results and sharding.world.checks_values:
        bits = ", ".join(digest(to_host(result)).hex()[:16] for result in results)
        sharding.world.agree(f"{what} of bits {bits}", {"what": what, "bits": bits})


def digest(array: np.ndarray) -> bytes:
    """A hash of an array's bytes. **Raises**: ModuleNotFoundError without xxhash."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    found: bytes = _hash()(data)
    return found


@functools.cache
def _hash() -> Callable[[memoryview], bytes]:
    found: Callable[[memoryview], bytes] = load("several instances need", "xxhash").xxh3_128_digest
    return found


def _described(leaf: Any) -> str | None:
    """The value of an argument, for comparison; None if it is neither array, number nor text."""
    if isinstance(leaf, (*PYTHON_SCALARS, str, bytes)):
        return repr(leaf)
    if not is_array(leaf):
        return None
    values = to_host(leaf)
    if values.dtype.hasobject:
        return None
    shown = f" {values.tolist()}" if values.size <= SHOWN_ELEMENTS else ""
    return f"{values.dtype}{list(values.shape)}{shown} of bits {digest(values).hex()[:16]}"


def agreement(contribution: Contribution) -> AbstractContextManager[None] | None:
    """A block that runs when all instances that share an axis make this call.

    **Raises**, on entering: CollectiveMismatchError, InstanceError where they do not.
    """
    shared = sharded_axis(contribution.entries)
    return None if shared is None else _agreed(contribution, shared)


@contextmanager
def _agreed(contribution: Contribution, shared: AxisEntry) -> Iterator[None]:
    assert shared.sharding is not None
    names = contribution.names
    over = repr(names[0]) if len(names) == 1 else repr(names)
    values = [_replicated(o, shared) for operands in contribution.leaves for o in operands]
    terms = {**contribution.terms(), "values of what all replicas share": values}
    thread = enclosing_replica()
    agreeing = agreed(
        shared.sharding.world,
        terms,
        over=f" over {over}",
        line=f" at {contribution.line}",
        tag=channel(contribution.enclosing, contribution.entries),
        # Where one replica runs at a time it keeps its slot, so that all takes the same path
        # always; instances that meet in another order must learn it, or they would wait for each
        # other.
        within=MAIN_TAG if thread is not None and thread.call.scheduler.one_at_a_time else None,
    )
    if thread is None:
        with agreeing:
            yield
    else:
        with thread.without_slot(), agreeing:
            yield


def _replicated(operand: Any, shared: AxisEntry) -> Any:
    """The checksum of a small operand that does not vary along the instances' axis.

    (Python numbers of threads may differ.)
    """
    if not isinstance(operand, tuple):
        return operand if shared.index is None else None
    data, axes = operand
    if shared in axes or shared.index is not None or not isinstance(data, np.ndarray):
        return None
    return zlib.crc32(data.tobytes()) if data.nbytes <= SMALL_VALUE else None
