"""The key-value store of a launch, in whose `wait` and `get` ranks give up their turn."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import distributed as dist

from ...maps.completion import Completion

if TYPE_CHECKING:
    from .ranks import Launch

__all__ = ["RankStore"]


class RankStore(dist.Store):
    """A store of all ranks. There are no time limits: waiting in vain is known at once."""

    def __init__(self, launch: Launch) -> None:
        super().__init__()
        self._launch = launch
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._awaited: dict[str, Completion] = {}

    def set(self, key: str, value: str | bytes) -> None:
        self._put(key, _bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            total = int(self._values.get(key, b"0")) + amount
        self._put(key, b"%d" % total)
        return total

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        now = self._values.get(key)
        if now == _bytes(expected) or (now is None and not expected):
            self._put(key, _bytes(desired))
        return self._values.get(key, _bytes(expected))

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    deleteKey = delete_key

    def num_keys(self) -> int:
        return len(self._values)

    getNumKeys = num_keys

    def set_timeout(self, timeout: Any) -> None:
        pass

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        from .ranks import current_rank

        rank = current_rank()
        site = rank.call_site()
        for key in keys:
            while True:
                with self._lock:
                    if key in self._values:
                        break
                    awaited = self._awaited.setdefault(key, Completion(self._launch.scheduler))
                rank.wait_for(awaited, f"the store's wait for {key!r} at {site}")

    def _put(self, key: str, value: bytes) -> None:
        with self._lock:
            self._values[key] = value
            awaited = self._awaited.pop(key, None)
        if awaited is not None:
            awaited.complete()


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
