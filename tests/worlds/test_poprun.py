"""poprun with a real mpirun: the instances' variables, the output, and the end of a run.

A run's processes have a word of the test's in their environment, by which those left are found.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import gpusim
from gpusim.runtime.activity import Activity
from gpusim.tools.launch import crashes, main, mpirun, report
from gpusim.tools.launch.crashes import Crash, HeldErrors, read_crash
from gpusim.tools.launch.layout import hosts_of, lay_out
from gpusim.tools.launch.report import Failure, blocking_instance, failure_in
from tests.oracles.budget import slow
from tests.oracles.environment import environment_outside_launchers
from tests.oracles.machine_time import PATIENCE, until

ROOT = Path(__file__).parents[2]

HELLO = """
import os, subprocess, sys, time
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
print("hello", os.getpid(), flush=True)
"""
# Starts a child in its process group, and one in another session; then it stays, for longer than
# PATIENCE: what waits for its end hangs.
STAY = (
    HELLO
    + """
subprocess.Popen(["sleep", "7200"])
subprocess.Popen(["sleep", "7200"], start_new_session=True)
print("ready", flush=True)
time.sleep(7200)
"""
)


class Run:
    """poprun with arguments, as a process."""

    def __init__(self, folder: Path, program: str, *arguments: str, **options: object) -> None:
        self.word = f"GPUSIM_TEST_WORD={uuid.uuid4()}"
        name, value = self.word.split("=")
        script = folder / "program.py"
        script.write_text(program)
        environ = environment_outside_launchers()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpusim.tools.launch", *arguments, sys.executable, str(script)],
            env=environ | {name: value, "PYTHONPATH": str(ROOT)},
            stdin=options.get("stdin", subprocess.DEVNULL),
            cwd=options.get("cwd"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self) -> tuple[int, list[str], str]:
        """Exit code, output lines in order of the instances, and errors."""
        out, errors = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, sorted(out.splitlines()), errors

    def lines_until(self, text: str, times: int) -> dict[int, list[str]]:
        """The lines of each instance, until the text has occurred in `times` of them."""
        lines: dict[int, list[str]] = {}
        assert self.process.stdout
        while times:
            line = self.process.stdout.readline()
            assert line, self.process.communicate()[1]
            match = re.fullmatch(r"\[\d+,(\d+)\]<stdout>: ?(.*)\n", line)
            assert match, line
            lines.setdefault(int(match[1]), []).append(match[2])
            times -= text in match[2]
        return lines

    def left(self) -> list[str]:
        """The command lines of the processes that there still are."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if self.word.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append((entry / "cmdline").read_text().replace("\0", " "))
            except OSError:
                continue
        return found

    def all_gone(self) -> bool:
        return until(lambda: not self.left())


@pytest.fixture
def poprun(tmp_path: Path) -> Iterator[object]:
    runs: list[Run] = []

    def start(program: str, *arguments: str, **options: object) -> Run:
        runs.append(Run(tmp_path, program, *arguments, **options))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
        run.process.communicate()
        assert run.all_gone(), run.left()


# ---------------------------------------------------------------- input and output


def test_each_instance_finds_its_share(poprun) -> None:
    program = """
import os
names = "TOTAL_REPLICAS IPUS_PER_REPLICA LOCAL_REPLICAS".split()
found = [os.environ[f"POPDIST_NUM_{name}"] for name in names]
for name in "REPLICA_INDEX_OFFSET UNIFORM_REPLICAS_PER_INSTANCE LOCAL_INSTANCE_INDEX".split():
    found.append(os.environ[f"POPDIST_{name}"])
print(*found, os.environ["GPUSIM_IPUS"], os.environ["ONE"], os.environ["TWO"])
"""
    options = ("--num-instances", "3", "--num-replicas", "7", "--ipus-per-replica", "2")
    mpi = ("--mpi-global-args=-x ONE='a b'", "--mpi-local-args", "-x TWO=2", "-vv")
    vipu = ("--vipu-partition", "P", "--update-partition=yes", "--remove-partition", "no")
    code, lines, errors = poprun(program, *options, *mpi, *vipu).end()
    assert code == 0, errors
    assert lines == [  # blocks of 8 IPUs an instance
        "[1,0]<stdout>: 7 2 3 0 0 0 32 a b 2",
        "[1,1]<stdout>: 7 2 2 3 0 1 32 a b 2",
        "[1,2]<stdout>: 7 2 2 5 0 2 32 a b 2",
    ]
    assert "7 replica(s) of 2 IPU(s), 3, 2, 2 in each of 3 instance(s)" in errors
    assert re.search(r"POPRUN \[D\] Running command: \S*mpirun --tag-output .* -np 1 -x", errors)
    ignored = "--vipu-partition, --update-partition, --remove-partition: no effect"
    assert ignored in errors


def test_output_comes_line_by_line(poprun, tmp_path: Path) -> None:
    program = HELLO + "while not os.path.exists('go'): time.sleep(0.05)"
    program = program.replace("'go'", repr(str(tmp_path / "go")))
    run = poprun(program, "--num-instances", "2", "--host", "localhost")
    assert sorted(run.lines_until("hello", 2)) == [0, 1]  # while both still run
    (tmp_path / "go").touch()
    assert run.end()[0] == 0


def test_only_the_output_of_one_instance(poprun, tmp_path: Path) -> None:
    program = (
        HELLO
        + """
print("fine", rank, file=sys.stderr)
open(f"FOLDER/{rank}", "w").close()
if rank:
    while not os.path.exists("FOLDER/0"):
        time.sleep(0.05)
    time.sleep(2)  # until mpirun has passed on what 0 wrote
    sys.exit("broken")
time.sleep(7200)
"""
    )
    program = program.replace("FOLDER", str(tmp_path))
    run = poprun(program, "--num-instances", "2", "--only-output-from-instance", "0")
    code, lines, errors = run.end()
    assert code == 1
    assert [line.split(":")[0] for line in lines] == ["[1,0]<stdout>"]
    shown, hidden = errors.split("poprun: the last errors of instance 1, which were not shown:\n")
    assert "fine 0" in shown and "fine 1" not in shown
    assert "fine 1" in hidden and "broken" in hidden
    assert "poprun: instance 1 exited with code 1" in hidden


def test_standard_input_is_instance_0s_to_its_end(poprun, tmp_path: Path) -> None:
    program = "import os, sys\nprint(len(sys.stdin.read()), os.environ['OMPI_COMM_WORLD_RANK'])"
    (tmp_path / "input").write_text("a line\n" * 100_000)
    with (tmp_path / "input").open() as source:
        _, lines, errors = poprun(program, "--num-instances", "2", stdin=source).end()
    assert lines == ["[1,0]<stdout>: 700000 0", "[1,1]<stdout>: 0 1"], errors


# ---------------------------------------------------------------- faults


def test_a_killed_instance_ends_the_run_and_is_named(poprun, tmp_path: Path) -> None:
    program = (
        HELLO
        + """
from gpusim.runtime import activity
activity.note("lax.psum over 'i' of float32[4]" if rank != 2 else None)
print("ready", flush=True)
open(f"FOLDER/{rank}", "w").close()
if rank == 1:
    while not all(os.path.exists(f"FOLDER/{each}") for each in range(3)):
        time.sleep(0.05)
    time.sleep(1)
    os.kill(os.getpid(), 9)
time.sleep(7200)
"""
    )
    program = program.replace("FOLDER", str(tmp_path))
    code, _, errors = poprun(program, "--num-instances", "3").end()
    assert code == 128 + signal.SIGKILL
    last = [line for line in errors.splitlines() if line.startswith("poprun: ")]
    assert re.fullmatch(r"poprun: instance 1 .*was killed by SIGKILL", last[0])
    since = r"\(since \d\d:\d\d:\d\d, for \d+\.\d s\)"
    for line, instance, doing in zip(
        last[1:],
        (1, 0, 2),  # the one that failed first
        (*("in lax.psum over 'i' of float32[4]",) * 2, "running code of its own"),
        strict=True,
    ):
        expected = rf"poprun:   instance {instance} was {re.escape(doing)} {since}"
        assert re.fullmatch(expected, line), line
    seconds = re.search(r"for (\d+\.\d) s", last[1])
    assert seconds and float(seconds[1]) >= 0.9


# Starting, importing, connecting, waiting.
@pytest.mark.parametrize("moment", [*slow(0.0, 0.2), 0.5, *slow(1.0)])
def test_it_does_not_matter_when_an_instance_is_killed(poprun, moment: float) -> None:
    program = (
        HELLO
        + """
from gpusim import popdist
popdist.init()
print("joined", flush=True)
while True:
    popdist.synchronize()
"""
    )
    run = poprun(program, "--num-instances", "2")
    # The last moment is one at which they have connected, however long that takes.
    killed = int(run.lines_until("joined" if moment > 0.5 else "hello", 2)[1][0].split()[1])
    time.sleep(moment)
    os.kill(killed, signal.SIGKILL)
    code, _, errors = run.end()
    assert code == 128 + signal.SIGKILL
    # Open MPI does not always know which one it was that died while it connected.
    known = "instance 1 " if moment > 0.5 else "(an instance|instance 1) "
    assert re.search(rf"^poprun: {known}.*was killed by SIGKILL", errors, re.MULTILINE), errors
    assert run.all_gone(), run.left()


@pytest.mark.parametrize(
    ("ending", "code", "how"),
    [
        ("sys.exit(3)", 3, "exited with code 3"),
        ("raise ValueError('no')", 1, r"failed at \S+program.py:6: ValueError: no"),
        ("os.abort()", 128 + signal.SIGABRT, r"was killed by SIGABRT at \S+program.py:6"),
        ("from mpi4py import MPI; MPI.COMM_WORLD.Abort(7)", 7, "ended the run with exit code 7"),
    ],
)
def test_the_first_failing_exit_code_is_popruns(poprun, ending: str, code: int, how: str) -> None:
    program = HELLO + f"if rank:\n    {ending}\ntime.sleep(7200)\n"
    if "MPI" in ending:
        program = "from mpi4py import MPI\n" + program
    found, _, errors = poprun(program, "--num-instances", "2").end()
    assert found == code, errors
    assert re.search(rf"^poprun: instance 1 .*{how}$", errors, re.MULTILINE), errors


IN_A_WORLD = """
import ctypes, os, sys, time
import numpy as np
import gpusim
from gpusim import lax

def loss(v):
    return lax.psum(v, "i")

def step(x):
    if FAILS:
        FAULT
    return gpusim.vmap(loss, axis_name="i")(x)

with gpusim.World.from_environment() as world:
    print("ready", flush=True)
    x = np.ones((world.local_replicas, 3), np.float32)
    gpusim.vmap(loss, axis_name="i")(x)
    step(x)
"""
ONE, ALL = "world.instance == 1", "True"
WAIT = "instances 0 and 2 were in lax.psum over 'i' of float32[3] at program.py:8"
FAULTS = {  # who has the fault, the code, the first line, and one about the others
    "an error": (
        *(ONE, "raise ValueError('the loss is nan')"),
        *("instance 1 failed at program.py:12: ValueError: the loss is nan", WAIT),
    ),
    "an error in all": (
        *(ALL, "raise ValueError('the loss is nan')"),
        *("failed at program.py:12: ValueError: the loss is nan", "failed in the same way"),
    ),
    "a replica's error": (
        *(ONE, "return gpusim.pmap(lambda v: {}['w'], 'i', schedule='one')(x)"),
        "instance 1 failed at program.py:12: ReplicaError: replica 2 of axis 'i' raised KeyError",
        WAIT,
    ),
    "a deadlock": (
        *(ONE, "return gpusim.pmap(lambda v: v if lax.axis_index('i') % 2 else loss(v), 'i')(x)"),
        *("instance 1 failed at program.py:12: DeadlockError: no replica can go on", WAIT),
    ),
    "another call": (
        *(ONE, "return gpusim.vmap(lambda v: lax.pmax(v, 'i'), axis_name='i')(x)"),
        "instance 1 failed at program.py:12: CollectiveMismatchError: instances do not make the "
        "same call: instance 1 (replicas 2 to 3) calls lax.pmax over 'i' of float32[3] at "
        "program.py:12, instance 0 (replicas 0 to 1) calls lax.psum",
        "instances 0 and 2 noticed it at program.py:8",
    ),
    "exit(0)": (
        *(ONE, "sys.exit(0)"),
        "leaves the world by sys.exit(0) at program.py:12, but instance 0 (replicas 0 to 1) calls "
        "lax.psum over 'i' of float32[3] at program.py:8",
        WAIT,
    ),
    "exit(3)": (
        *(ONE, "sys.exit(3)"),
        *("instance 1 exited with code 3, after sys.exit(3) at program.py:12", WAIT),
    ),
    "SIGKILL": (*(ONE, "os.kill(os.getpid(), 9)"), *("was killed by SIGKILL", WAIT)),
    "a segmentation fault": (
        *(ONE, "ctypes.string_at(0)"),
        *("was killed by SIGSEGV at program.py:12", WAIT),
    ),
    "Ctrl-C": (
        *(ALL, "print('asleep', flush=True); time.sleep(7200)"),
        "stopped by SIGINT",
        "instances 0 to 2 were in code of its own at program.py:12",
    ),
}


@pytest.mark.parametrize("fault", ["an error", "exit(0)", *slow(*[*FAULTS][1:5], *[*FAULTS][6:])])
def test_the_report_of_a_failure_is_a_screen(fault: str, poprun, tmp_path: Path) -> None:
    fails, code, first, others = FAULTS[fault]
    program = IN_A_WORLD.replace("FAILS", fails).replace("FAULT", code)
    arguments = ("--num-instances", "3", "--num-replicas", "6")
    run = poprun(program, *arguments, cwd=tmp_path)
    if fault == "Ctrl-C":
        run.lines_until("asleep", 3)
        run.process.send_signal(signal.SIGINT)
    exit_code, _, errors = run.end()
    assert exit_code != 0
    lines = [line.removeprefix("poprun: ") for line in errors.splitlines()]
    assert len(lines) < 15 and all(line.startswith("poprun: ") for line in errors.splitlines())
    assert first in lines[0], errors  # the culprit, with its line
    assert any(others in line for line in lines[1:]), errors
    assert len({re.sub(r"\d", "", line) for line in lines}) == len(lines), errors  # none twice
    assert not re.search(r"gpusim/|/lib/python|\[\d+,\d+\]<stderr>", errors), errors
    if fault in ("an error", "a replica's error"):
        assert "    program.py:19 in <module>: step(x)" in errors
    if fault == "a replica's error":
        run = poprun(program, "--verbose", *arguments, cwd=tmp_path)
        verbose = run.end()[2]
        tags = {f"[1,{i}]<stderr>: Traceback (most recent call last)" for i in range(3)}
        assert all(tag in verbose for tag in tags) and "gpusim/maps/vmap.py" in verbose
        assert lines[0] in verbose and "prterun detected" in verbose


@pytest.mark.slow
def test_errors_that_end_nothing_are_shown(poprun) -> None:
    program = """
import os, sys, time, traceback
try:
    raise ValueError("on the way")
except ValueError:
    traceback.print_exc()
print("a word", file=sys.stderr, flush=True)
if os.environ["OMPI_COMM_WORLD_RANK"] == "0":
    time.sleep(9)  # longer than errors are held back
    print("late", file=sys.stderr, flush=True)
"""
    code, _, errors = poprun(program, "--num-instances", "2").end()
    assert code == 0
    for instance in (0, 1):
        tag = rf"\[1,{instance}\]<stderr>: "
        assert re.search(rf"{tag}Traceback(.*\n)+{tag}ValueError: on the way\n", errors), errors
        assert re.search(rf"{tag}a word\n", errors), errors
    assert errors.index("on the way") < errors.index("late")


def test_one_that_ends_while_all_others_wait_for_it_is_found(poprun) -> None:
    program = (
        HELLO
        + """
from gpusim import popdist
popdist.init()
if rank:
    sys.exit(3)  # and now it is in MPI_Finalize, for ever
popdist.synchronize()
"""
    )
    code, _, errors = poprun(program, "--num-instances", "2").end()
    assert code != 0
    how = r"has ended its program by sys.exit\(3\) at \S+program.py:9 while the others wait for it"
    assert re.search(rf"^poprun: instance 1 {how}$", errors, re.M), errors
    assert re.search(r"^poprun:   instance 0 was in popdist.synchronize ", errors, re.M), errors


def test_an_instance_that_ignores_sigterm_is_killed(poprun) -> None:
    program = (
        HELLO
        + """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(7200)
"""
    )
    run = poprun(program, "--num-instances", "2")
    run.lines_until("ready", 2)
    run.process.terminate()
    assert run.end()[0] == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_process(poprun, number: signal.Signals) -> None:
    run = poprun(STAY, "--num-instances", "2")
    run.lines_until("ready", 2)
    assert len(run.left()) >= 8
    run.process.send_signal(number)
    code, _, errors = run.end()
    assert code == 128 + number
    assert f"poprun: stopped by {number.name}" in errors
    assert run.all_gone(), run.left()


@pytest.mark.parametrize("victim", ["poprun", "mpirun"])
def test_not_even_sigkill_leaves_a_process_or_a_session_folder(
    poprun, victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    run = poprun(STAY, "--num-instances", "2")
    run.lines_until("ready", 2)
    if victim == "poprun":
        run.process.kill()
    else:
        children = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text()
        for child in children.split():
            if "prterun" in Path(f"/proc/{child}/cmdline").read_text():  # which mpirun becomes
                os.kill(int(child), signal.SIGKILL)
        code, _, errors = run.end()
        assert code == 128 + signal.SIGKILL
        assert "poprun: mpirun ended with exit code 137" in errors
    assert run.all_gone(), run.left()
    assert not list(temporary.rglob("ompi.*")) and not list(temporary.iterdir())


def test_ctrl_c_of_a_terminal_reaches_all_once(tmp_path: Path) -> None:
    word = f"GPUSIM_TEST_WORD={uuid.uuid4()}"
    script = tmp_path / "program.py"
    script.write_text(STAY)
    pid, terminal = os.forkpty()
    if pid == 0:
        name, value = word.split("=")
        os.environ |= {name: value, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "gpusim.tools.launch", "--num-instances", "2"]
        os.execv(command[0], [*command, sys.executable, str(script)])
    seen = b""
    while seen.count(b"ready") < 2:
        seen += os.read(terminal, 4096)
    os.write(terminal, b"\x03")
    try:
        while chunk := os.read(terminal, 4096):
            seen += chunk
    except OSError:  # the terminal's other end is closed
        pass
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 130
    assert b"poprun: stopped by SIGINT" in seen


def test_user_signals_are_passed_on(poprun) -> None:
    program = (
        HELLO
        + """
import signal
signal.signal(signal.SIGUSR1, lambda *_: (print("usr1", flush=True), os._exit(0)))
print("ready", flush=True)
time.sleep(7200)
"""
    )
    run = poprun(program, "--num-instances", "2")
    run.lines_until("ready", 2)
    run.process.send_signal(signal.SIGUSR1)
    run.lines_until("usr1", 2)
    assert run.end()[0] == 0


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "the program to run is missing"),
        ("--num-instances 2 --", "the program to run is missing"),
        ("--num-instances 0 true", "at least 1 is needed, got '0'"),
        ("--num-instances 3 --num-replicas 2 true", "--num-replicas 2: expected at least one"),
        ("--num-instances 2 --host a,b,c true", "expected at least one for each of 3 hosts"),
        ("--host a,,b true", "expected names like H1,H2 or H[1-3,5]"),
        ("--host a[3-1] true", "3-1 is not an ascending range"),
        ("--host a,a --num-instances 2 true", "a is named twice"),
        ("--only-output-from-instance 1 true", "expected less than --num-instances 1"),
        ("--update-partition maybe true", "expected yes or no, got 'maybe'"),
        ("--mpi-local-args 'a true", "No closing quotation"),
        ("--num 2 true", "unrecognized arguments"),
    ],
)
def test_arguments_that_make_no_sense(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_too_few_simulated_ipus_are_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSIM_IPUS", "8")
    with pytest.raises(SystemExit):
        main("--num-instances 3 --num-replicas 9 true".split())
    assert "9 replicas of 1 IPUs in 3 instances need 16 IPUs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("no-such-program", "there is no program 'no-such-program'"),
        (str(ROOT), "is a folder, not a program"),
        (str(ROOT / "README.md"), "is not executable: put its interpreter before it"),
    ],
)
def test_a_program_that_cannot_run_is_said_before_it_starts(
    program: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([program]) == 2
    assert message in capsys.readouterr().err


def test_without_mpirun_poprun_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([sys.executable]) == 2
    assert "there is no mpirun: pip install 'gpusim[mpi]'" in capsys.readouterr().err
    other = tmp_path / "mpirun"
    other.write_text("#!/bin/sh\necho HYDRA build details\n")
    other.chmod(0o755)
    assert main([sys.executable]) == 2
    assert "is not Open MPI's mpirun, which is needed: pip" in capsys.readouterr().err


def test_poprun_is_installed_as_a_command() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"]["poprun"] == "gpusim.tools.launch:main"


def test_hosts_share_the_instances_in_blocks() -> None:
    layout = lay_out(5, 12, 2, hosts_of("a[1-2]"))
    found = [(i.host, i.local_index, i.replicas, i.offset) for i in layout.instances]
    assert found == [
        ("a1", 0, 3, 0),
        ("a1", 1, 3, 3),
        ("a1", 2, 2, 6),
        ("a2", 0, 2, 8),
        ("a2", 1, 2, 10),
    ]
    assert not layout.uniform and layout.ipus_per_host == 32  # three blocks of 8 on a1


def test_other_hosts_get_the_search_paths_and_gpusims_variables() -> None:
    layout = lay_out(2, 2, 1, ("a", "b"))
    environ = {"PATH": "/bin", "GPUSIM_IPUS": "4", "HOME": "/root"}
    line = mpirun.command_line("mpirun", layout, ["prog"], local_args=["-x", "A"], environ=environ)
    first, second = " ".join(line).split(" : ")
    for host, part in (("a", first), ("b", second)):
        assert f"-np 1 --host {host} " in part
        assert "-x GPUSIM_IPUS -x PATH -x A " in part and part.endswith(" prog")
        assert "HOME" not in part


# ---------------------------------------------------------------- the report


@pytest.mark.parametrize(
    ("messages", "failure"),
    [
        (  # Open MPI 4
            "mpirun noticed that process rank 3 with PID 0 on node n1 exited on signal 11",
            Failure(3, "was killed by SIGSEGV", 0, "n1"),
        ),
        (
            "The first process to do so was:\n\n  Process name: [[5178,1],2]\n  Exit code:    9\n",
            Failure(2, "exited with code 9", code=9),
        ),
        (
            "mpirun has exited due to process rank 0 with PID 5 on\nnode x exiting improperly.",
            Failure(0, "ended without MPI_Finalize", 5, "x"),
        ),
        ("There are not enough slots available in the system", None),
    ],
)
def test_what_mpirun_says_is_understood(messages: str, failure: Failure | None) -> None:
    assert failure_in(messages, 9) == failure


def test_who_waits_a_while_is_not_left_alone() -> None:
    late = 100.0 + report.BLOCKED_TOGETHER
    ended, waits = Activity(report.ENDED, 99.0, 1), Activity("lax.psum", 100.0, 2)
    found = blocking_instance({0: waits, 1: ended}, 2, late)
    assert found and found.instance == 1
    assert blocking_instance({0: waits, 1: ended}, 2, late - 0.1) is None  # not for long enough
    assert blocking_instance({0: Activity(None, 1.0, 2), 1: ended}, 2, late) is None  # it computes
    assert blocking_instance({1: ended}, 2, late) is None  # the other has no heartbeat yet
    assert blocking_instance({0: ended, 1: ended}, 2, late) is None  # both end
    assert blocking_instance({0: waits, 1: waits}, 2, late) is None  # a long exchange


def traceback(error: str, *frames: tuple[str, int]) -> str:
    lines = [f'  File "{file}", line {line}, in f\n    x()\n    ^^^\n' for file, line in frames]
    return "Traceback (most recent call last):\n" + "".join(lines) + error + "\n"


HERE = traceback("KeyError: 'w'", ("a.py", 3), (gpusim.__file__, 2), (os.__file__, 4))


@pytest.mark.parametrize(
    ("text", "message", "place", "frames"),
    [
        (HERE, "KeyError: 'w'", "a.py:3", ["a.py:3 in f: x()"]),
        (  # a message of two lines, a note, and gpusim's own line
            traceback("gpusim.errors.DeadlockError: no\nway\nraised in replica 3", ("b.py", 1))
            + "gpusim: instance 1 failed with DeadlockError; see above\n",
            *("DeadlockError: no\nway\nraised in replica 3", "b.py:1", ["b.py:1 in f: x()"]),
        ),
        (  # the cause shows the place
            f"{HERE}\n{crashes.CAUSED}\n\n{traceback('ReplicaError: no', ('b.py', 1))}",
            *("ReplicaError: no", "a.py:3"),
            ["b.py:1 in f: x()", "caused by KeyError: 'w'", "a.py:3 in f: x()"],
        ),
        (
            f"{HERE}\n{crashes.MEANWHILE}\n\n{traceback('ValueError', ('b.py', 1))}",
            *("ValueError", "b.py:1", ["b.py:1 in f: x()"]),
        ),
        (
            "  File \"a.py\", line 1\n    def f(\n         ^\nSyntaxError: '(' was never closed\n",
            *("SyntaxError: '(' was never closed", "a.py:1", ["a.py:1: def f("]),
        ),
        (
            "Fatal Python error: Segmentation fault\n\nCurrent thread 0x07 (most recent call "
            'first):\n  File "b.py", line 2 in g\n  File "a.py", line 9 in <module>\n\n'
            "Extension modules: numpy (total: 1)\n",
            *("Fatal Python error: Segmentation fault", "b.py:2"),
            ["a.py:9 in <module>", "b.py:2 in g"],
        ),
        ("no data\n", None, None, None),
    ],
)
def test_what_an_instance_writes_at_its_end_is_understood(text, message, place, frames) -> None:
    crash = read_crash(text)
    if message is None:
        assert crash is None
    else:
        assert crash and (crash.message, crash.place, list(crash.frames)) == (
            *(message, place, frames),
        )


def crash(kind: str, line: int) -> Crash:
    return Crash(f"gpusim.errors.{kind}: instance 2 (replica 2) is gone; so", (), f"a.py:{line}")


def test_the_culprit_is_the_one_that_the_others_errors_come_from() -> None:
    lost, own = crash("InstanceError", 8), crash("ValueError", 3)
    exited = Failure(0, "exited with code 1", code=1)
    assert report.culprit(exited, {0: lost, 1: own}) == 1
    assert report.culprit(exited, {0: own, 1: own}) == 0
    assert report.culprit(exited, {0: lost, 1: lost}) == 2  # whom the messages name
    assert report.culprit(exited, {1: lost}) == 0  # sys.exit
    assert report.culprit(Failure(1, "was killed by SIGKILL"), {0: own}) == 1
    assert report.culprit(None, {}) is None
    same, other = crash("CollectiveMismatchError", 8), crash("CollectiveMismatchError", 9)
    assert report.culprit(exited, {0: same, 1: same, 2: other}) == 2  # the odd one out
    assert report.culprit(exited, {0: same, 1: other}) == 0


def test_one_that_has_ended_is_named_so_even_if_mpirun_sees_its_exit_first() -> None:
    how = "has ended its program by sys.exit(3) at a.py:9"
    waits = Crash(f"gpusim.errors.InstanceError: instance 1 (replica 1) {how}; so", (), "a.py:8")
    run = report.Run(2, {0: waits}, {}, 0.0)
    for failure in (Failure(1, "exited with code 3", code=3), Failure(0, "exited with code 1")):
        first, *_ = report.last_lines("", failure, run)
        assert first == f"instance 1 {how} while the others wait for it"


def test_long_tracebacks_are_cut() -> None:
    frames = tuple(f"a.py:{n} in f: f()" for n in range(1000))
    deep = Crash("RecursionError: no", frames, "a.py:999")
    lines = [*report.last_lines("", None, report.Run(1, {0: deep}, {}, 0.0))]
    assert lines[0] == "instance 0 failed at a.py:999: RecursionError: no"
    assert len(lines) == 2 + report.MOST_LINES and "... 988 more lines ..." in lines[7]


def test_lines_of_an_error_are_held_back_for_a_while_only() -> None:
    held = HeldErrors()
    for line in (b"[1,2]<stderr>: Traceback (most recent call last):\n", b"[1,2]<stderr>:   File"):
        assert held.take(line, continued=False)
    assert held.take(b' "a.py", line 1\n', continued=True)  # the rest of a line
    assert not held.take(b"[1,1]<stderr>: fine\n", continued=False)
    assert held.texts() == {2: 'Traceback (most recent call last):\n  File "a.py", line 1\n'}
    assert held.release() == b"" and held
    text = held.release(older_than=0)
    assert text.count(b"\n") == 2 and text.startswith(b"[1,2]<stderr>: Traceback") and not held
    assert not held.take(b"[1,2]<stderr>: fine\n", continued=False)
