"""The key-value store of a launch, as a TCPStore has it. Ranks give up their turn where they wait.

All ranks share `Values`. Each has a `RankStore` of its own, which knows the rank's time-out.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import distributed as dist

from ....maps.completion import Completion
from ..private import replace
from .timeouts import milliseconds, seconds_of
from .waits import note_stall

if TYPE_CHECKING:
    from ..runners.threads import Launch, Rank

__all__ = ["METHODS", "WAITS", "RankStore", "Values", "queues_of_prefixes"]

WAITS = (
    "add",
    "append",
    "barrier",
    "check",
    "compare_set",
    "delete_key",
    "get",
    "list_keys",
    "multi_get",
    "multi_set",
    "num_keys",
    "queue_len",
    "queue_pop",
    "queue_push",
    "set",
    "wait",
)
"""The methods of torch's stores. Each may wait: for another rank, or for the store's server."""

METHODS = tuple("store_barrier" if name == "barrier" else name for name in WAITS)
"""The methods of `Values`, which each take the rank first."""


WHOLE = ", a barrier of the store"
"""Follows the key of a barrier, for the message of those that wait."""


class Values:
    """The values that all ranks have stored. The lock guards it; ranks wait without the lock.

    A rank that asks the same again, while nothing has changed, lets others run first. So polling
    ends. A limit, in seconds, expires when no rank can go on.
    """

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._queues: dict[str, deque[bytes]] = {}
        self._awaited: dict[str, Completion] = {}
        self._whole: set[str] = set()  # barriers to which all have come
        self._version = 0

    def set(self, rank: Rank, key: str, value: bytes) -> None:
        self._put(key, value)

    def multi_set(self, rank: Rank, keys: Sequence[str], values: Sequence[bytes]) -> None:
        if len(keys) != len(values):
            raise RuntimeError(
                f"multi_set: expected as many values as keys, got {len(values)} values for "
                f"{len(keys)} keys"
            )
        for key, value in zip(keys, values, strict=True):
            self._put(key, value)

    def append(self, rank: Rank, key: str, value: bytes) -> None:
        with self._lock:
            self._values[key] = self._values.get(key, b"") + value
        self._changed(key)

    def get(self, rank: Rank, key: str, limit: float | None) -> bytes:
        self.wait(rank, [key], limit)
        return self._values.get(key, b"")  # of a queue, as TCPStore

    def multi_get(self, rank: Rank, keys: Sequence[str], limit: float | None) -> list[bytes]:
        self.wait(rank, keys, limit)
        return [self._values.get(key, b"") for key in keys]

    def add(self, rank: Rank, key: str, amount: int) -> int:
        if not amount and key in self._values:
            self._poll(rank, "add", key)
        with self._lock:
            known, now = key in self._values, self._values.get(key, b"0")
            if not now.removeprefix(b"-").isdigit():
                raise ValueError(f"the store's add: the value of {key!r} is no number: {now!r:.60}")
            # Read and written under one lock: ranks that run freely add at the same time.
            total = int(now) + amount
            changed = bool(amount) or not known
            if changed:
                self._values[key] = b"%d" % total
        if changed:
            self._changed(key)
        return total

    def compare_set(self, rank: Rank, key: str, expected: bytes, desired: bytes) -> bytes:
        with self._lock:
            now = self._values.get(key)
            fits = now == expected or (now is None and not expected)
            if fits:
                self._values[key] = desired
        if fits:
            self._changed(key)
            return desired
        self._poll(rank, "compare_set", key)
        return self._values.get(key, expected) if now is not None else expected

    def check(self, rank: Rank, keys: Sequence[str]) -> bool:
        if not all(map(self._has, keys)):
            self._poll(rank, "check", *keys)
        return all(map(self._has, keys))

    def delete_key(self, rank: Rank, key: str) -> bool:
        with self._lock:
            self._version += 1
            return self._values.pop(key, None) is not None

    def num_keys(self, rank: Rank) -> int:
        """How many keys there are, and one more, as torch documents it of a TCPStore."""
        self._poll(rank, "num_keys")
        return len(self._values) + 1

    def list_keys(self, rank: Rank) -> list[str]:
        self._poll(rank, "list_keys")
        return list(self._values)

    def queue_push(self, rank: Rank, key: str, value: bytes) -> None:
        with self._lock:
            self._queues.setdefault(key, deque()).append(value)
        self._changed(key)

    def queue_pop(self, rank: Rank, key: str, block: bool, limit: float | None) -> bytes:
        if not block and key not in self._queues:
            self._poll(rank, "queue_pop", key)
        while True:
            with self._lock:
                queue = self._queues.get(key)
                if queue:
                    value = queue.popleft()
                    if not queue:
                        del self._queues[key]
                    self._version += 1
                    return value
            if not block:
                raise dist.QueueEmptyError("queue is empty")
            self.wait(rank, [key], limit, queued=True)

    def queue_len(self, rank: Rank, key: str) -> int:
        self._poll(rank, "queue_len", key)
        return len(self._queues.get(key, ()))

    def wait(
        self, rank: Rank, keys: Sequence[str], limit: float | None, queued: bool = False
    ) -> None:
        """Wait until there are all keys, or queues of them.

        **Raises**: torch.distributed.DistStoreError if the limit has expired.
        """
        clock, site = self._launch.scheduler.clock, rank.call_site()
        end = None if limit is None else clock.now + limit
        for key in keys:
            while True:
                with self._lock:
                    if key in self._queues if queued else self._has(key):
                        break
                    awaited = self._awaited.get(key)
                    if awaited is None:
                        awaited = self._awaited[key] = Completion(self._launch.scheduler)
                left = None if end is None else max(0.0, end - clock.now)
                if not rank.wait_for(awaited, f"the store's wait for {key!r} at {site}", left):
                    shown = ", ".join(f"/{each}" for each in keys)
                    error = dist.DistStoreError(
                        f"wait timeout after {milliseconds(limit)}ms, keys: {shown}"
                    )
                    raise note_stall(error, rank.thread().expired)

    def store_barrier(self, rank: Rank, key: str, size: int, limit: float | None) -> None:
        """Wait until as many ranks have come here with the same key."""
        whole = f"{key}{WHOLE}"
        if self.add(rank, key, 1) >= size:
            with self._lock:
                self._whole.add(whole)
            self._changed(whole)
        try:
            self.wait(rank, [whole], limit)
        except dist.DistStoreError as error:
            text = f"barrier timeout after {milliseconds(limit)}ms, key: {key}"
            raise note_stall(dist.DistStoreError(text), rank.thread().expired) from error

    def _has(self, key: str) -> bool:
        return key in self._values or key in self._queues or key in self._whole

    def _poll(self, rank: Rank, *question: str) -> None:
        """Let others run first, if the rank asks the same again and nothing has changed."""
        if rank.store_question == (self._version, *question):
            rank.give_way()
        rank.store_question = self._version, *question

    def _put(self, key: str, value: bytes) -> None:
        with self._lock:
            self._values[key] = value
        self._changed(key)

    def _changed(self, key: str) -> None:
        with self._lock:
            self._version += 1
            awaited = self._awaited.pop(key, None)
        if awaited is not None:
            awaited.complete()


class RankStore(dist.Store):
    """One rank's end of the store. C++ calls its methods too, for a PrefixStore.

    torch keeps the time-out. One that the program has not set is no limit: waiting in vain is known
    at once.
    """

    def __init__(self, launch: Launch, rank: Rank) -> None:
        super().__init__()
        self._launch, self._rank = launch, rank
        self._prefix = ""
        rank.stores.append(self)  # C++, as a PrefixStore, does not keep a Python object alive

    def _ask(self, method: str, *args: Any) -> Any:
        self._rank.check_thread(f"the store's {method}")
        return getattr(self._launch.store, method)(self._rank, *args)

    def _limit(self, timeout: timedelta | None = None) -> float | None:
        own: Any = self
        return seconds_of(own.timeout) if timeout is None else seconds_of(timeout, is_set=True)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, _bytes(value))

    def get(self, key: str) -> bytes:
        return bytes(self._ask("get", key, self._limit()))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [bytes(each) for each in self._ask("multi_get", list(keys), self._limit())]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        self._ask("multi_set", list(keys), list(map(_bytes, values)))

    def append(self, key: str, value: str | bytes) -> None:
        self._ask("append", key, _bytes(value))

    def add(self, key: str, amount: int) -> int:
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return bytes(self._ask("compare_set", key, _bytes(expected), _bytes(desired)))

    def check(self, keys: Sequence[str]) -> bool:
        if len(keys) == 1 and keys[0].endswith(MARK):
            self._prefix = keys[0].removesuffix(MARK)
            return False
        return bool(self._ask("check", list(keys)))

    def prefix_of(self, store: dist.PrefixStore) -> str:
        """The text that a PrefixStore of this one puts before keys, which torch keeps to itself."""
        store.check([MARK])
        return self._prefix

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete_key", key))

    def num_keys(self) -> int:
        return int(self._ask("num_keys"))

    def list_keys(self) -> list[str]:
        return list(self._ask("list_keys"))

    def queue_push(self, key: str, value: str | bytes) -> None:
        self._ask("queue_push", key, _bytes(value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return bytes(self._ask("queue_pop", key, block, self._limit()))

    def queue_len(self, key: str) -> int:
        return int(self._ask("queue_len", key))

    def has_extended_api(self) -> bool:
        return True

    def barrier(self, key: str, world_size: int, timeout: timedelta | None = None) -> None:
        self._ask("store_barrier", key, world_size, self._limit(timeout))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", list(keys), self._limit(timeout))

    def clone(self) -> RankStore:
        own: Any = self
        other = type(self)(self._launch, self._rank)
        other.set_timeout(own.timeout)
        return other

    # As C++ names them
    getNumKeys, deleteKey, compareSet = num_keys, delete_key, compare_set
    multiGet, multiSet, hasExtendedApi = multi_get, multi_set, has_extended_api
    queuePush, queuePop, queueLen, listKeys = queue_push, queue_pop, queue_len, list_keys


MARK = "gpusim\0prefix"


@contextmanager
def queues_of_prefixes() -> Iterator[None]:
    """A block in which PrefixStores of a rank's store have what C++ does not ask Python for."""
    with ExitStack() as stack:
        for name in ("clone", "list_keys", "queue_len", "queue_pop", "queue_push"):
            if hasattr(dist.Store, name):
                replace(stack, dist.Store, name, _of_prefix(name, getattr(dist.Store, name)))
        yield


def _of_prefix(name: str, function: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    def call(store: Any, *args: Any, **named: Any) -> Any:
        root = store
        while isinstance(root, dist.PrefixStore):
            root = root.underlying_store
        if root is store or not isinstance(root, RankStore):
            return function(store, *args, **named)
        prefix = root.prefix_of(store)
        if name == "clone":
            return dist.PrefixStore(prefix.removesuffix("/"), root.clone())
        if name == "list_keys":
            keys = [key for key in root.list_keys() if key.startswith(prefix)]
            return [key.removeprefix(prefix) for key in keys]
        key, *rest = args or [named.pop("key")]
        return getattr(root, name)(prefix + key, *rest, **named)

    return call


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
