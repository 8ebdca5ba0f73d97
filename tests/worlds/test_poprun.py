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

from gpusim.runtime.activity import Activity
from gpusim.tools.launch import main, mpirun, report
from gpusim.tools.launch.layout import hosts_of, lay_out
from gpusim.tools.launch.report import Failure, blocking_instance, failure_in
from tests.oracles.budget import slow
from tests.oracles.machine_time import PATIENCE, running

ROOT = Path(__file__).parents[2]
LAUNCHERS = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "SLURM_", "POPDIST_", "GPUSIM_IPUS")

HELLO = """
import os, subprocess, sys, time
rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
print("hello", os.getpid(), flush=True)
"""
# Starts a child in its process group, and one in another session; then it stays.
STAY = (
    HELLO
    + """
subprocess.Popen(["sleep", "300"])
subprocess.Popen(["sleep", "300"], start_new_session=True)
print("ready", flush=True)
time.sleep(300)
"""
)


class Run:
    """poprun with arguments, as a process."""

    def __init__(self, folder: Path, program: str, *arguments: str, **options: object) -> None:
        self.word = f"GPUSIM_TEST_WORD={uuid.uuid4()}"
        name, value = self.word.split("=")
        script = folder / "program.py"
        script.write_text(program)
        environ = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHERS)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "gpusim.tools.launch", *arguments, sys.executable, str(script)],
            env=environ | {name: value, "PYTHONPATH": str(ROOT)},
            stdin=options.get("stdin", subprocess.DEVNULL),  # type: ignore[call-overload]
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def end(self, patience: float = PATIENCE) -> tuple[int, list[str], str]:
        """Exit code, output lines in order of the instances, and errors."""
        out, errors = self.process.communicate(timeout=patience)
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

    def all_gone(self, patience: float = 10) -> bool:
        end = running() + patience
        while self.left() and running() < end:
            time.sleep(0.05)
        return not self.left()


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


def test_only_the_output_of_one_instance(poprun) -> None:
    program = (
        HELLO
        + """
print("fine", rank, file=sys.stderr)
if rank:
    time.sleep(0.3)
    sys.exit("broken")
time.sleep(300)
"""
    )
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


def test_a_killed_instance_ends_the_run_and_is_named(poprun) -> None:
    program = (
        HELLO
        + """
from gpusim.runtime import activity
activity.note("lax.psum over 'i' of float32[4]" if rank != 2 else None)
print("ready", flush=True)
if rank == 1:
    time.sleep(1)
    os.kill(os.getpid(), 9)
time.sleep(300)
"""
    )
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
while True:
    popdist.synchronize()
"""
    )
    run = poprun(program, "--num-instances", "2")
    killed = int(run.lines_until("hello", 2)[1][0].split()[1])
    time.sleep(moment)
    os.kill(killed, signal.SIGKILL)
    began = running()
    code, _, errors = run.end()
    assert running() - began < 10
    assert code == 128 + signal.SIGKILL
    # Open MPI does not always know which one it was that died while it connected.
    known = "instance 1 " if moment > 0.5 else "(an instance|instance 1) "
    assert re.search(rf"^poprun: {known}.*was killed by SIGKILL", errors, re.MULTILINE), errors
    assert run.all_gone(1), run.left()


@pytest.mark.parametrize(
    ("ending", "code", "how"),
    [
        ("sys.exit(3)", 3, "exited with code 3"),
        ("raise ValueError('no')", 1, "exited with code 1"),
        ("os.abort()", 128 + signal.SIGABRT, "was killed by SIGABRT"),
        ("from mpi4py import MPI; MPI.COMM_WORLD.Abort(7)", 7, "ended the run with exit code 7"),
    ],
)
def test_the_first_failing_exit_code_is_popruns(poprun, ending: str, code: int, how: str) -> None:
    program = HELLO + f"if rank:\n    {ending}\ntime.sleep(300)\n"
    if "MPI" in ending:
        program = "from mpi4py import MPI\n" + program
    found, _, errors = poprun(program, "--num-instances", "2").end()
    assert found == code, errors
    assert re.search(rf"^poprun: instance 1 .*{how}$", errors, re.MULTILINE), errors


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
    began = running()
    code, _, errors = poprun(program, "--num-instances", "2").end()
    assert code != 0
    why = "InstanceError: instance 1 has ended its program"
    assert f"gpusim.errors.{why}" in errors and "popdist.synchronize()" in errors
    assert re.search(rf"^poprun: +instance 0 was in its end, after {why}", errors, re.M), errors
    assert running() - began < 30


def test_an_instance_that_ignores_sigterm_is_killed(poprun) -> None:
    program = (
        HELLO
        + """
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(300)
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
    assert run.all_gone(1), run.left()


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
time.sleep(300)
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
    assert main([program]) == 1
    assert message in capsys.readouterr().err


def test_without_mpirun_poprun_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([sys.executable]) == 1
    assert "there is no mpirun: pip install 'gpusim[mpi]'" in capsys.readouterr().err
    other = tmp_path / "mpirun"
    other.write_text("#!/bin/sh\necho HYDRA build details\n")
    other.chmod(0o755)
    assert main([sys.executable]) == 1
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
            Failure(2, "exited with code 9"),
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
