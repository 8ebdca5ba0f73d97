"""Traces, logs, cycles and the progress bar: what an executor tells of its work."""

from __future__ import annotations

import gc
import io
import json
import logging
import os
import re
import resource
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpusim import poptorch
from gpusim.poptorch import Error, Options
from gpusim.poptorch._logging import logger
from gpusim.poptorch.blocks import BeginBlock
from gpusim.poptorch.executor import context
from gpusim.poptorch.profiling import Channel
from gpusim.recording.traces import Trace, open_traces, opened, released


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return poptorch.identity_loss(self.w * x, reduction="mean")


@pytest.fixture(autouse=True)
def ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Each test has a folder, and leaves no device attached and no trace open."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("POPLAR_ENGINE_OPTIONS", raising=False)
    yield
    for executor in list(context.living):
        executor.destroy()
        del executor
    if open_traces():
        gc.collect()
    assert open_traces() == []


def profiled(**how: int) -> Options:
    options = Options().replicationFactor(how.get("replicas", 1)).enableProfiling("profile")
    options.deviceIterations(how.get("iterations", 1))
    options.Training.gradientAccumulation(how.get("accumulation", 1))
    return options.showCompilationProgressBar(False)


def ran(options: Options, size: int, calls: int = 1) -> poptorch.PoplarExecutor:
    train = poptorch.trainingModel(Line(), options)
    for _ in range(calls):
        train(torch.ones(size))
    return train


# ---------------------------------------------------------------- the trace event format


def events_of(path: str | Path) -> list[dict[str, Any]]:
    """The events of a file, which is checked against the format's description."""
    found = json.loads(Path(path).read_text(), parse_constant=pytest.fail)
    assert found.keys() == {"displayTimeUnit", "otherData", "traceEvents"}
    assert found["displayTimeUnit"] == "ms"
    events: list[dict[str, Any]] = found["traceEvents"]
    rows: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        assert event.keys() >= {"name", "ph", "ts", "pid", "tid", "args"}
        assert isinstance(event["name"], str) and isinstance(event["args"], dict)
        assert type(event["pid"]) is int and type(event["tid"]) is int
        if event["ph"] == "M":
            assert event["name"] in (
                "process_name", "process_sort_index", "thread_name", "thread_sort_index"
            )  # fmt: skip
            kind = str if event["name"].endswith("_name") else int
            assert [type(value) for value in event["args"].values()] == [kind]
        else:
            assert event["ph"] == "X" and isinstance(event["cat"], str)
            assert event["ts"] >= 0 and event["dur"] >= 0
            rows.setdefault((event["pid"], event["tid"]), []).append(event)
    named_rows = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    named_processes = {e["pid"] for e in events if e["name"] == "process_name"}
    assert rows.keys() <= named_rows and {pid for pid, _ in rows} <= named_processes
    for row in rows.values():
        assert_nested(row)
    return events


def assert_nested(row: list[dict[str, Any]]) -> None:
    """Of two events of one row, one contains the other, or they do not touch."""
    open_until: list[float] = []
    for event in sorted(row, key=lambda e: (e["ts"], -e["dur"])):
        end = event["ts"] + event["dur"]
        while open_until and open_until[-1] <= event["ts"] + 0.002:  # rounded to nanoseconds
            open_until.pop()
        assert not open_until or end <= open_until[-1] + 0.002
        open_until.append(end)


def names(events: list[dict[str, Any]], what: str) -> dict[tuple[int, int], str]:
    chosen = [e for e in events if e["name"] == f"{what}_name"]
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in chosen}


def rows_of(events: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The events of each row, by its name."""
    found: dict[str, list[dict[str, Any]]] = {}
    known = names(events, "thread")
    for event in events:
        if event["ph"] == "X":
            found.setdefault(known[event["pid"], event["tid"]], []).append(event)
    return found


# ---------------------------------------------------------------- what is in it


def test_host_and_replicas_are_rows_and_their_work_is_events() -> None:
    train = ran(profiled(replicas=2, iterations=2, accumulation=3), 12)
    train.copyWeightsToHost()
    del train
    gc.collect()
    events = events_of("profile/training/trace.json")
    assert sorted(set(names(events, "process").values())) == ["host", "replicas"]
    rows = rows_of(events)
    assert rows.keys() == {"MainThread", "replica 0 (IPU 0)", "replica 1 (IPU 1)"}
    for replica in ("replica 0 (IPU 0)", "replica 1 (IPU 1)"):
        assert Counter(e["name"] for e in rows[replica]) == {
            "upload weights": 1,
            "upload inputs": 1,
            "micro-batch": 6,
            "accumulation": 6,
            "reduction": 2,
            "update": 2,
            "download outputs": 1,
            "download weights": 1,
        }
        batches = [e["args"] for e in rows[replica] if e["name"] == "micro-batch"]
        assert [(b["iteration"], b["accumulation"]) for b in batches] == [
            (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)
        ]  # fmt: skip
        assert [b["number"] for b in batches] == [0, 1, 2, 3, 4, 5]
        assert {b["execution"] for b in batches} == {"lockstep"}
    host = {e["name"]: e for e in rows["MainThread"]}
    assert host.keys() >= {
        "modelCompilation",
        "modelTracing",
        "modelExecution",
        "copyWeightsToHost",
    }
    assert {e["cat"] for e in rows["MainThread"]} == {"poptorch.trainingModel"}
    call = host["modelExecution"]
    compiling, *executing, _ = rows["replica 0 (IPU 0)"]
    assert host["modelTracing"]["ts"] <= compiling["ts"] <= call["ts"]
    for event in executing:
        assert call["ts"] <= event["ts"]
        assert event["ts"] + event["dur"] <= call["ts"] + call["dur"] + 0.002


def test_the_file_is_whole_after_every_call() -> None:
    train = ran(profiled(), 1)
    counts = []
    for _ in range(3):
        train(torch.ones(1))
        rows = rows_of(events_of("profile/training/trace.json"))
        counts.append(sum(e["name"] == "micro-batch" for e in rows["replica 0 (IPU 0)"]))
    assert counts == [2, 3, 4]


def test_weights_are_uploaded_in_it() -> None:
    infer = poptorch.inferenceModel(
        nn.Identity(), profiled().connectionType(poptorch.ConnectionType.OnDemand)
    )
    infer(torch.ones(1))
    rows = rows_of(events_of("profile/inference/trace.json"))
    uploads = [e["name"] for e in rows["replica 0 (IPU 0)"] if e["cat"] == "upload"]
    assert uploads == ["upload weights", "upload weights", "upload inputs"], "also when it attaches"


def test_channels_of_the_program_are_in_all_traces_that_are_open() -> None:
    train = ran(profiled().modelName("a"), 1)
    infer = poptorch.inferenceModel(nn.Identity(), profiled().modelName("b"))
    infer(torch.ones(1))

    class Loader:
        def load(self) -> int:
            return 3

    channel, loader = Channel("loading"), Loader()
    channel.instrument(loader, "load")
    thread = threading.Thread(target=loader.load, name="loader")
    with pytest.raises(KeyError), channel.tracepoint("epoch"):
        assert loader.load() == 3
        thread.start()
        thread.join()
        raise KeyError
    train(torch.ones(1))
    infer(torch.ones(1))
    for name in ("a", "b"):
        rows = rows_of(events_of(f"profile/{name}/trace.json"))
        own = [e["name"] for e in rows["MainThread"] if e["cat"] == "loading"]
        assert own == ["load", "epoch"] and [e["name"] for e in rows["loader"]] == ["load"]


def test_without_profiling_there_is_no_file(tmp_path: Path) -> None:
    train = ran(Options().showCompilationProgressBar(False), 1)
    with Channel("mine").tracepoint("x"):
        train(torch.ones(1))
    assert open_traces() == [] and [*tmp_path.iterdir()] == []


def test_executors_of_one_name_share_a_file_and_the_last_one_closes_it() -> None:
    one = ran(profiled(), 1)
    two = ran(profiled(), 1)
    rows = rows_of(events_of("profile/training/trace.json"))
    assert sum(e["name"] == "modelCompilation" for e in rows["MainThread"]) == 2
    [trace] = open_traces()
    for executor in (one, two):
        executor.destroy()
    del one, executor
    gc.collect()
    assert open_traces() == [trace] and not trace._file.closed
    del two
    gc.collect()
    assert open_traces() == [] and trace._file.closed


ALL = {"autoReport.all": "true"}


@pytest.mark.parametrize(
    ("variable", "path"),
    [
        ({"autoReport.directory": "theirs"}, "theirs/training/trace.json"),
        ({"autoReport.all": "false"}, None),
        ({"autoReport.all": "false", "autoReport.outputDebugInfo": "true"}, "profile"),
        ({"target.syncReplicasIndependently": "true"}, "profile"),
    ],
)
def test_the_environment_counts_more_than_the_options(
    monkeypatch: pytest.MonkeyPatch, variable: dict[str, str], path: str | None
) -> None:
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", json.dumps(variable))
    train = poptorch.trainingModel(Line(), profiled())
    expected = "profile/training/trace.json" if path == "profile" else path
    assert train._profile.path == (None if expected is None else Path(expected))


def test_the_environment_alone_asks_for_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", json.dumps(ALL))
    ran(Options().showCompilationProgressBar(False), 1)
    assert events_of("training/trace.json")
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", "[1]")
    with pytest.raises(
        ValueError, match=r"^POPLAR_ENGINE_OPTIONS='\[1\]': expected a JSON object$"
    ):
        poptorch.trainingModel(Line(), Options())


def test_each_process_has_a_file() -> None:
    options = profiled()
    options.Distributed.configureProcessId(1, 2)
    train = poptorch.trainingModel(Line(), options)
    assert train._profile.path == Path("profile/training/trace.1.json")


def test_a_replica_is_named_with_its_ipus() -> None:
    blocks = [BeginBlock(nn.Linear(2, 2), ipu_id=0), BeginBlock(nn.Linear(2, 2), ipu_id=1)]
    options = profiled(replicas=2).setExecutionStrategy(poptorch.ShardedExecution())
    infer = poptorch.inferenceModel(nn.Sequential(*blocks), options)
    infer(torch.ones(2, 2))
    rows = rows_of(events_of("profile/inference/trace.json"))
    assert rows.keys() == {"MainThread", "replica 0 (IPUs 0-1)", "replica 1 (IPUs 2-3)"}


# ---------------------------------------------------------------- the file


def test_a_disk_that_is_full_ends_the_trace_and_not_the_run(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = ran(profiled(), 1)
    before = events_of("profile/training/trace.json")
    [trace] = open_traces()
    trace._file.close()
    with open("/dev/full", "r+b", buffering=0) as full:
        monkeypatch.setattr(trace, "_file", full)
        monkeypatch.setattr(os, "ftruncate", lambda *args: None)
        monkeypatch.setattr(os, "pwrite", lambda *args: None)
        train(torch.ones(1))
        train(torch.ones(1))
    told = [r.getMessage() for r in caplog.records if "Profiling ends" in r.getMessage()]
    assert len(told) == 1 and told[0].endswith("[Errno 28] No space left on device")
    assert events_of("profile/training/trace.json") == before


def test_a_trace_that_ends_early_keeps_its_events(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "t.json", {})
    row = trace.row("replicas", "replica 0")
    trace.add(row, "kept", "device", 1.0, 2.0)
    trace.flush()
    trace.add(row, "x" * 9000, "device", 2.0, 3.0)
    size = (tmp_path / "t.json").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, before[1]))
    try:
        with pytest.warns(RuntimeWarning, match="the trace .* ends"):
            trace.flush()
        trace.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [e["name"] for e in events_of(tmp_path / "t.json") if e["ph"] == "X"] == ["kept"]


def test_a_fork_does_not_write_to_its_parents_file(tmp_path: Path) -> None:
    trace = opened(tmp_path / "t.json", {})
    trace.host("of the parent", "c", 1.0, 2.0)
    child = os.fork()
    if not child:
        trace.host("of the child", "c", 1.0, 2.0)
        trace.flush()
        os._exit(0)
    os.waitpid(child, 0)
    released(trace)
    assert [e["name"] for e in events_of(tmp_path / "t.json") if e["ph"] == "X"] == [
        "of the parent"
    ]


def test_many_events_do_not_pile_up(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "t.json", {"model": "m"})
    for number in range(10_000):
        trace.add(trace.row("p", "r"), "e", "c", number, number + 0.5, number=number)
    assert len(trace._events) < 5000
    trace.close()
    trace.close()
    events = [e for e in events_of(tmp_path / "t.json") if e["ph"] == "X"]
    assert [e["args"]["number"] for e in events] == [*range(10_000)]


def test_names_of_any_characters_are_written(tmp_path: Path) -> None:
    trace = Trace(tmp_path / "t.json", {"model": "Größe"})
    trace.host('"\\\n\ud800 \u2028é', "c", 0.0, 1.0)
    trace.close()
    assert events_of(tmp_path / "t.json")[-1]["name"] == '"\\\n\ud800 \u2028é'


# ---------------------------------------------------------------- the log


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == logger.name]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, logger.name)
    return caplog


def test_the_log_says_what_is_done(told: pytest.LogCaptureFixture) -> None:
    options = Options().randomSeed(9).connectionType(poptorch.ConnectionType.OnDemand)
    train = poptorch.trainingModel(Line(), options)
    train(torch.ones(1))
    train.model.w.item()
    train.rng_state = train.rng_state
    train.detachFromDevice()
    found = lines(told)
    expected = [
        "poptorch.Options set replication_factor to value 1",
        "poptorch.Options set gradient_accumulation to value 1",
        "Setting random seed to: 9",
        r"Acquired 1 IPU\(s\): running on device Id \d+.",
        "Finished Poplar compilation.",
        r"Attached to device \d+",
        r"Implicit copyWeightsToDevice\(\)",
        r"Writing weights from host to IPU memory.",
        r"\[poptorch.trainingModel\] modelExecution took \d\.\d{6} s",
        r"Implicit copyWeightsToHost\(\)",
        r"Writing weights from IPU to host.",
        "Setting RNG state",
        r"Detached from device \d+",
    ]
    rest = iter(found)
    for pattern in expected:
        assert any(re.fullmatch(pattern, line) for line in rest), pattern


def test_a_device_is_attached_to_before_compilation_ends(told: pytest.LogCaptureFixture) -> None:
    poptorch.inferenceModel(nn.Identity()).compile(torch.ones(1))
    steps = ("Acquired", "Attached", "Finished")
    found = [line.split()[0] for line in lines(told)]
    assert [first for first in found if first in steps] == [*steps]


def test_options_are_logged_as_the_backend_prints_them(told: pytest.LogCaptureFixture) -> None:
    options = Options().enableExecutableCaching("").updatableNamedBuffers(["steps"])
    options.Precision.enableStochasticRounding(True)
    options._Popart.set("engineOptions", {"debug.level": "1"})
    model = nn.Identity()
    model.register_buffer("steps", torch.zeros(1))
    poptorch.inferenceModel(model, options).compile(torch.ones(1))
    for line in (
        "poptorch.Options set execution_mode to value 0",
        "poptorch.Options set broadcast_buffers to value true",
        "poptorch.Options set enableStochasticRounding to value true",
        "poptorch.Options set engineOptions[debug.level] to value 1",
        "poptorch.Options added steps to updatable_named_buffers",
    ):
        assert line in lines(told), line


def test_warnings_are_counted_for_each_model(told: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        told.clear()
        infer = poptorch.inferenceModel(nn.Identity(), Options().maxRepeatLogs(1))
        infer.compile(torch.ones(1, dtype=torch.int64))
        assert sum("coerced to torch.int32" in line for line in lines(told)) == 1


def test_cycles_are_logged_after_each_call(told: pytest.LogCaptureFixture) -> None:
    infer = poptorch.inferenceModel(nn.Identity(), Options().logCycleCount(True))
    for _ in range(2):
        infer(torch.ones(1))
        assert lines(told)[-1] == f"Total number of IPU cycles: {infer.cycleCount()}"
    silent = poptorch.inferenceModel(nn.Identity())
    infer.destroy()
    silent(torch.ones(1))
    assert sum("cycles" in line for line in lines(told)) == 2
    with pytest.raises(Error, match="Cycle count logging is disabled"):
        silent.cycleCount()


@pytest.mark.parametrize(
    ("level", "kinds"),
    [
        ("TRACE", {"DEBUG", "INFO", "WARNING"}),
        (1, {"DEBUG", "INFO", "WARNING"}),
        ("INFO", {"INFO", "WARNING"}),
        ("WARN", {"WARNING"}),
        ("ERR", set()),
        ("OFF", set()),
    ],
)
def test_levels_choose_the_lines(
    monkeypatch: pytest.MonkeyPatch, level: str | int, kinds: set[str]
) -> None:
    stream = io.StringIO()
    before = logger.level
    poptorch.setLogLevel(level)
    try:
        monkeypatch.setattr(sys, "stderr", stream)
        infer = poptorch.inferenceModel(nn.Identity(), Options().maxRepeatLogs(None))
        infer(torch.ones(1, dtype=torch.float64))
        infer.copyWeightsToDevice()
    finally:
        logger.setLevel(before)
    found = re.findall(r"^\[.*?\] \[poptorch::python\] \[(\w+)\] ", stream.getvalue(), re.MULTILINE)
    assert {kind.upper() for kind in found} == kinds


def test_a_log_folder_gets_what_the_console_does(tmp_path: Path) -> None:
    before = [*logger.handlers]
    options = Options().logDir("logs/here")
    one = poptorch.inferenceModel(nn.Identity(), options)
    two = poptorch.inferenceModel(nn.Identity(), options)
    logger.warning("größer")
    assert len(logger.handlers) == len(before) + 1
    text = Path("logs/here/poptorch.log").read_text(encoding="utf-8")
    line = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}\] \[poptorch::python\] \[warning\] größer\n"
    assert re.fullmatch(line, text)
    logger.debug("not at this level")
    del one
    gc.collect()
    logger.error("second")
    del two
    gc.collect()
    assert logger.handlers == before
    logger.error("after them")
    with poptorch_log(options) as path:
        logger.error("appended")
    kept = [line.rsplit("] ", 1)[1] for line in path.read_text(encoding="utf-8").splitlines()]
    assert kept == ["größer", "second", "appended"]


class poptorch_log:
    """An executor with a log file, for a block."""

    def __init__(self, options: Options) -> None:
        self._executor: Any = poptorch.inferenceModel(nn.Identity(), options)

    def __enter__(self) -> Path:
        return Path("logs/here/poptorch.log")

    def __exit__(self, *error: object) -> None:
        self._executor = None
        gc.collect()


def test_the_current_folder_gets_a_log_if_it_is_asked_for(tmp_path: Path) -> None:
    silent = poptorch.inferenceModel(nn.Identity())
    logger.warning("not written")
    assert [*tmp_path.iterdir()] == []
    asked = poptorch.inferenceModel(nn.Identity(), Options().logDir("."))
    logger.warning("written")
    options = Options().logDir(".")
    options.Distributed.configureProcessId(1, 2)
    other = poptorch.inferenceModel(nn.Identity(), options)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["poptorch.1.log", "poptorch.log"]
    assert "not written" not in (tmp_path / "poptorch.log").read_text()
    del silent, asked, other


# ---------------------------------------------------------------- the progress bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def failing(x: Tensor) -> Tensor:
    raise RuntimeError("of forward")


def test_a_terminal_shows_a_bar_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    infer = poptorch.inferenceModel(nn.Identity())
    infer(torch.ones(1))
    infer(torch.ones(1))
    shown = terminal.getvalue().split("\r")
    assert shown[0] == "" and shown[-1].endswith("\n") and terminal.getvalue().count("\n") == 1
    bars = [
        re.fullmatch(r"Graph compilation: +(\d+)%\|.{20}\| (\d+)/(\d+) \[.*\]\n?", s)
        for s in shown[1:]
    ]
    progress = [int(bar[1]) for bar in bars if bar]
    assert len(progress) == len(shown) - 1 and progress == sorted(progress)
    assert progress[0] == 0 and progress[-1] == 100


def test_a_bar_that_will_not_be_full_ends_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with pytest.raises(RuntimeError, match="of forward"):
        poptorch.inferenceModel(failing)(torch.ones(1))
    assert terminal.getvalue().endswith("]\n") and "100%" not in terminal.getvalue()


def test_pipes_and_those_who_do_not_want_it_get_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, options in (
        (io.StringIO(), Options()),
        (Terminal(), Options().showCompilationProgressBar(False)),
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        infer = poptorch.inferenceModel(nn.Identity(), options)
        infer(torch.ones(1))
        infer.destroy()
        assert stream.getvalue() == ""
