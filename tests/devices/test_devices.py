"""The table of simulated IPUs: ids, selection with its checks, and places on GPUs."""

from __future__ import annotations

import inspect
import logging
import pickle

import pytest

import gpusim
from gpusim.devices import (
    Device,
    DeviceIdError,
    Ipu,
    IpuCountError,
    Placement,
    Table,
    devices,
    ipus_needed,
    place,
    select_by_count,
    select_by_id,
)

COUNTS = (1, 2, 4, 8, 16, 64, 1024)


def test_devices_is_a_function_and_its_package_can_be_imported_from() -> None:
    assert gpusim.devices is devices
    assert inspect.isfunction(gpusim.devices)
    assert gpusim.devices()[-1] == Device(30, tuple(range(16)))


@pytest.mark.parametrize("count", COUNTS)
def test_a_devices_place_is_its_id(count: int) -> None:
    found = Table(count).devices
    assert [device.id for device in found] == list(range(2 * count - 1))


@pytest.mark.parametrize("count", COUNTS)
def test_singles_come_first_then_ever_larger_groups_of_neighbours(count: int) -> None:
    found = list(Table(count).devices)
    size = 1
    while size <= count:
        level, found = found[: count // size], found[count // size :]
        assert [ipu for device in level for ipu in device.ipus] == list(range(count))
        assert {len(device) for device in level} == {size}
        size *= 2
    assert not found


def test_ids_of_16_ipus() -> None:
    table = Table()
    assert table.device(16).ipus == (0, 1)
    assert table.device(25).ipus == (4, 5, 6, 7)
    assert table.device(28).ipus == tuple(range(8))
    assert table.of_size(16) == (table.device(30),)
    assert table.of_size(3) == table.of_size(32) == ()


def test_ipu_numbers_count_down_in_each_machine_of_four() -> None:
    assert [ipu.number for ipu in Table(8).ipus] == [3, 2, 1, 0, 3, 2, 1, 0]
    assert [ipu.host for ipu in Table(8).ipus] == ["127.0.0.1"] * 4 + ["127.0.0.2"] * 4


def test_hosts_are_addresses_for_the_largest_system_too() -> None:
    assert Ipu(1023).host == "127.0.1.0"


@pytest.mark.parametrize("id", [-1, 31, 10**9])
def test_an_id_outside_the_table_is_named(id: int) -> None:
    with pytest.raises(DeviceIdError, match=f"no device Id {id}: 16 IPUs have the ids 0 to 30"):
        Table(16).device(id)


def test_a_single_ipu_has_one_id() -> None:
    with pytest.raises(DeviceIdError, match="no device Id 1: 1 IPU has the id 0"):
        Table(1).device(1)


@pytest.mark.parametrize(("text", "count"), [("", 16), (" ", 16), ("1", 1), (" 64 ", 64)])
def test_the_environment_says_how_many(
    text: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSIM_IPUS", text)
    assert Table.from_environment() == Table(count)
    assert len(devices()) == 2 * count - 1


@pytest.mark.parametrize("text", ["0", "3", "-4", "2048", "four", "4.0", "1_6", "١٦", "9" * 5000])
def test_a_senseless_number_of_ipus_is_named(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSIM_IPUS", text)
    with pytest.raises(ValueError, match=r"^GPUSIM_IPUS='.*': expected a power of two from 1 to"):
        devices()


@pytest.mark.parametrize("count", [0, 3, -2, 2048, 4.0])
def test_a_table_of_senseless_size_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="expected a power of two"):
        Table(count)


def test_devices_travel_between_processes() -> None:
    assert pickle.loads(pickle.dumps(devices())) == devices()
    error = pickle.loads(pickle.dumps(IpuCountError("no", 3, 4)))
    assert (str(error), error.requested, error.reserved) == ("no", 3, 4)


def test_too_many_ipus_need_distributed_execution() -> None:
    expected = (
        r"^Too many IPUs requested \(128\)\. "
        r"Experiments that need more than 64 IPUs require distributed execution\.$"
    )
    for select in (
        lambda: select_by_count(64, 2, round_up=True),
        lambda: select_by_id(0, 64, 2),
        lambda: ipus_needed(128),
    ):
        with pytest.raises(IpuCountError, match=expected):
            select()


@pytest.mark.parametrize(("replicas", "each"), [(0, 1), (1, 0), (-1, 2)])
def test_less_than_one_ipu_is_refused(replicas: int, each: int) -> None:
    with pytest.raises(ValueError, match="expected a number of at least 1"):
        ipus_needed(replicas, each)


def test_by_count_offers_every_device_of_that_size() -> None:
    assert [device.id for device in select_by_count(2, 2)] == [24, 25, 26, 27]


def test_a_count_that_is_no_power_of_two_is_refused_unless_rounding_was_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(IpuCountError, match=r"3 replicas \* 2 IPUs = 6 IPUs.*at least 8") as raised:
        select_by_count(3, 2)
    assert (raised.value.requested, raised.value.reserved) == (6, 8)
    assert not caplog.records
    with caplog.at_level(logging.WARNING, "gpusim.devices"):
        assert [len(device) for device in select_by_count(3, 2, round_up=True)] == [8, 8]
    assert "2 will be reserved but not used" in caplog.text


def test_rounding_reaches_the_limit_of_a_process_and_not_beyond() -> None:
    assert len(select_by_count(33, round_up=True, table=Table(64))[0]) == 64
    with pytest.raises(IpuCountError, match=r"Too many IPUs requested \(65\)"):
        select_by_count(65, round_up=True, table=Table(128))


def test_more_ipus_than_the_system_has_are_refused() -> None:
    with pytest.raises(IpuCountError, match="32 IPUs are needed, and there are 16; GPUSIM_IPUS"):
        select_by_count(32)


def test_by_id_checks_the_number_of_ipus(caplog: pytest.LogCaptureFixture) -> None:
    assert select_by_id(24, 2, 2).ipus == (0, 1, 2, 3)
    assert not caplog.records
    with pytest.raises(IpuCountError, match=r"= 4 \* 2 = 8 IPUs but device Id 24 has 4"):
        select_by_id(24, 4, 2)
    with caplog.at_level(logging.WARNING, "gpusim.devices"):
        assert select_by_id(24, 3).id == 24
    assert "has 4, which means some of them will not be used" in caplog.text


@pytest.mark.parametrize("gpus", [1, 2, 3])
def test_ipus_are_dealt_to_the_gpus_in_turn(gpus: int) -> None:
    placed = [place(ipu, gpus) for ipu in Table(16).ipus]
    assert [placement.gpu for placement in placed] == [k % gpus for k in range(16)]
    assert len(set(placed)) == 16, "two IPUs share a stream"
    for gpu in range(gpus):
        slots = [placement.slot for placement in placed if placement.gpu == gpu]
        assert slots == list(range(len(slots)))


def test_without_a_gpu_every_ipu_is_on_the_host() -> None:
    assert [place(k, 0) for k in (0, 15)] == [Placement(None, 0), Placement(None, 15)]
    with pytest.raises(ValueError, match="at least 0"):
        place(0, -1)
