"""Session: compiles and runs an Ir's main graph, with its streams and variables."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ._device import SessionDevice, acquire
from ._host_data import Weights, as_transfers, host_buffer
from .context import FRAGMENTS, ExecutionContext
from .execution import CompiledGraph, Compiler
from .execution.machine import HostBuffer
from .ir import Ir
from .streams import DeviceToHostStream, HostToDeviceStream, Stream
from .tensor import Constant, HostScalarTensor, Tensor, Variable
from .utils import to_numpy

__all__ = ["Session", "d2hStreamBufferMaps", "h2dStreamBufferMaps"]

h2dStreamBufferMaps: TypeAlias = Mapping[HostToDeviceStream, HostScalarTensor]
d2hStreamBufferMaps: TypeAlias = dict[DeviceToHostStream, NDArray[Any]]
DeviceType = Literal["ipu_hw", "ipu_model", "cpu"]


class Session:
    """Runs an Ir: `with session: session.run(inputs)`.

    The constructor compiles the main graph. Entering the `with` block attaches to the device and
    sends the variables there. Leaving it brings them back (if `weights_to_host_on_exit`, unless the
    data of one is a read-only memory-mapped array, and unless an exception passes) and detaches.
    Inside another `with` block of the same session both do nothing.

    **Arguments**

    - `ir`: the Ir to run. Its replication can no longer be changed.
    - `device_desc`: "cpu" for a single IPU; "ipu_model" for any number of IPUs; or "ipu_hw" to
      attach to simulated IPUs, whose number is rounded up to a power of two.

    **Raises**

    - ValueError: for another device type, and for "cpu" with several IPUs.
    - RuntimeError: for an Ir without ops, and if there are not enough IPUs.
    - popart_exception: if the graphs change a tensor that something else uses, without an order.

    >>> import gpusim.popxl as popxl
    >>> ir = popxl.Ir(replication=2)
    >>> with ir.main_graph:
    ...     x = popxl.h2d_stream((2,), popxl.float32, "x")
    ...     y = popxl.d2h_stream((2,), popxl.float32, "y")
    ...     popxl.ops.host_store(y, popxl.ops.host_load(x) + 1.0)
    >>> with popxl.Session(ir, "ipu_model") as session:
    ...     outputs = session.run({x: np.array([[1.0, 2.0], [3.0, 4.0]])})
    >>> outputs[y]
    array([[2., 3.],
           [4., 5.]], dtype=float32)
    """

    def __init__(
        self, ir: Ir, device_desc: DeviceType = "cpu", weights_to_host_on_exit: bool = True
    ) -> None:
        if not any(graph._ops for graph in ir._graphs.values()):
            raise RuntimeError(
                f"The Ir {ir.id} has no graphs. The graphs may have all been optimised to nothing, "
                "try adding more operations to your graphs."
            )
        self._ir = ir
        self._device: SessionDevice = acquire(ir, device_desc)
        self._machine = self._device.machine()
        self._weights = Weights(ir, self._machine)
        if weights_to_host_on_exit and self._weights.read_only:
            weights_to_host_on_exit = False
            logging.getLogger(__name__).info(
                "weights_to_host_on_exit is off: the data of %s is a read-only memmap",
                self._weights.read_only[0],
            )
        self._weights_to_host_on_exit = weights_to_host_on_exit
        compiler = Compiler(self._machine)
        self._program = compiler.program(ir.main_graph)
        self._fragments = {mode: compiler.program(ir.main_graph, mode) for mode in FRAGMENTS}
        self._depth: list[bool] = []  # for each `with` around: whether it has attached
        ir._prepared = True

    # Running

    def run(
        self, inputs: h2dStreamBufferMaps | None = None, downcast_inputs: bool = True
    ) -> d2hStreamBufferMaps:
        """Run the main graph once.

        **Arguments**

        - `inputs`: for every stream that the Ir loads from, the tensors of `num_host_transfers`
          loads: (num_host_transfers, replicas of this instance, *shape), without those of the first
          two axes whose size is 1.
        - `downcast_inputs`: whether 64-bit numbers may become 32-bit ones.

        **Returns** the same for every stream that the Ir stores to, in new arrays.

        **Raises**: ValueError: if the session is not attached, or for other streams or shapes.
        """
        outputs = self.create_host_outputs()
        self.run_with_outputs(inputs, outputs, downcast_inputs)
        return outputs

    def run_with_outputs(
        self,
        inputs: h2dStreamBufferMaps | None = None,
        outputs: Mapping[DeviceToHostStream, NDArray[Any]] | None = None,
        downcast_inputs: bool = True,
    ) -> None:
        """As `run`, into the caller's arrays (see `create_host_outputs`)."""
        self._need_device()
        given_inputs, given_outputs = dict(inputs or {}), dict(outputs or {})
        self._check_streams("HostToDeviceStream", self._ir.get_all_h2d_streams(), given_inputs)
        self._check_streams("DeviceToHostStream", self._ir.get_all_d2h_streams(), given_outputs)
        machine = self._machine
        machine.inputs = {
            stream.tensor_id: HostBuffer(
                as_transfers(
                    to_numpy(data, _dtype_for(stream, data), downcast_inputs, copy=False),
                    stream, self._ir,
                )
            )
            for stream, data in given_inputs.items()
        }  # fmt: skip
        machine.outputs = {
            stream.tensor_id: HostBuffer(as_transfers(data, stream, self._ir))
            for stream, data in given_outputs.items()
        }
        try:
            self._execute(self._program)
        finally:
            machine.inputs, machine.outputs = {}, {}
        self._weights.run_done()

    def create_host_outputs(self) -> d2hStreamBufferMaps:
        """Arrays of zeros for `run_with_outputs`, for every stream that the Ir stores to."""
        return {stream: host_buffer(stream, self._ir) for stream in self._ordered_outputs()}

    def expected_inputs(self) -> list[HostToDeviceStream]:
        """The streams that `run` needs inputs for."""
        return sorted(self._ir.get_all_h2d_streams(), key=lambda stream: stream.tensor_id)

    def _ordered_outputs(self) -> list[DeviceToHostStream]:
        return sorted(self._ir.get_all_d2h_streams(), key=lambda stream: stream.tensor_id)

    def _check_streams(
        self, kind: str, expected: Iterable[Stream], provided: Iterable[Stream]
    ) -> None:
        unexpected, missing = set(provided) - set(expected), set(expected) - set(provided)
        if unexpected or missing:
            names = [sorted(stream.tensor_id for stream in some) for some in (unexpected, missing)]
            raise ValueError(
                f"Unexpected/Missing {kind}.\n  Unexpected: {names[0]}\n  Missing: {names[1]}"
            )

    # Variables

    def weights_to_host(self) -> None:
        """Bring all variables from the device to the host, and memory-mapped ones to their files.

        **Raises**

        - ValueError: if the session is not attached.
        - Exception: if the data of a variable is a read-only memory-mapped array.
        """
        self._need_device()
        self._to_host()

    def _to_host(self) -> None:
        self._execute(self._fragments[ExecutionContext.WeightsToHostFragment])
        with self._device.instances.exchanging():
            self._weights.to_host()

    def _from_host(self) -> None:
        self._weights.from_host()
        self._execute(self._fragments[ExecutionContext.WeightsFromHostFragment])

    def _execute(self, program: CompiledGraph) -> None:
        if program.steps:
            with (
                self._device.instances.exchanging(),
                np.errstate(all="ignore"),
            ):  # as an IPU: no warnings
                program.run([])

    def weights_from_host(self) -> None:
        """Send all variables from the host to the device; ValueError if not attached."""
        self._need_device()
        self._from_host()

    def get_tensor_data(self, tensor: Variable | Constant) -> NDArray[Any]:
        """The values of a variable or constant.

        If the session is attached and has run since, variables come from the device.

        **Returns** a variable's `shape_on_host`, or (replicas, *shape) if its retrieval mode is
        "all_replicas"; a constant's shape.

        **Raises**: TypeError: for other tensors.
        """
        return self.get_tensors_data([tensor])[tensor]

    def get_tensors_data(
        self, tensors: Iterable[Variable | Constant]
    ) -> dict[Constant | Variable, NDArray[Any]]:
        """The values of several variables and constants, as `get_tensor_data`."""
        requested = list(tensors)
        for tensor in requested:
            if not isinstance(tensor, (Variable, Constant)):
                raise TypeError(
                    f"{tensor} is not of type Constant or Variable. get_tensor_data is not"
                    "supported for this type."
                )
        if self.is_attached and self._weights.stale:
            self._to_host()
        return {
            tensor: tensor._data if isinstance(tensor, Constant) else self._weights.on_host(tensor)
            for tensor in requested
        }

    def write_variable_data(self, tensor: Variable, data: NDArray[Any]) -> None:
        """Set the values of a variable, on the host and, if the session is attached, on the device.

        **Arguments**: `data`: an array of its `shape_on_host` and dtype (64 bits are cast to 32).

        **Raises**

        - TypeError: if `tensor` is not a Variable, or for another dtype.
        - ValueError: for another shape.
        - NotImplementedError: for "all_replicas" variables whose groups are larger than 1.
        """
        self.write_variables_data({tensor: data})

    def write_variables_data(self, tensors: Mapping[Variable, NDArray[Any]]) -> None:
        """Set the values of several variables, all or none, as `write_variable_data`."""
        checked = {tensor: self._check(tensor, data) for tensor, data in tensors.items()}
        for tensor, data in checked.items():
            self._weights.set(tensor, data)
            if self.is_attached:
                self._weights.send(tensor)

    def _check(self, tensor: Any, data: Any) -> NDArray[Any]:
        if not isinstance(tensor, Variable):
            name = tensor.id if isinstance(tensor, Tensor) else repr(tensor)
            raise TypeError(
                f"Tensor {name} is not of type Variable. write_variable_data is not supported "
                "for this type."
            )
        return self._weights.check(tensor, data)

    # The device

    @property
    def ir(self) -> Ir:
        """The Ir that it runs."""
        return self._ir

    @property
    def is_attached(self) -> bool:
        """Whether the session holds its device."""
        return self._device.attached

    def _need_device(self) -> None:
        if not self.is_attached:
            raise ValueError(
                "Must be attached to device before calling a runtime function. Put the call inside "
                "a `Session` context, for example `with session: session.run()`."
            )

    def __enter__(self) -> Session:
        attaches = not self.is_attached
        if attaches:
            self._device.attach()
            self._from_host()
        self._depth.append(attaches)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._depth.pop():
            return
        try:
            if kind is None and self._weights_to_host_on_exit and self._weights.stale:
                self._to_host()
        finally:
            self._device.detach()


def _dtype_for(stream: Stream, data: Any) -> Any:
    """The stream's dtype for plain numbers; None if it cannot hold them, which is a mismatch."""
    if hasattr(data, "dtype"):
        return None
    numbers = np.asarray(data)
    held = stream.dtype.is_floating_point or np.array_equal(
        numbers.astype(stream.dtype.as_numpy()), numbers
    )
    return stream.dtype if held else None
