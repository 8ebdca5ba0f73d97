"""Random popxl programs of views, copies, calls and changes in place, against a model of memory.

In the model a tensor is an array of addresses, so that all views are exact by construction.
"""

from __future__ import annotations

import numpy as np
import pytest

import gpusim.popxl as popxl
from gpusim.popxl import ops

STEPS, PROGRAMS = 20, 60


class Memory:
    """Cells, and tensors as arrays of their addresses."""

    def __init__(self) -> None:
        self.cells: list[float] = []

    def new(self, values: np.ndarray) -> np.ndarray:
        first = len(self.cells)
        self.cells += values.ravel().tolist()
        return np.arange(first, len(self.cells)).reshape(values.shape)

    def read(self, addresses: np.ndarray) -> np.ndarray:
        return np.array(self.cells)[addresses]

    def add(self, addresses: np.ndarray, number: float) -> None:
        for address in addresses.ravel():
            self.cells[address] += number


def add_by_ref(x: popxl.TensorByRef, y: popxl.Tensor) -> popxl.Tensor:
    with popxl.in_sequence():
        view = ops.reshape_(ops.transpose_(x), (x.nelms,))
        ops.add_(view, popxl.constant(3.0))
        changed = ops.add_(y, popxl.constant(5.0))
        return ops.identity(changed)


class Program:
    """Draws steps, takes them in popxl, and in the model."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.memory = Memory()
        self.tensors: list[popxl.Tensor] = []
        self.addresses: list[np.ndarray] = []

    def keep(self, tensor: popxl.Tensor, addresses: np.ndarray) -> None:
        assert tensor.shape == addresses.shape
        self.tensors.append(tensor)
        self.addresses.append(addresses)

    def start(self) -> None:
        for shape in ((2, 3), (3, 4), (6,)):
            values = self.rng.integers(0, 9, shape).astype(np.float32)
            made = popxl.variable(values) if shape != (6,) else popxl.constant(values)
            self.keep(made, self.memory.new(values))

    def step(self) -> None:
        place = int(self.rng.integers(len(self.tensors)))
        tensor, addresses = self.tensors[place], self.addresses[place]
        kinds = (self.view, self.view, self.view, self.copy, self.change, self.join, self.call)
        kinds[int(self.rng.integers(len(kinds)))](tensor, addresses)

    def view(self, t: popxl.Tensor, at: np.ndarray) -> None:
        match int(self.rng.integers(3)):
            case 0:
                self.keep(ops.transpose_(t), at.T)
            case 1:
                size = at.size
                shape = (size,) if self.rng.integers(2) or size % 2 else (2, size // 2)
                self.keep(ops.reshape_(t, shape), at.reshape(shape))
            case _:
                if at.shape[0] > 1:
                    self.keep(ops.slice_(t, 1, None, 1, 0), at[1:])
                else:
                    self.keep(ops.slice_(t, None, None, -1, at.ndim - 1), at[..., ::-1])

    def copy(self, t: popxl.Tensor, at: np.ndarray) -> None:
        copied = self.memory.new(self.memory.read(at))
        match int(self.rng.integers(3)):
            case 0:
                self.keep(ops.transpose(t), copied.T)
            case 1:
                self.keep(ops.reshape(t, (t.nelms,)), copied.reshape(-1))
            case _:
                self.keep(ops.identity(t), copied)

    def change(self, t: popxl.Tensor, at: np.ndarray) -> None:
        number = float(self.rng.integers(1, 100))
        changed = ops.add_(t, popxl.constant(number))
        self.memory.add(at, number)
        self.keep(changed, at)

    def join(self, t: popxl.Tensor, at: np.ndarray) -> None:
        for other, addresses in zip(self.tensors, self.addresses, strict=True):
            # A concatenation that has a cell twice has no meaning on an IPU either.
            if other.shape[1:] == t.shape[1:] and not np.intersect1d(at, addresses).size:
                self.keep(ops.concat_([t, other]), np.concatenate([at, addresses]))
                return

    def call(self, t: popxl.Tensor, at: np.ndarray) -> None:
        graph = popxl.gir().create_graph(add_by_ref, t, t)
        (out,) = ops.call(graph, t, t)
        # The value that goes in by value is that from before the call.
        given = self.memory.read(at) + 5
        self.memory.add(at, 3.0)
        self.keep(out, self.memory.new(given))


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_changes_reach_exactly_what_shares_memory(seed: int, one_by_one: bool) -> None:
    program, ir = Program(seed), popxl.Ir(replication=2)
    ir.getSessionOptions().oneByOne = one_by_one
    with ir.main_graph, popxl.in_sequence():
        program.start()
        for _ in range(STEPS):
            program.step()
        streams = [popxl.d2h_stream(t.shape, t.dtype) for t in program.tensors]
        for stream, tensor in zip(streams, program.tensors, strict=True):
            ops.host_store(stream, tensor)
    with popxl.Session(ir, "ipu_model") as session:
        outputs = session.run()
    for stream, addresses in zip(streams, program.addresses, strict=True):
        expected = program.memory.read(addresses)
        np.testing.assert_array_equal(outputs[stream], [expected] * 2)
