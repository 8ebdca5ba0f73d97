"""The popart stand-in, the names popxl and popart themselves, and popxl's bench."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import gpusim.popart as popart
import gpusim.popxl as popxl
from bench.popxl import overheads, scaling
from gpusim.popart._internal import ir as _ir
from gpusim.popxl import ops
from tests.oracles.machine_time import PATIENCE

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
import popart, popxl
import popart._internal.ir as _ir
import popxl.ops as ops
from popxl.ops.call import CallSiteInfo
from popxl.tensor import Variable
assert popxl.__name__ == "gpusim.popxl" and isinstance(_ir.op.AddOp, type)
heavy = [name for name in ("cupy", "torch", "mpi4py", "sklearn") if name in sys.modules]
assert not heavy, heavy
ir = popxl.Ir()
with ir.main_graph:
    y = popxl.d2h_stream((), popxl.float32)
    ops.host_store(y, popxl.variable(1.0) + 2.0)
with popxl.Session(ir, "ipu_model") as session:
    print(session.run()[y])
"""


@pytest.mark.parametrize("way", [["-m", "gpusim", "run"], ["-c", "import gpusim.aliases"]])
def test_programs_import_popxl_and_popart_by_their_names(way: list[str], tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    if way[0] == "-c":
        way, script = ["-c", f"{way[1]}\n{PROGRAM}"], Path()
    done = subprocess.run(
        [sys.executable, *way, str(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stdout) == (0, "3.0\n"), done.stderr


def test_every_public_name_is_there() -> None:
    for module in (popxl, popxl.ops, popxl.ops.collectives, popxl.ops.var_updates, popart):
        assert len(set(module.__all__)) == len(module.__all__)
        for name in module.__all__:
            assert hasattr(module, name), (module, name)


def test_what_popart_has_beyond_is_said_to_be_missing() -> None:
    with pytest.raises(AttributeError, match=r"gpusim has no popart\.Builder: of PopART it has"):
        popart.Builder  # noqa: B018 asking is what raises
    with pytest.raises(AttributeError, match="has no attribute 'Add'"):
        _ir.op.Add  # noqa: B018


@pytest.mark.parametrize("kind", [popart.InferenceSession, popart.TrainingSession])
@pytest.mark.parametrize("replicas", [1, 2])
def test_poparts_sessions_run_a_popxl_program(replicas: int, kind: type) -> None:
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph:
        x, y = popxl.h2d_stream((2,), popxl.float32, "x"), popxl.d2h_stream((2,), popxl.float32)
        v = popxl.variable([10.0, 20.0])

        def step(v: popxl.TensorByRef) -> None:
            ops.var_updates.accumulate_(v, popxl.constant([1.0, 1.0]))
            ops.host_store(y, ops.host_load(x) + 0.0)

        ops.repeat(ir.create_graph(step, v), 3, v)
    pb = ir._pb_ir
    anchor = popart.AnchorReturnType("All")
    pb.setDataFlow(popart.DataFlow(batchesPerStep=3, anchorTensors={y.tensor_id: anchor}))
    pb.logIr()
    pb.updateVertices()
    pb.setIsPrepared()
    device = popart.DeviceManager().createIpuModelDevice({"numIPUs": replicas})
    session = kind.fromIr(ir=pb, deviceInfo=device)
    session.prepareDevice()
    anchors = session.initAnchorArrays()
    lead = (3, 2) if replicas > 1 else (3,)
    data = np.arange(6 * replicas, dtype=np.float32).reshape(*lead, 2)
    session.weightsFromHost()
    session.run(popart.PyStepIO({x.tensor_id: data}, anchors))
    np.testing.assert_array_equal(anchors[y.tensor_id], data)
    session.weightsToHost()
    assert popxl.Session(ir, "ipu_model").get_tensor_data(v).tolist() == [13, 23]
    with pytest.raises(ValueError, match="Unexpected/Missing HostToDeviceStream"):
        session.run(popart.PyStepIO({}, anchors))
    with pytest.raises(NotImplementedError, match="ONNX"):
        kind("model.onnx")
    with pytest.raises(NotImplementedError, match=r"AnchorReturnType\('Sum'\)"):
        popart.AnchorReturnType("Sum")


def test_session_options_are_the_irs() -> None:
    ir = popxl.Ir()
    options = ir._pb_ir.getSessionOptions()
    assert isinstance(options, popart.SessionOptions) and not options.oneByOne
    options.enableStochasticRounding = True  # what nothing here acts on can be set all the same
    assert ir.getSessionOptions().enableStochasticRounding
    options.engineOptions["opt.useAutoloader"] = "true"
    assert ir.getSessionOptions().engineOptions and not popxl.Ir().getSessionOptions().engineOptions
    options.arrays = "paper"
    with ir.main_graph:
        ops.host_store(popxl.d2h_stream((), popxl.float32), popxl.constant(1.0))
    with pytest.raises(ValueError, match="arrays='paper': expected 'numpy' or 'cupy'"):
        popxl.Session(ir)


def test_names_that_programs_import() -> None:
    from gpusim.popxl import dtypes, random_seed, utils

    assert popart.CommGroupType.Ungrouped is popart.CommGroupType.NoGrouping
    assert popart.DataType.FLOAT8_143 != popart.DataType.FLOAT8_152
    assert popart.VirtualGraphMode.Off < popart.VirtualGraphMode.Auto
    for float8, numpy_dtype in (
        (popxl.float8_143, dtypes.np_dtype_float8_143),
        (popxl.float8_152, dtypes.np_dtype_float8_152),
    ):
        assert float8.as_numpy() == numpy_dtype
        assert utils.host_pow2scale_cast_to_fp8([1.0], float8).dtype == numpy_dtype
    assert utils.downcast_np_dtypes[np.dtype(np.int64)] == np.int32
    assert random_seed.MAX_UINT64 == np.iinfo(np.uint64).max
    assert issubclass(popart.poplar_application_runtime_error, popart.poplar_exception)
    assert dtypes._NP_TO_POPXL[np.dtype(np.float16)] is popxl.float16
    assert dtypes._PT_TO_POPXL[torch.float16] is popxl.float16
    assert set(dtypes._PT_TO_POPXL) >= {torch.bool, torch.int32, torch.float32}
    ir = popxl.Ir()

    def scaled(x: popxl.TensorByRef, y: popxl.Tensor) -> None:
        ops.var_updates.accumulate_(x, y)

    spec = popxl.TensorSpec((2,), popxl.float32)
    graph = ir.create_graph(scaled, spec, spec)
    assert graph._by_ref_inputs == {graph.inputs[0]} and ir.main_graph._by_ref_inputs == set()
    ir._pb_ir.logIr()


def test_a_device_by_a_name() -> None:
    from gpusim.popxl.utils import _to_device_info

    assert (_to_device_info("cpu").numIpus, _to_device_info("ipu_model", 4).numIpus) == (1, 4)
    hardware = _to_device_info("ipu_hw", 2)
    assert hardware.numIpus == 2 and not hardware.isAttached
    with pytest.raises(ValueError, match=r"multiple devices \(provided: 2\) are not supported"):
        _to_device_info("cpu", 2)
    with pytest.raises(ValueError, match="Incorrect device type provided: gpu, must be one of"):
        _to_device_info("gpu")
    with pytest.raises(RuntimeError, match="Failed to acquire device with 3 IPUs"):
        _to_device_info("ipu_hw", 3)


@pytest.mark.parametrize("throw", [True, False])
@pytest.mark.parametrize("scale", [-33, -32, 0, 31, 32])
def test_scales_of_8_bit_floats_are_in_range(scale: int, throw: bool) -> None:
    ir = popxl.Ir(replication=2)
    options = ir._pb_ir.getSessionOptions()
    assert options.throwIfLog2ScaleTensorNotInRange
    options.throwIfLog2ScaleTensorNotInRange = throw
    with ir.main_graph:
        scales = popxl.h2d_stream((), popxl.int32)
        x = popxl.constant([[1.0]], popxl.float8_143)
        y = ops.matmul_pow2scaled(x, x, ops.host_load(scales))
        ops.host_store(popxl.d2h_stream((1, 1), popxl.float16), y)
    with popxl.Session(ir, "ipu_model") as session:
        given = {scales: np.array([0, scale], np.int32)}
        if throw and not -32 <= scale <= 31:
            error = popart.poplar_application_runtime_error
            with pytest.raises(error, match=rf"log2_scale must be -32 to 31, got \[0, {scale}\]"):
                session.run(given)
        else:
            session.run(given)


def test_devices_that_are_not_listed_are_always_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSIM_IPUS", "2")
    manager = popart.DeviceManager()
    cpu, model = manager.createCpuDevice(), manager.createIpuModelDevice({"numIPUs": 64})
    assert (cpu.numIpus, model.numIpus, model.isAttached) == (1, 64, False)
    assert model.attach() and model.isAttached
    model.detach()
    assert not model.isAttached
    found = manager.acquireAvailableDevice(
        1,
        0,
        popart.SyncPattern.Full,
        popart.DeviceConnectionType.OnDemand,
        popart.DeviceSelectionCriterion.Random,
    )
    assert found is not None and found.numIpus == 1 and not found.isAttached
    criterion = popart.DeviceSelectionCriterion.Random
    free = [manager.tryAcquireAvailableDevice(selectionCriterion=criterion) for _ in range(3)]
    assert [each is None for each in free] == [False, False, True]
    for each in free[:2]:
        assert each is not None
        each.detach()


def test_devices_are_the_simulated_ipus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUSIM_IPUS", "2")
    manager = popart.DeviceManager()
    pair = manager.acquireAvailableDevice(2)
    assert pair is not None and pair.isAttached and (pair.id, pair.numIpus) == (2, 2)
    assert manager.acquireAvailableDevice(1) is None and manager.acquireDeviceById(0) is None
    pair.detach()
    on_demand = manager.acquireAvailableDevice(
        1, connectionType=popart.DeviceConnectionType.OnDemand
    )
    assert on_demand is not None and not on_demand.isAttached
    assert [device.id for device in manager.enumerateDevices(numIpus=1)] == [0, 1]
    assert manager.acquireAvailableDevice(4) is None


@pytest.mark.parametrize(
    ("kind", "size", "groups"),
    [
        (popart.CommGroupType.All, 0, [[0, 1, 2, 3]]),
        (popart.CommGroupType.Consecutive, 2, [[0, 1], [2, 3]]),
        (popart.CommGroupType.Orthogonal, 2, [[0, 2], [1, 3]]),
    ],
)
def test_variable_settings_group_replicas(
    kind: popart.CommGroupType, size: int, groups: list[list[int]]
) -> None:
    group = popart.CommGroup(kind, size)
    settings = popart.VariableSettings(group)
    assert settings.groups(4) == groups and settings.getSharedVariableDomain() == group
    assert settings.numReplicasReturningVariable(4) == len(groups) == settings.getGroupCount(4)
    assert settings.getGroupSize(4) == 4 // len(groups)
    every = popart.VariableSettings(group, popart.VariableRetrievalMode.AllReplicas)
    assert every.shapeOnHost((5,), 4) == (4, 5)


def test_the_bench_measures() -> None:
    found = overheads(seconds=0.01)
    assert len(found) == 6 and all(each.session > 0 and each.library > 0 for each in found)
    assert scaling(seconds=0.01, elements=64, replicas=4).ratio > 0
