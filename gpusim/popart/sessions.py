"""PopART's sessions on a PopXL Ir: they run it as `popxl.Session` does, with streams by id."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from gpusim.popdist.popart import DeviceInfo
from gpusim.popxl.ir import Ir
from gpusim.popxl.session import Session

__all__ = ["AnchorReturnType", "DataFlow", "InferenceSession", "PyStepIO", "TrainingSession"]

Arrays = Mapping[str, NDArray[Any]]


class AnchorReturnType:
    """Which of a step's tensors return to the host.

    **Arguments**: `name`: "All"; a PopXL program stores what it returns itself.

    **Raises**: NotImplementedError: for "Final", "EveryN" and "Sum".
    """

    def __init__(self, name: str, returnPeriod: int = 1) -> None:
        if name.upper() != "ALL":
            raise NotImplementedError(
                f"AnchorReturnType({name!r}): on a PopXL Ir a session returns all that the program "
                "stores, 'All'"
            )
        self.name = name

    def __repr__(self) -> str:
        return f"AnchorReturnType({self.name!r})"


class DataFlow:
    """The number of batches of a step, and the streams whose tensors return.

    **Arguments**

    - `batchesPerStep`: the Ir's `num_host_transfers`.
    - `anchorTensors`: the ids of streams, a list or a dict with their AnchorReturnType.
    """

    def __init__(self, batchesPerStep: int = 1, anchorTensors: Any = ()) -> None:
        self._batches, self._anchors = batchesPerStep, list(anchorTensors)

    def batchesPerStep(self) -> int:
        """The number of batches of a step."""
        return self._batches

    def anchors(self) -> list[str]:
        """The ids of the streams."""
        return list(self._anchors)


class PyStepIO:
    """A step's arrays by the ids of their streams."""

    def __init__(self, inputs: Arrays, outputs: Arrays) -> None:
        self.inputs, self.outputs = dict(inputs), dict(outputs)


class InferenceSession:
    """A session of an Ir; see `fromIr`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError(
            "gpusim has no sessions of ONNX models: use fromIr, with the Ir of a PopXL program"
        )

    @classmethod
    def fromIr(cls, ir: Ir, deviceInfo: DeviceInfo | None = None, name: str = "") -> Any:
        """A session of the Ir of a PopXL program.

        **Arguments**: `deviceInfo`: the device, whose owner has attached to it or not: the session
        itself needs none.

        >>> import gpusim.popxl as popxl
        >>> ir = popxl.Ir()
        >>> with ir.main_graph:
        ...     popxl.ops.host_store(popxl.d2h_stream((), popxl.float32, "y"), popxl.constant(2.0))
        >>> session = InferenceSession.fromIr(ir._pb_ir)
        >>> session.prepareDevice()
        >>> anchors = session.initAnchorArrays()
        >>> session.run(PyStepIO({}, anchors))
        >>> anchors
        {'y': array(2., dtype=float32)}
        """
        new = object.__new__(cls)
        new._session = Session(ir, "ipu_model", weights_to_host_on_exit=False)
        return new

    _session: Session

    def prepareDevice(self, loadEngine: bool = True) -> None:
        """Send the variables to the device."""
        if not self._session.is_attached:
            self._session.__enter__()

    def initAnchorArrays(self) -> dict[str, NDArray[Any]]:
        """Arrays for what a step returns, by the ids of the streams."""
        made = self._session.create_host_outputs()
        return {stream.tensor_id: array for stream, array in made.items()}

    def weightsFromHost(self) -> None:
        """Send all variables to the device."""
        self._session.weights_from_host()

    def weightsToHost(self) -> None:
        """Bring all variables from the device."""
        self._session.weights_to_host()

    def run(self, stepio: PyStepIO, debugName: str = "") -> None:
        """Run a step. The errors are those of `popxl.Session.run`."""
        ir, given, wanted = self._session.ir, stepio.inputs, stepio.outputs
        self._session.run_with_outputs(
            {s: given[s.tensor_id] for s in ir.get_all_h2d_streams() if s.tensor_id in given},
            {s: wanted[s.tensor_id] for s in ir.get_all_d2h_streams() if s.tensor_id in wanted},
        )


class TrainingSession(InferenceSession):
    """As `InferenceSession`: the program itself says what it trains."""
