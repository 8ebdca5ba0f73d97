"""popdist.poptorch.Options: this instance's replicas, number and device, and what is blocked."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import gpusim.popdist.poptorch as popdist
from gpusim import poptorch
from gpusim.devices import IpuCountError, Table
from gpusim.errors import GpusimError
from gpusim.popdist.poptorch import Options
from gpusim.poptorch import ConfigFileError, OutputMode
from gpusim.runtime.environment import IPUS, LOCAL, LOCAL_INSTANCE, OFFSET, TOTAL, UNIFORM

NAMES = (TOTAL, LOCAL, OFFSET, IPUS, UNIFORM, LOCAL_INSTANCE)
Put = Callable[..., None]


@pytest.fixture(autouse=True)
def single(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variables of a launcher's."""
    for name in list(os.environ):
        if name.startswith(("OMPI_", "PMI_", "SLURM_", "POPDIST_", "POPTORCH_", "WORLD_SIZE")):
            monkeypatch.delenv(name)
    yield


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Put:
    """Sets PopDist's variables, in the order of NAMES, and Open MPI's."""

    def put(*values: int, size: int = 1, rank: int = 0) -> None:
        for name, value in zip(NAMES, values, strict=False):
            monkeypatch.setenv(name, str(value))
        for name, number in (("SIZE", size), ("RANK", rank), ("LOCAL_RANK", rank)):
            monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(number))

    return put


def test_a_single_instance() -> None:
    options = Options().outputMode(OutputMode.All)
    assert isinstance(options, poptorch.Options) and options.replication_factor == 1
    assert (options.Distributed.processId, options.Distributed.numProcesses) == (0, 1)
    assert options.toDict()["ipu_id"] == 0


def test_an_instance_of_four(put: Put) -> None:
    put(8, 2, 6, 2, 1, 3, size=4, rank=3)
    options = Options(ipus_per_replica=2).outputMode(OutputMode.All)
    found = options.toDict()
    assert options.replication_factor == found["replication_factor"] == 2
    assert (options.Distributed.processId, options.Distributed.numProcesses) == (3, 4)
    assert found["distributed_process_id"] == 3 and found["num_distributed_processes"] == 4
    assert found["globalReplicationFactor"] == 8 and found["globalReplicaOffset"] == 6
    assert found["ipu_id"] == Table.from_environment().of_size(4)[3].id


BLOCKED = [
    ("useIpuId", lambda options: options.useIpuId(1)),
    ("replicationFactor", lambda options: options.replicationFactor(1)),
    ("Distributed.disable", lambda options: options.Distributed.disable()),
    ("Distributed.setEnvVarNames", lambda options: options.Distributed.setEnvVarNames("A", "B")),
    ("Distributed.configureProcessId", lambda options: options.Distributed.configureProcessId(1)),
]


@pytest.mark.parametrize(("name", "act"), BLOCKED, ids=[name for name, _ in BLOCKED])
def test_what_is_blocked(name: str, act: Callable[[Options], Any]) -> None:
    message = re.escape(f"Cannot call `{name}` with popdist.poptorch.Options")
    for options in (Options(), Options().clone(), copy.deepcopy(Options())):
        with pytest.raises(RuntimeError, match=f"^{message}$"):
            act(options)


def test_files_and_json_are_blocked_too(tmp_path: Any) -> None:
    (tmp_path / "tmp.conf").write_text("replicationFactor(2)")
    with pytest.raises(RuntimeError, match="Cannot call `replicationFactor`"):
        Options().loadFromFile(tmp_path / "tmp.conf")
    with pytest.raises(RuntimeError, match=r"Cannot call `Distributed\.disable`"):
        Options().from_json('{"Distributed.disable": []}')
    (tmp_path / "tmp.conf").write_text("_set_replicas(2)")
    with pytest.raises((ConfigFileError, AttributeError)):
        Options().loadFromFile(tmp_path / "tmp.conf")


def test_the_other_options_are_poptorchs() -> None:
    options = Options().deviceIterations(3).enableSyntheticData(True)
    options.Training.gradientAccumulation(2)
    assert options.clone() == options != poptorch.Options()
    assert options.clone().device_iterations == 3
    assert repr(options).startswith("Options(replication_factor=1, ")


def test_a_dictionary_freezes_and_unfreezes_nothing() -> None:
    options = Options().outputMode(OutputMode.All)
    options.toDict()
    options.checkIsFrozen()
    options._freeze()
    assert options.toDict()["ipu_id"] == 0
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        options.checkIsFrozen()
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        options.Training.gradientAccumulation(2)


def test_the_environment_decides_how_many_ipus(put: Put) -> None:
    put(2, 2, 0, 2, 1, 0)
    with pytest.raises(
        ValueError, match=r"ipus_per_replica=4: expected 2, as the environment says"
    ):
        Options(ipus_per_replica=4)
    assert len(device_of(Options())) == 4


def device_of(options: Options) -> Any:
    return Table.from_environment().device(options.outputMode(OutputMode.All).toDict()["ipu_id"])


def test_without_the_environment_the_argument_does() -> None:
    assert len(device_of(Options(ipus_per_replica=4))) == 4


def test_too_few_ipus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSIM_IPUS", "2")
    with pytest.raises(IpuCountError):
        Options(ipus_per_replica=4).outputMode(OutputMode.All).toDict()


def test_uneven_instances_have_no_number(put: Put) -> None:
    put(3, 2, 0, 1, 0, 0, size=2)
    with pytest.raises(GpusimError, match="needs equally many replicas in all instances"):
        popdist.Options()
