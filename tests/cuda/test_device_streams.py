"""pmap on GPUs: streams ordered by events alone, arrays on their replica's GPU, NCCL between GPUs.

On the stand-in's streams, where every access to memory that no event orders is a race.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings

import gpusim
from gpusim import lax
from gpusim.devices import Ipu, Placement
from gpusim.errors import InstanceError
from gpusim.libraries import on_device
from gpusim.maps import streams
from gpusim.runtime.engines import nccl, while_waiting
from tests.cuda import device_arrays, device_streams
from tests.cuda.host_cuda.values import same
from tests.cuda.on_device import chooses_by_cupy
from tests.oracles import programs
from tests.oracles.machine_time import PATIENCE


@pytest.fixture(autouse=True)
def cupy() -> Iterator[Any]:
    with device_arrays.installed():
        yield sys.modules["cupy"]


WHERE: dict[str, Any] = {
    "where the arguments are": None,
    "one GPU": [0],
    "the other GPU": [1],
    "two GPUs": [0, 1],
    "two GPUs and the host": [1, "cpu", 0],
    "IPUs": [Ipu(2), Ipu(5)],
    "placements": [Placement(0, 3), Placement(1, 0), Placement(None, 1)],
}


def busy(x: Any) -> Any:
    """Collectives of every kind, and arrays that come and go between them."""
    for _ in range(2):
        total = lax.psum(x * 2, "i")
        x = x + total
        part = lax.psum_scatter(lax.all_gather(x, "i"), "i")
        x = lax.ppermute(part + lax.pmax(x, "i"), "i", [(0, 1), (1, 2), (2, 0)]) - total
        x += lax.pbroadcast(x * x, "i", 1)
    return x, total


@pytest.mark.parametrize("name", WHERE)
def test_replicas_have_the_hosts_bits_wherever_they_are(name: str) -> None:
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    expected = gpusim.pmap(busy, "i")(x)
    run = gpusim.pmap(busy, "i", devices=WHERE[name])
    for _ in range(3):  # the streams of one call serve the next
        given_ = device_arrays.to_device(x) * 1
        found = run(given_)
        for ours, theirs in zip(found, expected, strict=True):
            assert on_device(ours)
            same(ours.get(), theirs)
    if name in ("one GPU", "two GPUs"):
        for ours, theirs in zip(run(x), expected, strict=True):
            same(ours.get(), theirs)  # NumPy's arguments go to the GPUs


@pytest.mark.parametrize("name", ["two GPUs", "two GPUs and the host"])
def test_without_nccl_the_driver_copies(name: str, cupy: Any) -> None:
    x = np.arange(12, dtype=np.int32).reshape(3, 4)
    assert not cupy.cuda.nccl.groups
    run = gpusim.pmap(lambda x: lax.psum(x.T, "i").T + x, "i", devices=WHERE[name])
    same(run(x).get(), x + x.sum(0, np.int32))
    assert cupy.cuda.nccl.groups
    before, cupy.cuda.nccl.available = cupy.cuda.nccl.groups, False
    same(run(x).get(), x + x.sum(0, np.int32))
    assert cupy.cuda.nccl.groups == before


@pytest.mark.parametrize("name", ["where the arguments are", "two GPUs"])
def test_the_host_waits_for_nothing(name: str) -> None:
    x = device_arrays.to_device(np.ones((3, 4), np.float32))
    gpusim.pmap(busy, "i", devices=WHERE[name])(x)
    assert device_streams.waits == []


def test_each_replica_has_a_stream_and_arrays_of_its_own_gpu(cupy: Any) -> None:
    seen: dict[int, Any] = {}
    lock = threading.Lock()

    def f(x: Any) -> Any:
        with lock:
            stream = cupy.cuda.get_current_stream()
            seen[int(lax.axis_index("i"))] = stream, x.device.id
        assert stream.is_non_blocking and stream.device_id == x.device.id
        return lax.psum(x, "i")

    gpusim.pmap(f, "i", devices=[0, 1])(np.ones((4, 2)))
    assert len({stream.ptr for stream, _ in seen.values()}) == 4
    assert [seen[k][1] for k in range(4)] == [0, 1, 0, 1]


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("where", [None, [0, 1]], ids=str)
def test_many_replicas_share_streams(
    limit: int, where: Any, cupy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In groups that meet at different times, with memory that comes and goes."""
    monkeypatch.setattr(streams, "STREAMS", limit)
    streams.pool.clear()
    seen = set()

    def f(x: Any) -> Any:
        seen.add(cupy.cuda.get_current_stream().ptr)
        for _ in range(3):
            for groups in ([[0, 3], [1, 4], [2, 5]], [[0, 1, 2], [3, 4, 5]]):
                x = x + lax.psum(x * 2, "i", axis_index_groups=groups) / 4
        return x, lax.psum(x, "i")

    x = np.random.default_rng(1).normal(size=(6, 5)).astype(np.float32)
    expected = gpusim.pmap(f, "i")(x)
    seen.clear()
    for number in range(3):
        found = gpusim.pmap(f, "i", devices=where)(device_arrays.to_device(x))
        for ours, theirs in zip(found, expected, strict=True):
            same(ours.get(), theirs)
        if number == 0:
            assert len(seen) == limit * (1 if where is None else 2)
    free = [id(stream) for each in streams.pool._free.values() for stream in each]
    assert len(free) == len(set(free))  # each is given back once


def test_kernels_take_the_replicas_own_memory() -> None:
    x = device_arrays.to_device(np.ones((5, 1000), np.float32))
    counts = device_arrays.counts
    before = counts.launches
    gpusim.pmap(lambda x: lax.psum(x, "i"), "i", out_axes=None)(x)
    assert counts.launches - before == 2  # the fold, and the copy that the caller owns


def test_a_replica_may_work_on_other_streams_too(cupy: Any) -> None:
    def f(x: Any) -> Any:
        with cupy.cuda.Stream(non_blocking=True) as mine:
            mine.wait_event(cupy.cuda.Event())
            with mine:
                y = device_arrays.to_device(np.ones(4)) * 2
                total = lax.psum(y, "i") + 1
            behind = mine.record()
        cupy.cuda.get_current_stream().wait_event(behind)
        return total + x

    x = np.arange(12.0).reshape(3, 4)
    same(gpusim.pmap(f, "i")(device_arrays.to_device(x)).get(), x + 7)


def test_nested_maps_keep_their_order() -> None:
    def f(x: Any) -> Any:
        inner = gpusim.pmap(lambda y: lax.psum(y * y, ("j", "i")) + lax.psum(y, "j"), "j")
        total = lax.psum(inner(x * 2), "i")
        return gpusim.vmap(lambda y: y - lax.pmean(y, "k"), axis_name="k")(total + x)

    x = np.random.default_rng(1).normal(size=(2, 3, 4))
    for where in (None, [0, 1]):
        found = gpusim.pmap(f, "i", devices=where)(device_arrays.to_device(x))
        same(found.get(), gpusim.pmap(f, "i")(x))


RANDOM = settings(
    max_examples=6,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("first", tuple(programs.SHAPES))
def test_random_programs_on_two_gpus_have_the_hosts_bits(first: str) -> None:
    def on_two(f: Callable[..., Any], **options: Any) -> Any:
        return gpusim.pmap(f, devices=[1, 0], **options)

    @RANDOM
    @given(programs.programs((first,), axes=programs.AXES[1:9]))
    def agree(program: programs.Program) -> None:
        assume(not chooses_by_cupy(program))
        x = program.argument()
        inner = len(program.axes) - 1
        run = programs.nest((on_two,) + (programs.MAPS["vmap"],) * inner)
        usual = programs.nest((programs.MAPS["pmap"],) + (programs.MAPS["vmap"],) * inner)
        ours, theirs = (programs.outcome(lambda r=r: r(program, x)) for r in (run, usual))
        assert type(ours.error) is type(theirs.error), (ours.error, theirs.error)
        if ours.error is None:
            found = programs.optree.tree_map(
                lambda leaf: leaf.get() if on_device(leaf) else leaf, ours.results
            )
            programs.assert_same_bits(found, theirs.results, "two GPUs")

    agree()


# Every wait is needed: without any one of them there is a race.


def forget_the_beginning(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(streams, "_record_current", lambda gpu: device_streams.Event())


def forget_who_arrived(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(streams, "arrive", lambda slot: streams.Arrival(slot, [slot.stream], []))
    patch.setattr("gpusim.maps.rendezvous.arrive", streams.arrive)


def forget_the_meeting(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(streams.Arrival, "depart", lambda self, done: None)


def forget_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(streams.StreamSlots, "follow", lambda self: None)


@pytest.mark.parametrize(
    "forget", [forget_the_beginning, forget_who_arrived, forget_the_meeting, forget_the_end]
)
@pytest.mark.parametrize("where", [[0], [0, 1]], ids=str)
def test_without_any_of_the_waits_there_is_a_race(
    forget: Any, where: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = device_arrays.to_device(np.ones((3, 4), np.float32))
    forget(monkeypatch)
    with pytest.raises((AssertionError, gpusim.ReplicaError)) as caught:
        gpusim.pmap(busy, "i", devices=where)(x * 2)
    errors = [caught.value, caught.value.__cause__]
    assert any("a race" in str(error) for error in errors)


def test_memory_that_another_stream_still_reads_is_a_race_when_it_is_used_again(cupy: Any) -> None:
    with cupy.cuda.Stream(non_blocking=True) as mine:
        x = device_arrays.to_device(np.ones(3)) * 2
        ready = mine.record()
    with cupy.cuda.Stream(non_blocking=True) as other:
        other.wait_event(ready)
        y = x + 1
        del x
    with mine, pytest.raises(AssertionError, match="a race"):
        device_arrays.to_device(np.zeros(3))
    with mine:
        with other:
            behind = other.record()
        mine.wait_event(behind)
        same((device_arrays.to_device(np.zeros(3)) + y).get(), np.full(3, 3.0))


def test_a_replica_that_fails_leaves_the_streams_in_order() -> None:
    def f(x: Any) -> Any:
        y = lax.psum(x, "i")
        if lax.axis_index("i") == 1:
            raise RuntimeError("here")
        return lax.psum(y, "i")

    x = device_arrays.to_device(np.ones((3, 4), np.float32))
    for _ in range(3):
        with pytest.raises(gpusim.ReplicaError, match="here"):
            gpusim.pmap(f, "i", devices=[0, 1])(x)
        same(gpusim.pmap(busy, "i")(x)[1].get(), gpusim.pmap(busy, "i")(x.get())[1])


def test_errors_name_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for wrong in ("gpu", 1.5, True, -1, None):
        with pytest.raises(ValueError, match="expected 'cpu', 'host', the number of a GPU"):
            gpusim.pmap(busy, "i", devices=[wrong])
    with pytest.raises(TypeError, match="a sequence of devices"):
        gpusim.pmap(busy, "i", devices="cpu")
    with pytest.raises(ValueError, match="at least one device"):
        gpusim.pmap(busy, "i", devices=[])
    with pytest.raises(ValueError, match="GPU 2, but there are 2 GPUs"):
        gpusim.pmap(busy, "i", devices=[0, 2])(np.ones((3, 4)))
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r"gpusim\[cuda13\]"):
        gpusim.pmap(busy, "i", devices=[0])(np.ones((3, 4)))


def test_on_the_host_arguments_come_there() -> None:
    def f(x: Any) -> Any:
        assert type(x) is np.ndarray
        return lax.psum(x, "i")

    x = device_arrays.to_device(np.ones((3, 4)))
    assert gpusim.pmap(f, "i", devices=["host"], out_axes=None)(x).tolist() == [3.0] * 4


# NCCL between instances.


def engines(count: int, work: Callable[[nccl.NcclEngine], Any]) -> list[Any]:
    identity = nccl.unique_id()
    assert len(identity) == 128
    with ThreadPoolExecutor(count) as threads:
        made = [
            threads.submit(lambda k=k: work(nccl.NcclEngine(count, k, identity, gpu=k % 2)))
            for k in range(count)
        ]
        return [future.result(timeout=PATIENCE) for future in made]


def test_instances_exchange_arrays_of_any_dtype(cupy: Any) -> None:
    def work(engine: nccl.NcclEngine) -> Any:
        own, count = engine.instance, engine.instances
        with cupy.cuda.Device(own % 2):
            mine = device_arrays.to_device(np.full((2, 3), own, np.complex64))
            rooms = {k: cupy.empty((2, 3), np.complex64) for k in range(count) if k != own}
            sends = [(mine, k) for k in rooms]
            engine.exchange(sends, [(room, k) for k, room in rooms.items()], tag=7).wait()
            engine.barrier()
            total = engine.all_reduce(device_arrays.to_device(np.float32([own, 1])), "sum")
            engine.close()
            return {k: room.get() for k, room in rooms.items()}, total.get()

    for own, (rooms, total) in enumerate(engines(3, work)):
        assert sorted(rooms) == [k for k in range(3) if k != own]
        for k, room in rooms.items():
            same(room, np.full((2, 3), k, np.complex64))
        same(total, np.float32([3, 3]))


def test_exchanges_are_ordered_among_the_current_streams_work(cupy: Any) -> None:
    def work(engine: nccl.NcclEngine) -> Any:
        other = 1 - engine.instance
        with cupy.cuda.Device(engine.instance), cupy.cuda.Stream(non_blocking=True):
            mine = device_arrays.to_device(np.arange(4.0)) + engine.instance
            room = cupy.empty(4, np.float64)
            pending = engine.exchange([(mine, other)], [(room, other)], tag=0)
            mine += 1  # behind the sending
            result = room * 2
            pending.wait()
            return result.get()

    same(engines(2, work)[0], np.arange(4.0) * 2 + 2)


def test_an_engine_refuses_what_nccl_does_not_move(cupy: Any) -> None:
    engine = nccl.NcclEngine(1, 0, nccl.unique_id(), gpu=0)
    with pytest.raises(TypeError, match="NumPy's arrays need MPI"):
        engine.exchange([(np.ones(3), 0)], [], 0)
    with pytest.raises(ValueError, match="contiguous"):
        engine.exchange([(device_arrays.to_device(np.ones((3, 4))).T, 0)], [], 0)
    with cupy.cuda.Device(1), pytest.raises(ValueError, match="on GPU 0, the array on 1"):
        engine.exchange([(device_arrays.to_device(np.ones(3)), 0)], [], 0)
    with pytest.raises(TypeError, match="no all-reduce for op='logical_or'"):
        engine.all_reduce(device_arrays.to_device(np.ones(3)), "logical_or")
    cupy.cuda.nccl.available = False
    with pytest.raises(ImportError, match="nvidia-nccl"):
        nccl.unique_id()


def test_an_engine_does_not_make_identities(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bindings, given = cupy.cuda.nccl, []
    identity = nccl.unique_id()

    def refuse() -> bytes:
        raise AssertionError("each identity opens a socket")

    monkeypatch.setattr(bindings, "get_unique_id", refuse)
    nccl.NcclEngine(1, 0, identity, gpu=0).close()
    create = bindings.NcclCommunicator

    def of_old(count: int, identity: Any, rank: int) -> Any:
        if not isinstance(identity, tuple):
            raise TypeError("Argument 'commId' has incorrect type (expected tuple, got bytes)")
        given.append(identity)
        return create(count, identity, rank)

    monkeypatch.setattr(bindings, "NcclCommunicator", of_old)
    nccl.NcclEngine(1, 0, bytes([1, 255]), gpu=0).close()
    assert given == [(1, -1)]


def test_a_wait_can_be_ended_from_outside() -> None:
    def look() -> None:
        raise KeyboardInterrupt

    with while_waiting(look), pytest.raises(KeyboardInterrupt):
        nccl.NcclExchange(Never(), Never(), (), 60, [1]).wait()


class Never:
    """An event that does not come, or a communicator with an error."""

    done = False
    aborted = False

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def check_async_error(self) -> None:
        if self.error is not None:
            raise self.error

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize(
    ("communicator", "patience", "message"),
    [
        (Never(), 0.05, r"has not ended within 0\.05 s, in an exchange with instances 2, 3"),
        (Never(RuntimeError("remote error")), 60, "NCCL: remote error"),
    ],
)
def test_an_instance_that_is_gone_is_an_error(
    communicator: Never, patience: float, message: str
) -> None:
    waiting = nccl.NcclExchange(Never(), communicator, (), patience, [2, 3])
    assert waiting.awaited() == [2, 3]
    with pytest.raises(InstanceError, match=message) as caught:
        waiting.wait()
    assert caught.value.instance == 2 and communicator.aborted
