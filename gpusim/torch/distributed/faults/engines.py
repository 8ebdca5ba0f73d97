"""How engines notice that a rank is gone or late: limits, texts, and who needs whom, as data.

The texts and types are those that torch.distributed shows of gloo and NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import distributed as dist
from torch.distributed.constants import default_pg_timeout

from ..calls.names import backend_name
from ..calls.waits import note_stall

if TYPE_CHECKING:
    from ..calls.exchange import RankWork

__all__ = [
    "ABORTS",
    "TAKES_DOWN",
    "closed_by_peer",
    "closed_here",
    "group_limit",
    "is_served",
    "needed",
    "not_met",
    "timed_out",
    "waits_block",
    "watchdog_text",
]

NCCL_TIMEOUT = 600.0
"""Seconds of a call of NCCL's, unless the program sets others."""

CLOSED = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by "
    "peer [127.0.0.1]:{port}. This is typically caused by a remote worker crashing. Check the logs "
    "of the remote worker before reporting an error. GLHF! \N{BEACH WITH UMBRELLA}\ufe0f"
)
"""gloo's words for a call that needs a rank whose process has ended."""

TIMED_OUT = (
    "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:{line}] Timed out "
    "waiting {milliseconds}ms for {kind} operation to complete"
)
"""gloo's words for a call that has waited longer than its limit."""

LINES = {"recv": 78, "send": 129}
"""Where gloo raises them."""

CLOSED_HERE = "Application timeout caused pair closure"
"""gloo's words for later calls of a rank, one of whose calls of the group has timed out."""

FIRST_PORT = 40000
"""Stands for the port that the system would choose: the rank's number is added."""

ABORTS = ("nccl",)
"""Engines whose calls see nothing of a rank that is gone, and end the process at their limit."""


def closed_by_peer(rank: int, how: str) -> BaseException:
    """The exception of a call of gloo's that needs a rank whose process has ended."""
    error = RuntimeError(CLOSED.format(port=FIRST_PORT + rank))
    error.add_note(f"rank {rank} {how}")
    return error


def closed_here(why: str) -> BaseException:
    """The exception of a call of gloo's after the rank's own time-out in the group."""
    error = RuntimeError(CLOSED_HERE)
    error.add_note(f"the rank itself {why}")
    return error


def timed_out(title: str, limit: float, stall: str | None) -> BaseException:
    """The exception of gloo for a call that has waited longer than its limit.

    **Arguments**: `title` is the call in words, `stall` who waits for what.
    """
    kind = "send" if title.startswith("send") else "recv"
    words = {"line": LINES[kind], "milliseconds": round(1000 * limit), "kind": kind}
    return note_stall(RuntimeError(TIMED_OUT.format(**words)), stall)


def not_met(name: str, missing: int, limit: float) -> BaseException:
    """The exception of a rank that makes a group of gloo's to which another one never comes."""
    key = f"{'default_pg' if name == '0' else name}/0//cpu//0/{missing}"
    return dist.DistStoreError(f"wait timeout after {round(1000 * limit)}ms, keys: /{key}")


def group_limit(
    timeout: timedelta | None, backend: str, environment: Mapping[str, str]
) -> float | None:
    """The limit of a group's calls in seconds; None where the engine waits for ever.

    **Arguments**: `timeout` is what torch was given, its default included.
    """
    given = default_pg_timeout if timeout is None else timeout
    seconds = given.total_seconds()
    if backend_name(backend) not in ABORTS:
        return seconds if seconds > 0 else None
    if given == default_pg_timeout:
        seconds = NCCL_TIMEOUT
    ends = environment.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3") not in ("0", "2")
    return seconds if ends or waits_block(environment) else None


def waits_block(environment: Mapping[str, str]) -> bool:
    """Whether a wait for a call of NCCL's raises at the limit, and the program may catch that."""
    return environment.get("TORCH_NCCL_BLOCKING_WAIT", "0") == "1"


def everyone(place: int, size: int, root: int) -> set[int]:
    """All others."""
    return set(range(size)) - {place}


def neighbors(place: int, size: int, root: int) -> set[int]:
    """Those before and behind, of calls that go around a ring."""
    return {(place - 1) % size, (place + 1) % size} - {place}


def of_barrier(place: int, size: int, root: int) -> set[int]:
    """Those that a barrier sends to, at distances that double, and the first that it hears of.

    One that is as near from behind is noticed by another rank first, which then tells no more.
    """
    found, distance = neighbors(place, size, root), 2
    while 2 * distance < size:
        found.add((place + distance) % size)
        distance *= 2
    return found - {place}


def of_tree(place: int, size: int, root: int) -> set[int]:
    """The parent and the children in the binomial tree of a broadcast."""
    own, found, bit = (place - root) % size, set(), 1
    while bit < size:
        # In round `bit` those below it send to the one whose number has this bit too.
        if own < 2 * bit and own ^ bit < size:
            found.add(((own ^ bit) + root) % size)
        bit *= 2
    return found


def above_in_tree(place: int, size: int, root: int) -> set[int]:
    """Those through whom a place is reached in the binomial tree of a broadcast, the root too."""
    own, found = (place - root) % size, set()
    while own:
        own -= 1 << (own.bit_length() - 1)
        found.add((own + root) % size)
    return found


def of_root(place: int, size: int, root: int) -> set[int]:
    """The root; of the root all others."""
    return everyone(place, size, root) if place == root else {root}


NEEDED: dict[str, Callable[[int, int, int], set[int]]] = {
    "all_gather": neighbors,
    "all_reduce": neighbors,
    "all_to_all": everyone,
    "barrier": of_barrier,
    "broadcast": of_tree,
    "gather": of_root,
    "monitored_barrier": of_root,
    "reduce": neighbors,
    "reduce_scatter": neighbors,
    "scatter": of_root,
}
"""By operation of gloo: the places whose end a rank's call notices, by place, size and root.

Others wait until a rank that they hear of ends too, or their limit expires.
"""


def needed(terms: Mapping[str, Any], place: int, size: int) -> set[int]:
    """The places in the group whose end a rank's call notices at once."""
    return NEEDED.get(terms["operation"], everyone)(place, size, terms.get("root", 0))


def is_served(
    terms: Mapping[str, Any],
    place: int,
    size: int,
    posted: Collection[int],
    whole: Collection[int],
) -> bool:
    """Whether gloo's call is complete for a place, as the missing ones have no part in its own.

    A rank that broadcasts needs those below it, and the others' data comes to it through those
    above it. In a gather and a scatter a rank and the root need each other alone. All other calls
    need all ranks.

    **Arguments**: `posted` are the places that have posted the call, `whole` those of them whose
    call has not failed.
    """
    operation, root = terms["operation"], terms.get("root", 0)
    if operation == "broadcast":
        above = above_in_tree(place, size, root)
        return above <= {*whole} and of_tree(place, size, root) <= {*posted}
    return operation in ("gather", "scatter") and place != root and root in whole


TYPES_OF_NCCL = {
    "_allgather_base": "_ALLGATHER_BASE",
    "all_gather_single": "_ALLGATHER_BASE",
    "_reduce_scatter_base": "_REDUCE_SCATTER_BASE",
    "reduce_scatter_single": "_REDUCE_SCATTER_BASE",
    "all_to_all_single": "ALLTOALL_BASE",
    "alltoall_base": "ALLTOALL_BASE",
    "barrier": "ALLREDUCE",
}
"""NCCL's names of calls that are not their method's in capitals."""

WATCHDOG = (
    "[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={number}, "
    "OpType={kind}, NumelIn={read}, NumelOut={written}, Timeout(ms)={limit}) ran for {limit} "
    "milliseconds before timing out."
)

TAKES_DOWN = (
    "Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA "
    "kernels, subsequent GPU operations might run on corrupted/incomplete data.",
    "To avoid data inconsistency, we are taking the entire process down.",
    "terminate called after throwing an instance of 'c10::DistBackendError'",
)
"""The lines on standard error behind those of the watchdog."""


def watchdog_text(work: RankWork, rank: int, number: int, limit: float) -> str:
    """The words of NCCL's watchdog for a call whose limit has expired."""
    method = work._method or work.message
    return WATCHDOG.format(
        rank=rank,
        number=number,
        kind=TYPES_OF_NCCL.get(method, method.upper()),
        read=sum(each.numel() for each in work._tensors),
        written=sum(each.numel() for each in work._outputs),
        limit=round(1000 * limit),
    )
