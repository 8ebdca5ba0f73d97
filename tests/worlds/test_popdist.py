"""PopDist in one process and in several: shares, devices, and waiting for one another.

Several instances are real ones, under poprun; each prints what it found, in one run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpusim import popdist
from gpusim.devices import AcquireError, ConnectionType, IpuCountError, Table
from gpusim.errors import GpusimError
from gpusim.popdist import backend, participants
from gpusim.popdist.participants import listed
from gpusim.runtime import activity
from gpusim.runtime.environment import IPUS, LOCAL, LOCAL_INSTANCE, OFFSET, TOTAL, UNIFORM
from tests.oracles.machine_time import PATIENCE

ROOT = Path(__file__).parents[2]
NAMES = (TOTAL, LOCAL, OFFSET, IPUS, UNIFORM, LOCAL_INSTANCE)


@pytest.fixture(autouse=True)
def single(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variables of a launcher's, and nothing that another test has registered."""
    for name in list(os.environ):
        if name.startswith(("OMPI_", "PMI_", "SLURM_", "POPDIST_", "WORLD_SIZE")):
            monkeypatch.delenv(name)
    monkeypatch.setattr(participants, "_communicators", {})
    yield


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch):
    """Sets PopDist's variables, in the order of NAMES, and Open MPI's; init has not been called."""
    monkeypatch.setattr(backend, "_initialized", False)

    def put(*values: int | None, rank: int | None = None, size: int = 1) -> None:
        for name, value in zip(NAMES, values, strict=False):
            if value is not None:
                monkeypatch.setenv(name, str(value))
        if rank is not None:
            monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", str(size))
            monkeypatch.setenv("OMPI_COMM_WORLD_RANK", str(rank))
            monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", str(rank))

    return put


def run(tmp_path: Path, program: str, *options: str) -> list[str]:
    """The output of the instances, in order."""
    script = tmp_path / "program.py"
    script.write_text("import sys, time\nfrom gpusim import popdist\n" + program)
    command = [sys.executable, "-m", "gpusim.tools.launch", *options, sys.executable, str(script)]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [
        re.sub(r"^\[\d+,(\d+)\]<stdout>: ?", r"\1: ", x) for x in sorted(done.stdout.splitlines())
    ]


# ---------------------------------------------------------------- one process


def test_without_variables_there_is_one_instance_with_one_replica() -> None:
    assert not popdist.isPopdistEnvSet()
    assert popdist.getNumTotalReplicas() == popdist.getNumLocalReplicas() == 1
    assert popdist.getNumInstances() == popdist.getNumIpusPerReplica() == 1
    assert popdist.getReplicaIndexOffset() == popdist.getInstanceIndex() == 0
    assert popdist.getLocalInstanceIndex() == popdist.getDeviceId() == 0
    assert popdist.isUniformReplicasPerInstance()
    assert popdist.checkNumIpusPerReplica(1) and not popdist.checkNumIpusPerReplica(2)
    popdist.synchronize()
    popdist.registerCommunicator({0}, "local")
    popdist.synchronize("local")
    popdist.synchronize("yours", {0})
    assert popdist.execute_on_instances({0}, lambda a, b: a - b, 5, b=3) == 2


def test_one_instance_needs_no_mpi() -> None:
    program = """
import sys
from gpusim import popdist
popdist.init()
popdist.synchronize()
assert popdist.isBackendInitialized() and "mpi4py" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=PATIENCE)


def test_the_variables_say_where_an_instance_is(environment) -> None:
    environment(8, 2, 6, 4, 1, 1)
    assert popdist.isPopdistEnvSet() and popdist.isUniformReplicasPerInstance()
    assert (popdist.getNumTotalReplicas(), popdist.getNumLocalReplicas()) == (8, 2)
    assert (popdist.getNumInstances(), popdist.getInstanceIndex()) == (4, 3)
    assert (popdist.getReplicaIndexOffset(), popdist.getLocalInstanceIndex()) == (6, 1)
    assert popdist.getNumIpusPerReplica() == 4
    assert popdist.checkNumIpusPerReplica(4) and not popdist.checkNumIpusPerReplica(1)


@pytest.mark.parametrize("uniform", [0, None])
def test_instances_of_different_size_have_no_number(environment, uniform: int | None) -> None:
    environment(7, 3, 4, None, uniform, rank=1, size=2)
    assert not popdist.isUniformReplicasPerInstance()
    for function in (popdist.getNumInstances, popdist.getInstanceIndex):
        with pytest.raises(GpusimError, match=f"popdist.{function.__name__} needs equally many"):
            function()
    assert popdist.execute_on_instances({1}, lambda: "here") == "here"
    assert popdist.execute_on_instances({0}, lambda: "here") is None


def test_half_set_variables_are_named(environment) -> None:
    environment(8, None, None)
    with pytest.raises(ValueError, match=f"{LOCAL} is not set.*\n.*{OFFSET} is not set"):
        popdist.getNumTotalReplicas()


def test_init_refuses_many_processes_without_shares(environment) -> None:
    environment(rank=1, size=4)
    with pytest.raises(ValueError, match=r"openmpi started 4 instances.*start the program with po"):
        popdist.init()
    assert not popdist.isBackendInitialized()


def test_synchronize_before_init_is_an_error(environment) -> None:
    environment(4, 1, 2, None, 1, rank=2, size=4)
    with pytest.raises(GpusimError, match=r"call popdist.init\(\) first"):
        popdist.synchronize()
    popdist.synchronize(participants={0, 1})  # where this instance takes no part


def test_who_takes_part_must_exist(environment) -> None:
    environment(4, 1, 0, None, 1, rank=0, size=4)
    for wrong in (set(), {4}, {-1, 0}):
        with pytest.raises(ValueError, match="expected some of the instances 0 to 3"):
            popdist.execute_on_instances(wrong, print)
        with pytest.raises(ValueError, match="expected some of the instances 0 to 3"):
            popdist.registerCommunicator(wrong, "x")
    with pytest.raises(TypeError, match="expected a set of instance numbers"):
        popdist.execute_on_instances({"0"}, print)
    nested = popdist.execute_on_instances
    with pytest.raises(ValueError, match="instances 0, 2, which take part in execute_on_inst"):
        nested({0, 2}, nested, {0, 1}, print)
    assert nested({0, 2}, nested, {2}, print) is None
    assert nested({1}, print) is None


def test_a_communicator_keeps_its_name(environment) -> None:
    environment(4, 1, 0, None, 1, rank=0, size=4)
    popdist.registerCommunicator({1, 0}, "pair")
    popdist.registerCommunicator([0, 1], "pair")
    with pytest.raises(ValueError, match="'pair' is that of instances 0, 1; got 0 to 2"):
        popdist.registerCommunicator({0, 1, 2}, "pair")
    with pytest.raises(
        ValueError, match=r"expected one that registerCommunicator .* named: 'pair'"
    ):
        popdist.synchronize("par")


def test_runs_of_numbers_are_short() -> None:
    assert listed(tuple(range(64))) == "0 to 63"
    assert listed((0, 1, 3, 4, 5, 9)) == "0, 1, 3 to 5, 9"


# ---------------------------------------------------------------- devices


def test_instances_of_a_host_share_no_ipu(environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSIM_IPUS", "16")
    taken: list[int] = []
    for rank, (local, offset) in enumerate([(3, 0), (2, 3), (2, 5)]):  # blocks of 4 IPUs
        environment(7, local, offset, 1, 0, rank, rank=rank, size=3)
        device = Table.from_environment().device(popdist.getDeviceId())
        assert len(device) == 4
        taken += device.ipus
    assert len(set(taken)) == 12


def test_a_device_that_cannot_be_is_an_error(environment, monkeypatch) -> None:
    monkeypatch.setenv("GPUSIM_IPUS", "8")
    environment(8, 4, 4, 2, 1, 1)
    with pytest.raises(IpuCountError, match="needs 8 IPUs of its own: 16 in all, and there are 8"):
        popdist.getDeviceId()
    with pytest.raises(ValueError, match="ipusPerReplica=1: expected 2, which POPDIST_NUM_IPUS"):
        popdist.getDeviceId(1)
    with pytest.raises(ValueError, match="at least 0"):
        popdist.getDeviceId(-1)


def test_popart_gets_a_device_of_its_own(environment) -> None:
    environment(4, 2, 2, None, 1, 1)
    device = popdist.popart.getDevice()
    assert device.isAttached and device.numIpus == 2 and device.attach()
    assert device.id == popdist.getDeviceId() == Table.from_environment().of_size(2)[1].id
    with pytest.raises(AcquireError):
        popdist.popart.getDevice()
    other = popdist.popart.getDevice(1, connectionType=ConnectionType.OnDemand)
    assert not other.isAttached and not other.attach()
    device.detach()
    assert other.attach() and not device.isAttached
    other.detach()
    other.detach()
    offline = popdist.popart.getDevice(connectionType=2)
    assert offline.connectionType is ConnectionType.Never and not offline.attach()


def test_session_options_are_set(environment) -> None:
    environment(4, 2, 2, None, 1, 1)
    options = SimpleNamespace()
    popdist.popart.configureSessionOptions(options)
    assert vars(options) == {
        "enableDistributedReplicatedGraphs": True,
        "globalReplicationFactor": 4,
        "globalReplicaOffset": 2,
        "enableReplicatedGraphs": True,
        "replicatedGraphCount": 2,
    }


def test_tensorflows_config_is_set(environment) -> None:
    environment(4, 2, 2, 1, 1, 1)
    distribution = SimpleNamespace()
    experimental = SimpleNamespace(multi_replica_distribution=distribution)
    config = SimpleNamespace(experimental=experimental, select_ipus=None)
    assert popdist.tensorflow.set_ipu_config(config, 1, configure_device=False) is config
    assert config.select_ipus is None
    assert popdist.tensorflow.set_ipu_config(config).select_ipus == popdist.getDeviceId()
    assert (distribution.process_index, distribution.process_count) == (1, 2)
    with pytest.raises(ValueError, match="ipus_per_replica=2: expected 1"):
        popdist.tensorflow.set_ipu_config(config, 2)


# ---------------------------------------------------------------- several instances


def test_instances_wait_for_one_another_in_calls_that_belong_together(tmp_path: Path) -> None:
    program = f"""
import gpusim
popdist.init()
popdist.init()
me, log = popdist.getInstanceIndex(), {str(tmp_path / "log")!r}

def write(text):
    with open(log, "a") as file:  # short lines in append mode: whole, and in order
        file.write(f"{{text}} {{me}}\\n")

def pair():
    time.sleep(0.3 * (me == 1))
    write("b")
    popdist.synchronize()  # of the pair alone: instance 0 waits elsewhere
    write("c")
    return me

time.sleep(0.3 * (me == 2))
write("a")
popdist.synchronize()
found = popdist.execute_on_instances({{1, 2}}, pair)
popdist.registerCommunicator({{0, 1}}, "low")
popdist.synchronize("low")
popdist.synchronize(participants={{1, 2}})
popdist.synchronize()
write("d")
try:
    popdist.synchronize("one" if me else "two", {{0, 1}})
except gpusim.CollectiveMismatchError as error:
    print(error)
print(found, popdist.getNumInstances(), popdist.isBackendInitialized())
"""
    lines = run(tmp_path, program, "--num-instances", "3", "--num-replicas", "6")
    differs = "and instance {} in a call of synchronize with other participants, or with another"
    called = "is in popdist.synchronize of instances 0, 1, "
    for i in (0, 1):
        (line,) = (line for line in lines if line.startswith(f"{i}: instance"))
        assert line.startswith(f"{i}: instance {i} {called}{differs.format(1 - i)}")
        lines.remove(line)
    assert lines == ["0: None 3 True", "1: 1 3 True", "2: 2 3 True"]
    lines = (tmp_path / "log").read_text().split("\n")[:-1]
    assert sorted(lines) == ["a 0", "a 1", "a 2", "b 1", "b 2", "c 1", "c 2", "d 0", "d 1", "d 2"]
    assert [line[0] for line in lines] == sorted(line[0] for line in lines)  # none was early


def test_a_world_inside_a_call_has_the_instances_of_the_call(tmp_path: Path) -> None:
    program = """
import numpy as np
import gpusim
from gpusim import lax

def total(reduction=None):
    held = popdist.getNumLocalReplicas()
    mine = popdist.getReplicaIndexOffset() + np.arange(held, dtype=np.float32)
    add = lambda x: lax.psum(x, "i", reduction=reduction)
    return float(gpusim.vmap(add, axis_name="i", out_axes=None)(mine))

popdist.init()
with gpusim.World.from_environment():
    found = [total()]
    for some in ({0}, {0, 2}, {1, 2}):
        found.append(popdist.execute_on_instances(some, total))
    found.append(popdist.execute_on_instances({1, 2}, total, gpusim.Reduction.like("engine")))
    found.append(total())
print(*found)
"""
    lines = run(tmp_path, program, "--num-instances", "3", "--num-replicas", "7")  # 3, 2 and 2
    assert lines == [
        "0: 21.0 3.0 14.0 None None 21.0",
        "1: 21.0 None None 18.0 18.0 21.0",
        "2: 21.0 None 14.0 18.0 18.0 21.0",
    ]


@pytest.mark.slow
def test_the_training_example_ends_with_the_same_weights_everywhere(tmp_path: Path) -> None:
    program = f"""
import runpy
sys.argv = ["popdist_digits", "--steps", "5"]
runpy.run_path({str(ROOT / "examples" / "popdist_digits.py")!r}, run_name="__main__")
"""
    one, *others = (
        run(tmp_path, program, "--num-instances", str(instances), "--num-replicas", "6")
        for instances in (1, 4)
    )
    assert any("weights' SHA-256" in line for line in one)
    assert all(other == one for other in others)


def test_an_uncaught_exception_ends_all_instances(tmp_path: Path) -> None:
    program = """
popdist.init()
if popdist.getInstanceIndex() == 1:
    raise KeyError("lost")
popdist.synchronize()
"""
    with pytest.raises(AssertionError) as caught:
        run(tmp_path, program, "--num-instances", "3")
    printed = str(caught.value)
    assert re.search(r"poprun: instance 1 failed at \S+\.py:\d+: KeyError: 'lost'", printed)
    doing = "instances 0 and 2 were in popdist.synchronize of instances 0 to 2"
    assert doing in printed and "exit code 1; --verbose shows" in printed


# ---------------------------------------------------------------- heartbeats


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of this process's heartbeats."""
    monkeypatch.setenv(activity.FOLDER, str(tmp_path))
    monkeypatch.setattr(activity, "_opened", False)
    monkeypatch.setattr(activity.atexit, "register", lambda *_: None)
    yield tmp_path


@pytest.mark.parametrize("text", [None, "", "lax.psum over 'i'", "é" * 3000, "\ud800"])
def test_the_last_note_is_read(notes: Path, text: str | None) -> None:
    activity.note("before")
    activity.note(text)
    (found,) = activity.read(notes).values()
    expected = (
        None if text is None else text.encode(errors="replace")[:2000].decode("utf8", "replace")
    )
    assert found.pid == os.getpid()
    assert found.text == expected


def test_a_reader_never_sees_half_a_note(notes: Path) -> None:
    texts = ["a" * 1900, "b" * 7]
    activity.note(texts[0])
    over = threading.Event()

    def write() -> None:
        while not over.is_set():
            for text in texts:
                activity.note(text)

    writer = threading.Thread(target=write)
    writer.start()
    seen = {activity.read(notes)[0].text for _ in range(2000)}
    over.set()
    writer.join()
    assert seen <= set(texts)


def test_notes_of_a_forked_child_are_not_the_instances(notes: Path) -> None:
    activity.note("parent")
    child = os.fork()
    if child == 0:
        activity.note("child")
        os._exit(0)
    os.waitpid(child, 0)
    assert activity.read(notes)[0].text == "parent"


def test_what_is_no_note_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "instance-1").write_bytes(b"short")
    (tmp_path / "instance-2").write_bytes(bytes(4096))
    (tmp_path / "instance-3").write_bytes(b"\xff" * 4096)
    (tmp_path / "instance-4").mkdir()
    assert activity.read(tmp_path) == {}
    assert activity.read(tmp_path / "missing") == {}
    monkeypatch.setenv(activity.FOLDER, str(tmp_path / "missing"))
    monkeypatch.setattr(activity, "_opened", False)
    activity.note("unread")  # raises nothing
