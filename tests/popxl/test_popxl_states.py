"""Random sequences of what a program does with sessions, beside a plain model in NumPy.

An Ir has variables of all kinds: in memory, in remote buffers, in shards, in both, and in files;
with a value for each group of replicas. Several sessions of it are made, entered, left, run, read
and written in random order. A run adds a number to every variable, another one on each replica.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

import gpusim.popxl as popxl
from gpusim.popxl import ops
from tests.oracles.budget import budget

ASSIGNMENTS = {
    1: [[0]],
    2: [[0, 0], [0, 1]],
    4: [[0, 0, 0, 0], [0, 0, 1, 1], [0, 1, 0, 1], [0, 1, 1, 0], [0, 1, 2, 3]],
}
KINDS = ["plain", "file", "remote", "sharded", "remote sharded"]
SHAPES = [(), (3,), (2, 3), (5, 1), (4,)]


def draw_variable(data: st.DataObject, replicas: int) -> dict[str, Any]:
    """What a variable is to be."""
    kind = data.draw(st.sampled_from(KINDS if replicas > 1 else KINDS[:3]), "kind")
    assignment = data.draw(st.sampled_from(ASSIGNMENTS[replicas]), "assignment")
    size = assignment.count(0)
    divisors = [count for count in (1, 2, 4) if size % count == 0]
    return {
        "kind": kind,
        "assignment": assignment,
        "shape": data.draw(st.sampled_from(SHAPES), "shape"),
        "mode": data.draw(st.sampled_from(["one_per_group", "all_replicas"]), "mode"),
        "shards": data.draw(st.sampled_from(divisors), "shards") if "sharded" in kind else 0,
    }


class Model:
    """A variable in NumPy: its values on the host, for each replica, and how devices hold them."""

    def __init__(self, about: dict[str, Any], host: np.ndarray) -> None:
        self.shape, self.mode, self.shards = about["shape"], about["mode"], about["shards"]
        self.assignment = about["assignment"]
        self.replicas, self.groups = len(self.assignment), max(self.assignment) + 1
        self.members = [
            [r for r, group in enumerate(self.assignment) if group == g] for g in range(self.groups)
        ]
        self.set(host)

    def set(self, host: np.ndarray) -> None:
        """A value for each group."""
        rows = host.reshape(self.groups, *self.shape)
        self.values = [rows[group].copy() for group in self.assignment]

    @property
    def writable(self) -> bool:
        return self.mode == "one_per_group" or self.groups == self.replicas

    def domain(self, replica: int) -> list[int]:
        """The replicas that hold the shards of a replica's value."""
        members = self.members[self.assignment[replica]]
        first = members.index(replica) // self.shards * self.shards
        return members[first : first + self.shards]

    def to_device(self) -> list[np.ndarray]:
        """Each replica's value, or its shard."""
        if not self.shards:
            return [value.copy() for value in self.values]
        count = -(-int(np.prod(self.shape)) // self.shards)
        parts = []
        for replica, value in enumerate(self.values):
            padded = np.zeros(count * self.shards, np.float32)
            padded[: value.size] = value.ravel()
            place = self.domain(replica).index(replica)
            parts.append(padded[place * count : (place + 1) * count])
        return parts

    def from_device(self, parts: list[np.ndarray]) -> None:
        """A value for each group, that of its first replica, or for each replica."""
        whole = list(parts)
        if self.shards:
            size = int(np.prod(self.shape))
            whole = [
                np.concatenate([parts[other] for other in self.domain(replica)])[:size]
                for replica in range(self.replicas)
            ]
        for replica in range(self.replicas):
            every = self.mode == "all_replicas"
            source = replica if every else self.members[self.assignment[replica]][0]
            self.values[replica] = whole[source].reshape(self.shape).copy()

    def read(self) -> np.ndarray:
        """What get_tensor_data gives."""
        if self.mode == "all_replicas":
            return np.stack(self.values)
        rows = np.stack([self.values[members[0]] for members in self.members])
        return rows if self.groups > 1 else rows[0]


class Device:
    """A session beside its model: the values on the device, and whether the host's are older."""

    def __init__(self, session: popxl.Session, retrieves: bool, scratch: int) -> None:
        self.session, self.retrieves = session, retrieves
        self.depth = 0
        self.stale = False
        self.values: list[list[np.ndarray]] = []
        self.scratch = np.zeros(scratch, np.float32)


class Sessions(RuleBasedStateMachine):
    """The rules: each does the same to the sessions and to the models."""

    @initialize(data=st.data(), replicas=st.sampled_from([1, 2, 4]))
    def build(self, data: st.DataObject, replicas: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.replicas, self.numbers = replicas, np.random.default_rng(0)
        self.ir = ir = popxl.Ir(replication=replicas)
        self.variables: list[popxl.Variable] = []
        self.models: list[Model] = []
        self.outputs: list[popxl.DeviceToHostStream] = []
        self.devices: list[Device] = []
        with ir.main_graph, popxl.in_sequence():
            self.x = popxl.h2d_stream((), popxl.float32, "x")
            x = ops.host_load(self.x)
            for number in range(data.draw(st.integers(1, 3), "variables")):
                self.add_variable(draw_variable(data, replicas), number, x)
            spare = popxl.remote_buffer((), popxl.float32, 2)
            ops.remote_store(spare, 1, ops.remote_load(spare, 1) + x)
            self.spare = self.store(ops.remote_load(spare, 1))

    def add_variable(self, about: dict[str, Any], number: int, x: popxl.Tensor) -> None:
        ir, kind, shape = self.ir, about["kind"], about["shape"]
        grouping = ir.replica_grouping_from_assignments(about["assignment"])
        lead = (grouping.num_groups,) if grouping.num_groups > 1 else ()
        host = self.draw((*lead, *shape))
        self.models.append(Model(about, host))
        common = {"replica_grouping": grouping, "retrieval_mode": about["mode"]}
        shards = about["shards"]
        if kind in ("plain", "file"):
            if kind == "file":
                file = np.memmap(
                    Path(self.folder.name) / str(number), np.float32, "w+", shape=host.shape or (1,)
                )
                file = file.reshape(host.shape)
                file[...] = host
                host = file
            variable = popxl.variable(host, **common)
            value = ops.add_(variable, x)
        elif kind == "sharded":
            variable, shard = popxl.replica_sharded_variable(host, shard_over=shards, **common)
            value = ops.add_(shard, x)
        else:
            if kind == "remote":
                buffer = popxl.remote_buffer(shape, popxl.float32, 2)
                variable = popxl.remote_variable(host, buffer, 1, **common)
            else:
                buffer = popxl.replica_sharded_buffer(
                    host.shape, popxl.float32, grouping, shards, entries=2
                )
                variable = popxl.remote_replica_sharded_variable(host, buffer, 1, **common)
            value = ops.remote_load(buffer, 1) + x
            ops.remote_store(buffer, 1, value)
        self.variables.append(variable)
        self.outputs.append(self.store(value))

    def store(self, tensor: popxl.Tensor) -> popxl.DeviceToHostStream:
        stream = popxl.d2h_stream(tensor.shape, tensor.dtype)
        ops.host_store(stream, tensor)
        return stream

    def draw(self, shape: tuple[int, ...]) -> np.ndarray:
        return self.numbers.integers(-99, 99, shape).astype(np.float32)

    def device(self, data: st.DataObject) -> Device:
        return self.devices[data.draw(st.integers(0, len(self.devices) - 1), "session")]

    def variable(self, data: st.DataObject) -> int:
        return int(data.draw(st.integers(0, len(self.models) - 1), "variable"))

    # ---------------------------------------------------------------- the model of a transfer

    def upload(self, device: Device) -> None:
        device.values = [model.to_device() for model in self.models]
        device.stale = False

    def download(self, device: Device) -> None:
        for model, values in zip(self.models, device.values, strict=True):
            model.from_device(values)
        device.stale = False

    # ---------------------------------------------------------------- sessions

    @precondition(lambda self: len(self.devices) < 3)
    @rule(retrieves=st.booleans())
    def create(self, retrieves: bool) -> None:
        session = popxl.Session(self.ir, "ipu_model", weights_to_host_on_exit=retrieves)
        self.devices.append(Device(session, retrieves, self.replicas))

    @precondition(lambda self: self.devices)
    @rule(data=st.data())
    def enter(self, data: st.DataObject) -> None:
        device = self.device(data)
        assert device.session.__enter__() is device.session and device.session.is_attached
        if not device.depth:
            self.upload(device)
        device.depth += 1

    @precondition(lambda self: any(device.depth for device in self.devices))
    @rule(data=st.data(), fails=st.sampled_from([False, False, True]))
    def leave(self, data: st.DataObject, fails: bool) -> None:
        inside = [device for device in self.devices if device.depth]
        device = data.draw(st.sampled_from(inside), "session")
        error = ValueError() if fails else None
        device.session.__exit__(type(error) if fails else None, error, None)
        device.depth -= 1
        if not device.depth and not fails and device.retrieves and device.stale:
            self.download(device)
        assert device.session.is_attached == bool(device.depth)

    @precondition(lambda self: self.devices)
    @rule(data=st.data(), count=st.integers(1, 2))
    def run(self, data: st.DataObject, count: int) -> None:
        device = self.device(data)
        for _ in range(count):
            numbers = self.draw((self.replicas,))
            given = {self.x: numbers if self.replicas > 1 else numbers[0]}
            if not device.depth:
                with pytest.raises(ValueError, match="Must be attached to device"):
                    device.session.run(given)
                return
            outputs = device.session.run(given)
            device.stale = True
            for values, stream in zip(device.values, self.outputs, strict=True):
                values[:] = [value + number for value, number in zip(values, numbers, strict=True)]
                found = outputs[stream].reshape(self.replicas, *stream.shape)
                self.compare(found, np.stack(values))
            device.scratch = device.scratch + numbers
            self.compare(outputs[self.spare].reshape(self.replicas), device.scratch)

    @precondition(lambda self: self.devices)
    @rule(data=st.data(), back=st.booleans())
    def transfer(self, data: st.DataObject, back: bool) -> None:
        device = self.device(data)
        method = device.session.weights_to_host if back else device.session.weights_from_host
        if not device.depth:
            with pytest.raises(ValueError, match="Must be attached to device"):
                method()
            return
        method()
        (self.download if back else self.upload)(device)

    # ---------------------------------------------------------------- variables

    @precondition(lambda self: self.devices)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        device, number = self.device(data), self.variable(data)
        model, variable = self.models[number], self.variables[number]
        value = self.draw(variable.shape_on_host)
        if not model.writable:
            with pytest.raises(NotImplementedError, match="all_replicas"):
                device.session.write_variable_data(variable, value)
            return
        device.session.write_variable_data(variable, value)
        model.set(value)
        if device.depth:
            device.values[number] = model.to_device()

    @precondition(lambda self: self.devices)
    @rule(data=st.data(), together=st.booleans())
    def read(self, data: st.DataObject, together: bool) -> None:
        device, number = self.device(data), self.variable(data)
        if device.depth and device.stale:
            self.download(device)
        if together:
            found = device.session.get_tensors_data(self.variables)
            for variable, model in zip(self.variables, self.models, strict=True):
                self.compare(found[variable], model.read())
        else:
            found = device.session.get_tensor_data(self.variables[number])
            self.compare(found, self.models[number].read())

    def compare(self, found: np.ndarray, expected: np.ndarray) -> None:
        np.testing.assert_array_equal(found, expected, strict=True)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()


def test_sessions_do_what_the_model_does() -> None:
    run_machine(
        Sessions,
        settings=settings(
            max_examples=budget(2000, most=60),
            stateful_step_count=25,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
