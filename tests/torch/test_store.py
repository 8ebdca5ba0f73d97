"""The store of a launch beside torch's own TCPStore: all methods, through PrefixStores too."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from gpusim.torch.distributed import launch
from tests.oracles.budget import budget, seeds
from tests.torch.children import needs_linux

KEYS = ("a", "b", "a/b", "")
VALUES = ("", "1", "-2", "text")
SHORT, LONG = timedelta(milliseconds=2), timedelta(seconds=300)


def step(store: Any, draw: random.Random) -> tuple[str, Callable[[], Any]]:
    """A random call, by name."""
    key, other, value = draw.choice(KEYS), draw.choice(KEYS), draw.choice(VALUES)
    amount, expected = draw.randrange(-2, 3), draw.choice(VALUES)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("set", lambda: store.set(key, value)),
        ("get", lambda: store.check([key]) and store.get(key)),
        ("append", lambda: store.append(key, value)),
        ("add", lambda: store.add(f"n{key}", amount)),
        ("get n", lambda: store.check([f"n{key}"]) and store.get(f"n{key}")),
        ("compare_set", lambda: store.compare_set(key, expected, value)),
        ("check", lambda: store.check([key, other])),
        ("check none", lambda: store.check([])),
        ("delete_key", lambda: store.delete_key(key)),
        ("num_keys", store.num_keys),
        ("list_keys", lambda: sorted(store.list_keys())),
        ("multi_set", lambda: store.multi_set([key, f"{other}2"], [value, expected])),
        ("multi_get", lambda: store.check([key, other]) and store.multi_get([key, other])),
        ("queue_push", lambda: store.queue_push(f"q{key}", value)),
        ("queue_len", lambda: store.queue_len(f"q{key}")),
        ("queue_pop", lambda: store.queue_pop(f"q{key}", False)),
        ("has_extended_api", store.has_extended_api),
        ("clone", lambda: (store.clone().check([key]), str(store.clone().timeout))),
    ]
    if not draw.randrange(20):
        calls = [
            ("wait", lambda: store.wait([key, "never"], SHORT)),
            ("get in vain", lambda: in_vain(store, lambda: store.get("never"))),
            ("queue_pop in vain", lambda: in_vain(store, lambda: store.queue_pop("never"))),
            ("barrier", lambda: store.barrier(f"barrier {key}", 1, LONG)),
            ("barrier in vain", lambda: store.barrier("alone", 9, SHORT)),
            ("timeout", lambda: in_vain(store, lambda: str(store.timeout))),
        ]
    return draw.choice(calls)


def in_vain(store: Any, call: Callable[[], Any]) -> Any:
    """A call with a short time-out, which those of keys that are there must not have.

    On a slow machine the store's server may take longer.
    """
    store.set_timeout(SHORT)
    try:
        return call()
    finally:
        store.set_timeout(LONG)


def results(store: Any, seed: int, steps: int) -> list[str]:
    """What random calls return or raise."""
    draw, found = random.Random(seed), []
    for _ in range(steps):
        name, call = step(store, draw)
        try:
            said = repr(call())
        except RuntimeError as error:
            said = f"{type(error).__name__}: {error}"
        found.append(f"{name}: {said}")
        store.set_timeout(LONG)
    return found


def prefixed(store: Any, depth: int) -> Any:
    for name in ("one", "two/")[:depth]:
        store = dist.PrefixStore(name, store)
    return store


def in_ranks_store(seed: int, steps: int, **mode: Any) -> list[str]:
    def program(rank: int) -> list[str]:
        whole, _, _ = next(dist.distributed_c10d.rendezvous("env://"))
        return results(prefixed(whole, seed % 3), seed, steps)

    return launch(program, 1, **mode)[0]


@pytest.mark.parametrize("seed", seeds(budget(30, least=3)))
def test_calls_return_and_raise_what_tcpstore_does(seed: int) -> None:
    steps = 100
    own = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    expected = results(prefixed(own, seed % 3), seed, steps)
    assert in_ranks_store(seed, steps) == expected


@needs_linux
def test_processes_have_the_same_store() -> None:
    assert in_ranks_store(2, 60, processes=True) == in_ranks_store(2, 60)


@pytest.mark.parametrize("processes", [False, pytest.param(True, marks=needs_linux)])
def test_ranks_share_queues_and_wait_for_them(processes: bool) -> None:
    """Each value is popped once; a barrier of the store waits for all."""

    def program(rank: int) -> int:
        dist.init_process_group("gloo")
        store: Any = dist.distributed_c10d._get_default_store()
        if rank == 2:
            for value in (1, 2):
                store.queue_push("queue", str(value))
            found = 0
        else:
            found = int(store.queue_pop("queue"))
        store.barrier("end", 3)
        assert store.queue_len("queue") == 0
        return found

    assert sorted(launch(program, 3, processes=processes)) == [0, 1, 2]


def test_a_value_that_is_no_number_is_named() -> None:
    """TCPStore's server closes the connection then."""

    def program(rank: int) -> None:
        dist.init_process_group("gloo")
        store: Any = dist.distributed_c10d._get_default_store()
        store.set("key", "text")
        with pytest.raises(ValueError, match=r"the store's add: the value of .*key' is no number"):
            store.add("key", 1)

    launch(program, 1)


def test_ranks_that_run_freely_change_a_value_one_after_another() -> None:
    """Each addition counts, each part is appended, and one of all wins a key."""
    times, interval = 2000, sys.getswitchinterval()

    def program(rank: int) -> tuple[int, int]:
        dist.init_process_group("gloo")
        store: Any = dist.distributed_c10d._get_default_store()
        won = 0
        for step in range(times):
            store.add("sum", 1)
            store.append("parts", str(rank))
            won += store.compare_set(f"key {step}", "", str(rank)) == str(rank).encode()
        dist.barrier()
        assert sorted(store.get("parts").decode()) == sorted("012" * times)
        return won, store.add("sum", 0)

    sys.setswitchinterval(1e-6)
    try:
        found = launch(program, 3, schedule="free")
    finally:
        sys.setswitchinterval(interval)
    assert [total for _, total in found] == [3 * times] * 3
    assert sum(won for won, _ in found) == times
