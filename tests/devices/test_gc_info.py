"""The commands gc-info and gc-monitor: their lines, their exit codes, and hardware that is broken.

A real process imports the test's module pynvml. The CUDA driver's answer is faked, as it needs a
driver.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import gpusim
from gpusim.devices import Table, attach, attributes, gc_info, gc_monitor, host, locks
from gpusim.runtime import probes
from tests.oracles.machine_time import PATIENCE

ROOT = Path(__file__).parents[2]
Run = Callable[..., tuple[int, list[str], str]]

ONE = """\
Graphcore device listing:
Partition: gpusim [active]
-+- Id: [0], target: [Fabric], IPU-M host: [127.0.0.1], IPU#: [3]
"""
TWO = """\
Graphcore device listing:
Partition: gpusim [active]
-+- Id: [0], target: [Fabric], IPU-M host: [127.0.0.1], IPU#: [3]
-+- Id: [1], target: [Fabric], IPU-M host: [127.0.0.1], IPU#: [2]
-+- Id: [2], target: [Multi IPU]
 |--- Id: [0], DNC Id: [0], IPU-M host: [127.0.0.1], IPU#: [3]
 |--- Id: [1], DNC Id: [1], IPU-M host: [127.0.0.1], IPU#: [2]
"""
FOUR = """\
Graphcore device listing:
Partition: gpusim [active]
-+- Id: [0], target: [Fabric], IPU-M host: [127.0.0.1], IPU#: [3]
-+- Id: [1], target: [Fabric], IPU-M host: [127.0.0.1], IPU#: [2]
-+- Id: [2], target: [Fabric], IPU-M host: [127.0.0.1], IPU#: [1]
-+- Id: [3], target: [Fabric], IPU-M host: [127.0.0.1], IPU#: [0]
-+- Id: [4], target: [Multi IPU]
 |--- Id: [0], DNC Id: [0], IPU-M host: [127.0.0.1], IPU#: [3]
 |--- Id: [1], DNC Id: [1], IPU-M host: [127.0.0.1], IPU#: [2]
-+- Id: [5], target: [Multi IPU]
 |--- Id: [2], DNC Id: [0], IPU-M host: [127.0.0.1], IPU#: [1]
 |--- Id: [3], DNC Id: [1], IPU-M host: [127.0.0.1], IPU#: [0]
-+- Id: [6], target: [Multi IPU]
 |--- Id: [0], DNC Id: [0], IPU-M host: [127.0.0.1], IPU#: [3]
 |--- Id: [1], DNC Id: [1], IPU-M host: [127.0.0.1], IPU#: [2]
 |--- Id: [2], DNC Id: [2], IPU-M host: [127.0.0.1], IPU#: [1]
 |--- Id: [3], DNC Id: [3], IPU-M host: [127.0.0.1], IPU#: [0]
"""

NVML = """
import types
NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1
class NVMLError(Exception): pass
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 3
def nvmlDeviceGetHandleByIndex(index):
    if index == 1: raise NVMLError("GPU is lost")
    return index
def nvmlDeviceGetPciInfo(gpu): return types.SimpleNamespace(busId=f"00000000:{0x1A + gpu:02X}:00.0")
def nvmlDeviceGetTemperature(gpu, sensor): return 40 + gpu
def nvmlDeviceGetSerial(gpu): raise NVMLError("Not Supported")
def nvmlDeviceGetName(gpu): return b"NVIDIA H200"  # as old bindings give it
def nvmlDeviceGetClockInfo(gpu, clock): return 1980
def nvmlSystemGetDriverVersion(): return "580.95"
def nvmlDeviceGetVbiosVersion(gpu): return "96.00"
def nvmlDeviceGetComputeRunningProcesses(gpu): return [types.SimpleNamespace(pid=p) for p in (7, 9)]
def nvmlDeviceGetUUID(gpu): return f"GPU-{gpu}"
def nvmlDeviceGetUtilizationRates(gpu): return types.SimpleNamespace(gpu=37, memory=5)
def nvmlDeviceGetCurrPcieLinkGeneration(gpu): return 5
def nvmlDeviceGetCurrPcieLinkWidth(gpu): return 16
def nvmlDeviceGetMemoryInfo(gpu): return types.SimpleNamespace(total=150 * 2**30, used=2**30)
def nvmlDeviceGetPowerUsage(gpu): return 123456
"""
GPUS = [
    {"index": 0, "name": "NVIDIA H200", "memory_bytes": 140 * 2**30, "pci_id": "0000:1C:00.0"},
    {"index": 1, "name": "NVIDIA H200", "memory_bytes": 140 * 2**30, "pci_id": "0000:1A:00.0"},
    {"index": 2, "name": "NVIDIA H200", "memory_bytes": 140 * 2**30, "pci_id": "0000:1B:00.0"},
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime folder for this test alone."""
    monkeypatch.setenv("GPUSIM_RUNTIME_DIR", str(tmp_path / "run"))
    return tmp_path / "run"


@pytest.fixture
def info(capsys: pytest.CaptureFixture[str]) -> Run:
    """gc-info's exit code, its lines, and what it complains about."""

    def run(*arguments: str) -> tuple[int, list[str], str]:
        code = gc_info.main(arguments)
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err

    return run


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on a developer's machine that has GPUs."""
    with_driver(monkeypatch, {"problem": "no NVIDIA driver"})


def with_driver(monkeypatch: pytest.MonkeyPatch, answer: dict[str, object]) -> None:
    """The CUDA driver answers so; every other question is really asked."""
    really_ask = probes.ask

    def ask(name: str, *rest: Any) -> dict[str, object]:
        return answer if name == "cuda" else really_ask(name, *rest)

    monkeypatch.setattr(probes, "ask", ask)


def with_nvml(monkeypatch: pytest.MonkeyPatch, folder: Path, source: str) -> None:
    """Three GPUs, and `import pynvml` runs `source`."""
    with_driver(monkeypatch, {"devices": GPUS})
    (folder / "pynvml.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def values(lines: list[str]) -> dict[str, str]:
    """The `key: value` lines of one device."""
    return dict(line.strip().split(": ", 1) for line in lines[1:])


# ---------------------------------------------------------------- the list


@pytest.mark.parametrize(("count", "expected"), [(1, ONE), (2, TWO), (4, FOUR)])
@pytest.mark.parametrize("option", ["-l", "--list-devices"])
def test_the_list_has_the_documented_form(
    option: str, count: int, expected: str, info: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSIM_IPUS", str(count))
    assert info(option) == (0, expected.splitlines(), "")


def parsed(lines: list[str]) -> list[tuple[int, str, list[tuple[int, ...]]]]:
    """Id, target and the IPUs' (id, DNC id, last byte of the host, IPU#), as a script reads it."""
    where = r"IPU-M host: \[127\.0\.0\.(\d+)\], IPU#: \[(\d+)\]"
    single = re.compile(rf"-\+- Id: \[(\d+)\], target: \[(Fabric)\], {where}")
    group = re.compile(r"-\+- Id: \[(\d+)\], target: \[(Multi IPU)\]")
    member = re.compile(rf" \|--- Id: \[(\d+)\], DNC Id: \[(\d+)\], {where}")
    found: list[tuple[int, str, list[tuple[int, ...]]]] = []
    for line in lines:
        if match := single.fullmatch(line):
            id, target, host, number = match.groups()
            found.append((int(id), target, [(int(id), 0, int(host), int(number))]))
        elif match := group.fullmatch(line):
            found.append((int(match[1]), match[2], []))
        else:
            match = member.fullmatch(line)
            assert match, line
            found[-1][2].append(tuple(map(int, match.groups())))
    return found


@pytest.mark.parametrize("count", [1, 2, 4, 16, 64])
def test_the_list_numbers_singles_then_groups(
    count: int, info: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSIM_IPUS", str(count))
    code, lines, errors = info("-l")
    assert (code, errors) == (0, "")
    found = parsed(lines[2:])
    expected, size = [], 1
    while size <= count:
        for start in range(0, count, size):
            ipus = [(k, k - start, 1 + k // 4, 3 - k % 4) for k in range(start, start + size)]
            expected.append((len(expected), "Fabric" if size == 1 else "Multi IPU", ipus))
        size *= 2
    assert found == expected


def test_the_list_of_64_ends_with_all_on_16_machines(
    info: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSIM_IPUS", "64")
    lines = info("-l")[1]
    assert lines[-65] == "-+- Id: [126], target: [Multi IPU]"
    assert lines[-1] == " |--- Id: [63], DNC Id: [63], IPU-M host: [127.0.0.16], IPU#: [0]"


def test_one_device_can_be_listed(info: Run) -> None:
    assert info("-l", "-d", "17")[1][2:] == [
        "-+- Id: [17], target: [Multi IPU]",
        " |--- Id: [2], DNC Id: [0], IPU-M host: [127.0.0.1], IPU#: [1]",
        " |--- Id: [3], DNC Id: [1], IPU-M host: [127.0.0.1], IPU#: [0]",
    ]


# ---------------------------------------------------------------- about one device


@pytest.mark.parametrize("options", [("-d", "5", "-i"), ("--device-info", "--device-id=5")])
@pytest.mark.usefixtures("no_driver")
def test_a_device_has_sorted_attributes_after_id_and_target(
    options: tuple[str, ...], info: Run
) -> None:
    code, lines, errors = info(*options)
    assert (code, errors) == (0, "")
    assert lines[:3] == ["Device Info:", "  id: 5", "  target: Fabric"]
    assert all(re.fullmatch(r"  [^:]+: .+", line) for line in lines[3:])
    keys = list(values(lines))[2:]
    assert keys == sorted(keys) == list(attributes.KEYS)


@pytest.mark.usefixtures("no_driver")
def test_without_a_gpu_the_host_answers_and_nothing_is_invented(info: Run) -> None:
    known = values(info("-i", "-d", "5")[1])
    assert known["gpusim backend"] == "host"
    assert (known["ipuof host"], known["board ipu index"]) == ("127.0.0.2", "2")
    assert known["ipu architecture"] == "ipu21"
    assert int(known["memory total (bytes)"]) > int(known["memory used (bytes)"]) > 0
    for key in ("pci id", "total board power", "gpu uuid", "driver version", "user process id"):
        assert known[key] == "N/A", key


def test_a_host_that_says_nothing_is_not_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "PROC", tmp_path)
    monkeypatch.setattr(host, "THERMAL", tmp_path)
    monkeypatch.setattr(host, "memory_bytes", lambda: None)
    assert set(host.host_attributes()) <= {"board type"}


def test_the_hosts_die_temperature_is_the_mean_of_its_sensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    zones = (("x86_pkg_temp", "41000"), ("x86_pkg_temp", "44000"), ("acpitz", "9"))
    for number, (kind, value) in enumerate(zones):
        zone = tmp_path / f"thermal_zone{number}"
        zone.mkdir()
        (zone / "type").write_text(f"{kind}\n")
        (zone / "temp").write_text(f"{value}\n")
    monkeypatch.setattr(host, "THERMAL", tmp_path)
    assert host.host_attributes()["average die temp"] == "42.5 C"


@pytest.mark.usefixtures("no_driver")
def test_an_attached_device_has_a_user(info: Run) -> None:
    with attach(Table().device(16)):
        known = values(info("-i", "-d", "1")[1])
        assert known["user process id"] == str(os.getpid())
        assert known["user name"] != "N/A" and "python" in known["user executable"]
        assert re.fullmatch(r"\d{8}T\d{6}Z", known["process start time"])
    assert values(info("-i", "-d", "1")[1])["user process id"] == "N/A"


@pytest.mark.usefixtures("no_driver")
def test_a_group_is_followed_by_its_ipus(info: Run) -> None:
    lines = info("-i", "-d", "17")[1]
    heads = [k for k, line in enumerate(lines) if line == "Device Info:"]
    assert lines[:5] == [
        "Device Info:",
        "  id: 17",
        "  target: Multi IPU",
        "  ipu count: 2",
        "  ipu ids: 2, 3",
    ]
    assert [lines[k + 1] for k in heads] == ["  id: 17", "  id: 2", "  id: 3"]


def test_the_count_is_that_of_the_device_or_of_all(
    info: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert info("--ipu-count") == (0, ["16"], "")
    assert info("--ipu-count", "-d", "28") == (0, ["8"], "")
    monkeypatch.setenv("GPUSIM_IPUS", "4")
    assert info("--ipu-count") == (0, ["4"], "")


def test_the_architecture_and_the_clock(
    info: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert info("--ipu-arch") == info("--ipu-arch", "-d", "3") == (0, ["ipu21"], "")
    with_nvml(monkeypatch, tmp_path, NVML)
    assert info("--tile-clock-speed", "-d", "1") == (0, ["1980MHz"], "")


# ---------------------------------------------------------------- NVML


def test_nvml_answers_for_the_gpu_that_backs_the_ipu(
    info: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IPU 4 is on CUDA's GPU 1, which is NVML's GPU 0: they are matched by PCI id."""
    with_nvml(monkeypatch, tmp_path, NVML)
    code, lines, errors = info("-i", "-d", "4")
    assert (code, errors) == (0, "")
    known = values(lines)
    expected = {
        "average board temp": "N/A",
        "average die temp": "40.0 C",
        "board serial number": "N/A",
        "board type": "NVIDIA H200",
        "clock": "1980MHz",
        "driver version": "580.95",
        "firmware version": "96.00",
        "gpu process ids": "7, 9",
        "gpu uuid": "GPU-0",
        "gpusim backend": "GPU 1, stream 1",
        "ipu power": "N/A",
        "ipu utilisation": "37.00%",
        "link speed": "32.0 GT/s",
        "link width": "16",
        "memory total (bytes)": str(150 * 2**30),
        "memory used (bytes)": str(2**30),
        "pci id": "0000:1a:00.0",
        "total board power": "123.5 W",
    }
    assert {key: known[key] for key in expected} == expected
    other = values(info("-i", "-d", "0")[1])
    assert (other["average die temp"], other["pci id"]) == ("42.0 C", "0000:1c:00.0")


def test_a_gpu_that_is_lost_does_not_hide_the_others(
    info: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_nvml(monkeypatch, tmp_path, NVML)
    code, lines, _ = info("-i", "-d", "2")
    known = values(lines)
    assert code == 0
    assert (known["pci id"], known["average die temp"]) == ("0000:1b:00.0", "N/A")
    assert known["memory total (bytes)"] == str(140 * 2**30), "the CUDA driver knows it"


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("raise ModuleNotFoundError('pynvml')", "nvidia-ml-py is not installed: pip install"),
        (NVML + "def nvmlInit(): raise NVMLError('Driver Not Loaded')", "NVMLError: Driver Not"),
        ("import os; os.abort()", "crashed with SIGABRT"),
        ("import time; time.sleep(60)", "no answer within 0.5 s"),
        ("print('not JSON'); raise SystemExit(3)", "exit code 3"),
    ],
)
def test_a_broken_nvml_is_said_and_not_fatal(
    source: str, problem: str, info: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_nvml(monkeypatch, tmp_path, source)
    if "sleep" in source:
        monkeypatch.setitem(probes.PATIENCE, "nvml", 0.5)
    code, lines, errors = info("-i", "-d", "0")
    known = values(lines)
    assert code == 0
    assert (known["gpusim backend"], known["average die temp"]) == ("GPU 0, stream 0", "N/A")
    assert errors.startswith(f"gc-info: NVML does not answer: {problem}")


def test_an_old_nvml_without_some_functions_answers_the_rest(
    info: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = "del nvmlDeviceGetPowerUsage, nvmlDeviceGetCurrPcieLinkGeneration, NVML_CLOCK_SM"
    with_nvml(monkeypatch, tmp_path, f"{NVML}\n{missing}\n")
    known = values(info("-i", "-d", "0")[1])
    assert (known["total board power"], known["link speed"], known["clock"]) == ("N/A",) * 3
    assert known["average die temp"] == "42.0 C"


def test_without_a_gpu_nvml_is_not_asked(
    info: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_nvml(monkeypatch, tmp_path, "import os; os.abort()")
    with_driver(monkeypatch, {"problem": "cuInit: error 999, unknown error"})
    code, lines, errors = info("-i", "-d", "0")
    assert (code, errors, values(lines)["gpusim backend"]) == (0, "", "host")


# ---------------------------------------------------------------- exit codes


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "usage: gc-info"),
        (("-d", "0"), "usage: gc-info"),
        (("-i",), "--device-info needs --device-id"),
        (("-i", "-d", "first"), "invalid int value: 'first'"),
        (("-l", "-i"), "not allowed with argument"),
        (("--reset",), "unrecognized arguments: --reset"),
    ],
)
def test_senseless_arguments_are_2(
    arguments: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = gc_info.main(arguments)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("command", ["-l", "-i", "--ipu-count", "--ipu-arch", "--tile-clock-speed"])
def test_an_unknown_device_is_1(command: str, info: Run) -> None:
    complaint = "gc-info: there is no device Id 31: 16 IPUs have the ids 0 to 30\n"
    assert info(command, "-d", "31") == (1, [], complaint)


@pytest.mark.parametrize("main", [gc_info.main, gc_monitor.main])
def test_a_senseless_number_of_ipus_is_1(
    main: Callable[[list[str]], int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("GPUSIM_IPUS", "12")
    assert main(["-l"] if main is gc_info.main else []) == 1
    assert "GPUSIM_IPUS='12': expected a power of two from 1 to 1024" in capsys.readouterr().err


def test_a_folder_that_cannot_be_used_is_said_and_the_rest_is_shown(
    info: Run, folder: Path
) -> None:
    folder.symlink_to("nowhere")
    code, lines, errors = info("-i", "-d", "0")
    assert (code, lines[1]) == (0, "  id: 0")
    assert "is not a usable folder" in errors
    assert gc_monitor.main(["--no-card-info"]) == 1


@pytest.mark.parametrize("main", [gc_info.main, gc_monitor.main])
@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_are_0(
    main: Callable[[list[str]], int], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([option])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(("usage: gc-", f"gpusim {gpusim.__version__}"))


def test_the_commands_are_installed_under_their_names() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for name in ("gc-info", "gc-monitor"):
        module, function = scripts[name].split(":")
        assert callable(getattr(import_module(module), function))


@pytest.mark.parametrize(
    ("module", "arguments", "first"),
    [
        ("gc_info", ("-l",), "Graphcore device listing:"),
        ("gc_monitor", ("--no-card-info",), "+----"),
    ],
)
def test_the_commands_run_as_modules(module: str, arguments: tuple[str, ...], first: str) -> None:
    command = [sys.executable, "-m", f"gpusim.devices.{module}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(first)


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    command = [sys.executable, "-m", "gpusim.devices.gc_info", "-l"]
    environment = os.environ | {"GPUSIM_IPUS": "1024"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0


# ---------------------------------------------------------------- gc-monitor


def monitor(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    assert gc_monitor.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line[0] == line[-1] and line[0] in "+|" for line in lines)
    return lines


@pytest.mark.usefixtures("no_driver")
def test_the_monitor_shows_the_ipus_and_that_nobody_uses_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSIM_IPUS", "8")
    lines = monitor(capsys)
    assert "partition gpusim [active] has 8 IPUs" in lines[1]
    cells = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    assert ("127.0.0.2", "4", "3", "host") in cells
    assert "No attached processes in partition gpusim" in lines[-2]


def test_the_monitor_shows_who_uses_what(capsys: pytest.CaptureFixture[str]) -> None:
    stale = locks.try_hold([5], b'{"pid": 1, "device": 5, "user": "ghost"}')
    assert stale is not None
    for lock in stale._locks:  # as a killed process leaves it: written, not locked
        lock.release()
    with attach(Table().device(17)), attach(Table().device(9)):
        lines = monitor(capsys, "--no-card-info")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[3] == ["PID", "Command", "Since", "Time", "User", "Device", "ID"]
    rows = [row for row in cells if row[0] == str(os.getpid())]
    assert [row[5:] for row in rows] == [["17", "2"], ["17", "3"], ["9", "9"]]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", rows[0][2])
    assert re.fullmatch(r"\d+s", rows[0][3])
    assert "ghost" not in "\n".join(lines)


def test_the_monitor_shows_a_holder_that_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    hold = locks.try_hold([5], json.dumps({"command": "x" * 100}).encode())
    assert hold is not None
    lines = monitor(capsys, "--no-card-info")
    hold.release()
    cells = [cell.strip() for cell in lines[-2].strip("|").split("|")]
    assert cells == ["N/A", "x" * 45 + "...", "N/A", "N/A", "N/A", "N/A", "5"]
