"""The rest of gpusim.poptorch: enumerations, errors, logging, hardware, and what is not there."""

from __future__ import annotations

import copy
import enum
import io
import logging
import os
import pickle
import re
import sys
from collections.abc import Iterator

import pytest

from gpusim import poptorch
from gpusim.poptorch import Error, Options, _logging, enums, hardware
from gpusim.poptorch.poptorch_core import ErrorCategory, createPoptorchError

MEMBERS = {
    "MeanReductionStrategy": {"Running": 0, "Post": 1, "PostAndLoss": 2},
    "DataLoaderMode": {"Sync": 0, "Async": 1, "AsyncRebatched": 2},
    "SharingStrategy": {"SharedMemory": 0, "FileSystem": 1, "Fork": 2, "ForkServer": 3},
    "OutputMode": {"Final": 0, "EveryN": 1, "All": 2, "Sum": 3, "Default": 4},
    "ConnectionType": {"Always": 0, "OnDemand": 1, "Never": 2},
    "HalfFloatCastingBehavior": {"FloatDowncastToHalf": 0, "HalfUpcastToFloat": 1, "Default": 2},
    "ReductionType": {"Sum": 0, "Mean": 1, "NoReduction": 2},
    "SyncPattern": {"Full": 0, "SinglePipeline": 1, "ReplicaAndLadder": 2},
    "MatMulSerializationMode": {
        "InputChannels": "input_channels",
        "ReducingDim": "reducing_dim",
        "OutputChannels": "output_channels",
        "Disabled": "none",
    },
    "Liveness": {
        "AlwaysLive": 0,
        "OffChipAfterFwd": 1,
        "OffChipAfterFwdNoOverlap": 2,
        "OffChipAfterEachPhase": 3,
    },
    "OverlapMode": {
        "NoOverlap": "no_overlap",
        "OverlapAccumulationLoop": "overlap_accumulation_loop",
        "OverlapDeviceIterationLoop": "overlap_device_iteration_loop",
    },
    "AutoStage": {"SameAsIpu": 0, "AutoIncrement": 1},
    "MultiConvPlanType": {"Parallel": 0, "Serial": 1},
    "CommGroupType": {"All": 0, "Consecutive": 1, "Orthogonal": 2, "NoGrouping": 3},
    "VariableRetrievalMode": {"OnePerGroup": 0, "AllReplicas": 2},
}
MODELS = ("POPTORCH_IPU_MODEL", "POPTORCH_SMALL_IPU_MODEL")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variables of PopTorch's, and the logger's level as it was."""
    for name in list(os.environ):
        if name.startswith(("OMPI_", "POPTORCH_")):
            monkeypatch.delenv(name)
    level = _logging.logger.level
    yield
    _logging.logger.setLevel(level)


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("name", MEMBERS)
def test_members_of_an_enumeration(name: str) -> None:
    kind = getattr(poptorch, name)
    assert kind is getattr(enums, name)
    assert {member.name: member.value for member in kind} == MEMBERS[name]
    numbers = all(isinstance(value, int) for value in MEMBERS[name].values())
    assert issubclass(kind, enum.IntEnum) == numbers


def test_there_are_no_other_enumerations() -> None:
    assert set(enums.__all__) == set(MEMBERS)


def test_every_public_name_is_there() -> None:
    for name in poptorch.__all__:
        assert getattr(poptorch, name) is not None


def test_other_names_are_an_ordinary_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'gpusim\.poptorch' has no attribute 'x'"):
        vars(poptorch)["__getattr__"]("x")


# ---------------------------------------------------------------- errors


def test_an_error_has_type_message_and_location() -> None:
    error = createPoptorchError("Device is not attached")
    assert str(error) == "'poptorch_py_error': Device is not attached"
    assert error.type == "poptorch_py_error"
    assert (error.message, error.location) == ("Device is not attached", "")
    assert type(error) is Error is poptorch.poptorch_core.Error


@pytest.mark.parametrize("copied", [copy.copy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_survives_copies(copied: object) -> None:
    assert callable(copied)
    error = copied(createPoptorchError("no"))
    assert (str(error), error.type, error.message) == ("'poptorch_py_error': no", *error_of("no"))


def error_of(message: str) -> tuple[str, str]:
    return "poptorch_py_error", message


def test_kinds_of_errors() -> None:
    for kind, category in (
        (poptorch.Error, ErrorCategory.Other),
        (poptorch.RecoverableError, ErrorCategory.RuntimeRecoverable),
        (poptorch.UnrecoverableError, ErrorCategory.RuntimeUnrecoverable),
    ):
        assert issubclass(kind, poptorch.Error) and not issubclass(kind, RuntimeError)
        assert kind.category is category
    assert poptorch.RecoverableError("x").recovery_action == ""


# ---------------------------------------------------------------- logging


@pytest.mark.parametrize(
    ("level", "python"),
    [
        ("TRACE", logging.DEBUG), ("DEBUG", logging.DEBUG), ("INFO", logging.INFO),
        ("WARN", logging.WARNING), ("ERR", logging.ERROR), ("TRACE_ALL", logging.DEBUG),
        ("DEBUG_IR", logging.DEBUG), (0, logging.DEBUG), (1, logging.DEBUG), (2, logging.INFO),
        (3, logging.WARNING), (4, logging.ERROR),
    ],
)  # fmt: skip
def test_log_levels(level: str | int, python: int) -> None:
    poptorch.setLogLevel(level)
    assert poptorch.logger.level == python


@pytest.mark.parametrize("level", ["OFF", 6])
def test_off_prints_nothing(level: str | int) -> None:
    poptorch.setLogLevel(level)
    assert not poptorch.logger.isEnabledFor(logging.CRITICAL)


@pytest.mark.parametrize(
    ("level", "message"),
    [
        ("LOUD", "Unknown log level: LOUD. Valid values are DEBUG, ERR, INFO, OFF, TRACE and WARN"),
        (5, "Invalid log level integer"),
        (-1, "Invalid log level integer"),
    ],
)
def test_levels_that_are_none(level: str | int, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        poptorch.setLogLevel(level)


def test_popart_has_the_same_levels() -> None:
    _logging.setPopartLogLevel("OFF")
    with pytest.raises(ValueError, match=r"^Level must be one of TRACE, TRACE_ALL, DEBUG, "):
        _logging.setPopartLogLevel("LOUD")


def test_a_level_of_the_environment_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPTORCH_LOG_LEVEL", "LOUD")
    with pytest.raises(ValueError, match="POPTORCH_LOG_LEVEL='LOUD': Unknown log level: LOUD"):
        _logging.set_up()


def test_a_log_line(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = io.StringIO()
    monkeypatch.setattr(sys, "stderr", errors)
    poptorch.setLogLevel("WARN")
    poptorch.logger.warning("%d of %s", 3, "them")
    poptorch.logger.info("not this")
    assert re.fullmatch(
        r"\[\d\d:\d\d:\d\d\.\d{3}\] \[poptorch::python\] \[warning\] 3 of them\n", errors.getvalue()
    )


def test_a_coloured_log_line() -> None:
    record = logging.LogRecord("poptorch::python", logging.ERROR, "f", 1, "no", None, None)
    line = _logging.Formatter(coloured=True).format(record)
    assert line.startswith("\033[1;31m[") and line.endswith("[error] no\033[0m")
    assert record.levelname == "ERROR"  # other handlers see it too


def test_there_is_one_console() -> None:
    _logging.set_up()
    consoles = [h for h in poptorch.logger.handlers if isinstance(h, _logging.Console)]
    assert len(consoles) == 1


# ---------------------------------------------------------------- hardware


@pytest.mark.parametrize(
    ("ipus", "asked", "there"),
    [("4", 1, True), ("4", 4, True), ("4", 8, False), ("4", 3, False), ("1", 2, False),
     ("64", 64, True), ("4", 0, False), ("4", -1, False)],
)  # fmt: skip
def test_hardware_is_there_if_simulated_ipus_are(
    monkeypatch: pytest.MonkeyPatch, ipus: str, asked: int, there: bool
) -> None:
    monkeypatch.setenv("GPUSIM_IPUS", ipus)
    assert poptorch.ipuHardwareIsAvailable(asked) is there
    assert poptorch.ipuHardwareVersion() == 21


@pytest.mark.parametrize("variable", MODELS)
def test_the_ipu_model_is_no_hardware(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    assert not poptorch.ipuHardwareIsAvailable()
    with pytest.raises(AssertionError, match=r"^No IPU hardware available on this system"):
        poptorch.ipuHardwareVersion()
    monkeypatch.setenv(variable, "0")
    assert poptorch.ipuHardwareIsAvailable()


def test_options_count_more_than_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not hardware.usesIpuModel(Options())
    assert hardware.usesIpuModel(Options().useIpuModel(True))
    monkeypatch.setenv("POPTORCH_IPU_MODEL", "1")
    assert hardware.usesIpuModel(Options())
    assert not hardware.usesIpuModel(Options().useIpuModel(False))


def test_where_the_model_was_asked_for_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "poptorch::python")
    hardware.usesIpuModel(Options().useIpuModel(False))
    monkeypatch.setenv("POPTORCH_IPU_MODEL", "1")
    hardware.usesIpuModel(Options())
    assert caplog.messages == [
        "From the user configuration: Ipu model: Disabled",
        "From POPTORCH_IPU_MODEL environment variable: Ipu model: Enabled",
    ]


def test_a_variable_that_makes_no_sense_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPTORCH_IPU_MODEL", "yes")
    with pytest.raises(ValueError, match=r"^POPTORCH_IPU_MODEL='yes': expected 0 or 1$"):
        poptorch.ipuHardwareIsAvailable()


def test_kinds_of_errors_of_the_backend() -> None:
    assert [kind.name for kind in poptorch.poptorch_core.TestErrorType] == [
        *("Poptorch", "Popart", "PopartInternal", "Poplibs", "PoplarUnrecoverable"),
        *("PoplarUnknown", "PoplarRecoverableFullReset", "PoplarLinkError"),
    ]
