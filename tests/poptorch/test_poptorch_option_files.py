"""Options from files, JSON and the environment: what is accepted, and what a file cannot do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpusim import poptorch
from gpusim.poptorch import ConfigFileError, Options, OutputMode, Phase, Stage
from gpusim.poptorch.options import config_file
from tests.oracles.machine_time import PATIENCE

ROOT = Path(__file__).parents[2]
Load = Callable[..., Options]

pytestmark = pytest.mark.usefixtures("single")


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Options that were set by a file with this text."""

    def loaded(text: str, options: Options | None = None) -> Options:
        path = tmp_path / "tmp.conf"
        path.write_text(text, encoding="utf-8")
        return (options or Options()).loadFromFile(str(path))

    return loaded


# ---------------------------------------------------------------- what files may say


def test_a_file_of_calls(load: Load) -> None:
    text = """
deviceIterations(1)
setExecutionStrategy(poptorch.ShardedExecution())
  replicationFactor(2)

enableSyntheticData(True) # inline comments are ignored
# and so are others
"""
    expected = Options().deviceIterations(1).replicationFactor(2).enableSyntheticData(True)
    assert load(text) == expected.setExecutionStrategy(poptorch.ShardedExecution())


def test_a_file_may_name_dtypes_of_pytorch_and_nothing_else_of_it(load: Load) -> None:
    text = "Precision.setPartialsType(torch.half)\nPrecision.setPartialsType(dtype=torch.float)"
    expected = Options()
    expected.Precision.setPartialsType(torch.float32)
    assert load(text) == expected
    assert load(text) != load("Precision.setPartialsType(torch.half)")
    for hostile in ("logDir(torch.load('x'))", "logDir(torch.os.getcwd())", "logDir(torch)"):
        with pytest.raises(ConfigFileError):
            load(hostile)


def test_a_file_that_is_too_large_is_refused_before_it_is_parsed(load: Load) -> None:
    options = Options()
    with pytest.raises(
        ConfigFileError, match=r"tmp\.conf: expected .* at most 1,048,576 characters"
    ):
        load("replicationFactor(2)\n" * 60_000, options)
    assert options.replication_factor == 1


def test_a_later_file_overrides_what_it_names(load: Load) -> None:
    options = load("deviceIterations(2)\nreplicationFactor(2)")
    load("deviceIterations(1)", options)
    assert (options.device_iterations, options.replication_factor) == (1, 2)


@pytest.mark.parametrize(
    ("line", "same"),
    [
        ("Training.gradientAccumulation(4)", lambda o: o.Training.gradientAccumulation(4)),
        (
            "deviceIterations(2).replicationFactor(3)",
            lambda o: o.deviceIterations(2).replicationFactor(3),
        ),
        ("outputMode(poptorch.OutputMode.All)", lambda o: o.outputMode(OutputMode.All)),
        ("outputMode(poptorch.enums.OutputMode.All)", lambda o: o.outputMode(OutputMode.All)),
        (
            "outputMode(output_mode=poptorch.OutputMode(1), output_return_period=2 * 5)",
            lambda o: o.outputMode(OutputMode.EveryN, 10),
        ),
        (
            'anchorTensor("g", "Gradient___w")',
            lambda o: o.anchorTensor("g", "Gradient___w"),
        ),
        (
            "setAvailableMemoryProportion({'IPU0': 1 / 4, 'IPU1': -(-0.5)})",
            lambda o: o.setAvailableMemoryProportion({"IPU0": 0.25, "IPU1": 0.5}),
        ),
        (
            '_Popart.set("hardwareInstrumentations", set([0, 1]))',
            lambda o: o._Popart.set("hardwareInstrumentations", {0, 1}),
        ),
        (
            '_Popart.set("x", (None, {1, 2}, dict(a=not True)))',
            lambda o: o._Popart.set("x", (None, {1, 2}, {"a": False})),
        ),
        (
            "TensorLocations.setWeightLocation("
            "poptorch.TensorLocationSettings().useOnChipStorage(False))",
            lambda o: o.TensorLocations.setWeightLocation(
                poptorch.TensorLocationSettings().useOnChipStorage(False)
            ),
        ),
        (
            "setExecutionStrategy(poptorch.SerialPhasedExecution("
            'poptorch.Phase(poptorch.Stage("a").ipu(1)), ["b"]))',
            lambda o: o.setExecutionStrategy(
                poptorch.SerialPhasedExecution(Phase(Stage("a").ipu(1)), ["b"])
            ),
        ),
        ("device_iterations = 5", lambda o: o.deviceIterations(5)),
        ("Training.gradient_accumulation = 5", lambda o: o.Training.gradientAccumulation(5)),
        (
            "logDir('a'); options.deviceIterations(options.replication_factor + 1)",
            lambda o: o.logDir("a").deviceIterations(2),
        ),
        ('logDir("Größe")', lambda o: o.logDir("Größe")),
    ],
)
def test_a_line_means_what_it_means_in_a_program(
    load: Load, line: str, same: Callable[[Options], Any]
) -> None:
    expected = Options()
    same(expected)
    assert load(line) == expected


@given(
    st.integers(1, 10**9),
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30),
    st.dictionaries(st.text("ab\\'\"{}()#\n;", max_size=5), st.integers() | st.floats(0, 1)),
)
def test_literals_survive_the_file(count: int, text: str, numbers: dict[str, float]) -> None:
    lines = [f"deviceIterations({count})", f"logDir({text!a})", f"_Popart.set('x', {numbers})"]
    options = Options()
    for line in lines:
        for statement in config_file.parse(f"options.{line}", 1, "file"):
            config_file.perform(statement, options)
    expected = Options().deviceIterations(count).logDir(text)
    expected._Popart.set("x", numbers)
    assert options == expected


# ---------------------------------------------------------------- what they may not


def test_a_syntax_error_shows_the_line_and_sets_nothing(load: Load) -> None:
    options = Options()
    text = "deviceIterations(7)\n\n# more\noutputMode(poptorch.OutputMode.All"
    with pytest.raises(poptorch.options.ConfigFileError) as raised:
        load(text, options)
    message = str(raised.value)
    assert message.startswith("SyntaxError at line 4 of tmp.conf: ")
    assert message.endswith("\n> options.outputMode(poptorch.OutputMode.All")
    assert options == Options()


HOSTILE = [
    "__class__",
    "__class__.__init__.__globals__['os'].system('touch hacked')",
    "clone().__class__.__base__.__subclasses__()",
    "logDir(__import__('os').popen('touch hacked').read())",
    "logDir(open('hacked', 'w').name)",
    "logDir(eval('1'))",
    "logDir(exec('1'))",
    "logDir((lambda: 'x')())",
    "logDir([x for x in (1, 2)])",
    "logDir(f'{options}')",
    "logDir('{0.__class__}'.format(options))",
    "logDir(('x' 'y').join(['a']))",
    "logDir(poptorch.load('evil.pt'))",
    "logDir(poptorch.__builtins__)",
    "logDir(poptorch.options.os)",
    "logDir(poptorch.logger.manager)",
    "logDir(poptorch.hardware.os.system('touch hacked'))",
    "logDir(poptorch.OutputMode.__class__)",
    "logDir(poptorch.OutputMode.mro())",
    "logDir(poptorch)",
    "logDir(poptorch.enums)",
    "logDir(getattr(options, '__class__'))",
    "logDir(type(options))",
    "logDir(globals())",
    "logDir(options if 1 else 2)",
    "logDir(log_dir := 'x')",
    "logDir('a' * 10 ** 9)",
    "deviceIterations(9 ** 9 ** 9)",
    "deviceIterations(1 << 10 ** 9)",
    "logDir([0] * 10 ** 9)",
    "logDir(**{'log_dir': 'x'})",
    "logDir(*['x'])",
    "logDir({**{}})",
    "logDir('x') or options.clone()",
    "logDir('x'); import os",
    "logDir('x'); del options",
    "logDir('x'); options = 1",
    "logDir('x'); __import__('os').system('touch hacked')",
    "logDir",
    "Training",
    "_values.clear()",
    "_freeze()",
    "_popart = 1",
    "_Popart.options.clear()",
    "_Popart.options['x'] = 1",
    "_Popart.__init__()",
    "_Popart._is_frozen = True",
    "Training._popart_options.set('x', 1)",
    "Training.__init__()",
    "loadFromFile('tmp.conf')",
    "from_json('{}')",
    "log_dir()",
    "device_iterations += 1",
    "new_option = 1",
    "toDict",
    "_Popart.set('x', options)",
    "_Popart.set('x', [options._Popart])",
    "_Popart.set('x', options.clone())",
    "_Popart.set('x', options.clone)",
    "_Popart.set('x', poptorch.OutputMode)",
    "logDir('x') if True else 0",
    "deviceIterations(1j * 2)",
    "\0",
    "logDir(" + "-" * 5000 + "1)",
    "logDir(" + "(" * 5000 + "1" + ")" * 5000 + ")",
    "logDir(" + "[" * 150 + "]" * 150 + ").nothing",
    "deviceIterations(1" + " + 1" * 3000 + ")",
]


@pytest.mark.parametrize("line", HOSTILE, ids=lambda line: line[:50])
def test_a_hostile_line_is_refused_and_does_nothing(
    load: Load, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = Options()
    began = time.thread_time()
    with pytest.raises((ConfigFileError, AttributeError, AssertionError)) as raised:
        load(line, options)
    assert time.thread_time() - began < 5  # CPU seconds, of which it takes some thousandths
    if not isinstance(raised.value, ConfigFileError):
        assert raised.value.__notes__[0].startswith("at line 1 of tmp.conf: options.")
    assert not (tmp_path / "hacked").exists()
    options.checkIsFrozen()
    assert options in (Options(), Options().logDir("x"))


@given(st.text(max_size=60))
def test_any_text_sets_options_or_is_an_error(text: str) -> None:
    options = Options()
    try:
        statements = config_file.parse(f"options.{text}", 1, "file")
        for statement in statements:
            config_file.perform(statement, options)
    except (ConfigFileError, config_file.Refused, AttributeError, AssertionError):
        return
    except (ArithmeticError, TypeError, ValueError):  # of the methods, or of arithmetic
        return
    assert options.clone() == options


def test_what_a_method_raises_keeps_its_type_and_gains_the_line(load: Load) -> None:
    with pytest.raises(ValueError, match="input_group_type cannot be All") as raised:
        load("deviceIterations(3)\n\ninputReplicaGrouping(2, poptorch.CommGroupType.All)")
    assert raised.value.__notes__ == [
        "at line 3 of tmp.conf: options.inputReplicaGrouping(2, poptorch.CommGroupType.All)"
    ]


def test_unknown_options_and_files_have_pythons_errors(load: Load, tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match=r"Invalid attribute deviceIteration\."):
        load("deviceIteration(3)")
    with pytest.raises(FileNotFoundError):
        Options().loadFromFile(str(tmp_path / "none.conf"))


def test_frozen_options_load_nothing(load: Load) -> None:
    options = Options()
    options._freeze()
    with pytest.raises(AttributeError, match="Can't modify frozen Options"):
        load("deviceIterations(2)", options)


# ---------------------------------------------------------------- JSON and the environment


@pytest.mark.parametrize(
    ("text", "same"),
    [
        (
            {"deviceIterations": 2, "replicationFactor": 1, "logDir": "d"},
            lambda o: o.deviceIterations(2).replicationFactor(1).logDir("d"),
        ),
        (
            {"Precision.enableFloatingPointExceptions": True},
            lambda o: o.Precision.enableFloatingPointExceptions(True),
        ),
        (
            {"connectionType": "ConnectionType.OnDemand"},
            lambda o: o.connectionType(poptorch.ConnectionType.OnDemand),
        ),
        (
            {"outputMode": ["poptorch.OutputMode.EveryN", 3]},
            lambda o: o.outputMode(OutputMode.EveryN, 3),
        ),
        (
            {"_Popart.set": ["saveInitializersToFile", "my_file.onnx"]},
            lambda o: o._Popart.set("saveInitializersToFile", "my_file.onnx"),
        ),
        (
            {"setAvailableMemoryProportion": {"IPU0": 0.5}},
            lambda o: o.setAvailableMemoryProportion({"IPU0": 0.5}),
        ),
        (
            {"updatableNamedBuffers": [["a", "b"]], "enableExecutableCaching": None},
            lambda o: o.updatableNamedBuffers(["a", "b"]).enableExecutableCaching(None),
        ),
        ({"autoRoundNumIPUs": []}, lambda o: o.autoRoundNumIPUs()),
    ],
)
def test_json_and_the_variable_mean_the_same_calls(
    monkeypatch: pytest.MonkeyPatch, text: dict[str, Any], same: Callable[[Options], Any]
) -> None:
    expected, options = Options(), Options()
    same(expected)
    options.from_json(json.dumps(text))
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", json.dumps(text))
    assert options == Options() == expected
    assert repr(options) == repr(expected)


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("{'a': 1}", ValueError, "Expecting property name"),
        ("[1]", ValueError, r"expected a JSON object of options, got '\[1\]'"),
        ('{"nothing": 1}', AttributeError, "Invalid attribute nothing."),
        ('{"__init__": []}', AttributeError, "Invalid attribute __init__."),
        ('{"Training.__class__.mro": []}', AttributeError, "Invalid attribute __class__."),
        ('{"clone.x": 1}', AttributeError, "Invalid attribute x."),
        ('{"log_dir": 1}', AttributeError, "'log_dir' is not a method of the options"),
        ('{"loadFromFile": "x"}', AttributeError, "Invalid attribute loadFromFile."),
        ('{"outputMode": "OutputMode.Some"}', ValueError, "'OutputMode.Some': expected one of"),
        ('{"deviceIterations": "2"}', AssertionError, "Unexpected type <class 'str'>"),
    ],
)  # fmt: skip
def test_json_that_makes_no_sense_is_named(
    monkeypatch: pytest.MonkeyPatch, text: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        Options().from_json(text)
    monkeypatch.setenv("POPTORCH_DEFAULT_OPTIONS", text)
    with pytest.raises(kind, match=message) as raised:
        Options()
    assert raised.value.__notes__ == ["in the environment variable POPTORCH_DEFAULT_OPTIONS"]


def test_the_cache_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "/somewhere")
    assert Options() == Options().enableExecutableCaching("/somewhere")
    assert Options()._Popart.options["cachePath"] == "/somewhere"
    monkeypatch.setenv("POPTORCH_CACHE_DIR", "")
    assert "cachePath" not in Options()._Popart.options


def test_processes_are_read_when_options_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Options()
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "3")
    after = Options()
    assert (before.Distributed.numProcesses, before.Distributed.processId) == (1, 0)
    assert (after.Distributed.numProcesses, after.Distributed.processId) == (4, 3)
    assert after.outputMode(OutputMode.All).toDict()["distributed_process_id"] == 3
    assert after.Distributed.disable().numProcesses == 1
    monkeypatch.setenv("SIZE", "8")
    monkeypatch.setenv("RANK", " 7 ")
    after.Distributed.setEnvVarNames("SIZE", "RANK")
    assert (after.Distributed.numProcesses, after.Distributed.processId) == (8, 7)


def test_processes_that_make_no_sense_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "first")
    with pytest.raises(ValueError, match="OMPI_COMM_WORLD_RANK='first': expected a whole number"):
        Options()
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    with pytest.raises(ValueError, match="process_id=1: expected one of 0 to 0"):
        Options()


@pytest.mark.parametrize(
    ("level", "printed"),
    [("INFO", True), ("WARN", False), (None, False)],
)
def test_the_level_of_the_environment(level: str | None, printed: bool) -> None:
    environ = {**os.environ, "POPTORCH_CACHE_DIR": "there"}
    environ |= {} if level is None else {"POPTORCH_LOG_LEVEL": level}
    command = [sys.executable, "-c", "import gpusim.poptorch as p; p.Options()"]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=PATIENCE, check=True
    )
    text = "POPTORCH_CACHE_DIR is set: setting cache path to there"
    assert done.stdout == "" and (text in done.stderr) == printed
