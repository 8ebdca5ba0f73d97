"""Attaching is exclusive among processes, threads and owners, and ends with its owner."""

from __future__ import annotations

import errno
import fcntl
import gc
import logging
import math
import multiprocessing
import os
import pickle
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from gpusim.devices import (
    AcquireError,
    Attachment,
    Connection,
    ConnectionType,
    DeviceError,
    Table,
    attach,
    holders,
    locks,
)
from tests.oracles.machine_time import PATIENCE, until

ROOT = Path(__file__).parents[2]
TABLE = Table(8)
PAIR, OTHER_PAIR, ALL = TABLE.device(8), TABLE.device(9), TABLE.device(14)
BUSY_AT_ONCE = r"^Failed to acquire device Id 8: IPU 0 is used by "


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A runtime folder that is empty, and missing."""
    monkeypatch.setenv("GPUSIM_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(locks, "GATE_PATIENCE", PATIENCE)  # others may be slow inside
    return tmp_path / "run"


def free(device_id: int) -> bool:
    try:
        attach(TABLE.device(device_id)).detach()
    except AcquireError:
        return False
    return True


@contextmanager
def other_process(device_id: int = 8, then: str = "sys.stdin.read()") -> Iterator[subprocess.Popen]:
    """A process that is attached to a device, and goes on with `then`."""
    program = f"""
import os, sys
from gpusim.devices import Table, attach, locks
locks.GATE_PATIENCE = {PATIENCE}
attachment = attach(Table(8).device({device_id}))
print("attached", flush=True)
{then}
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "attached\n"
            yield process
        finally:
            process.kill()


def descriptors_in(folder: Path) -> list[int]:
    """The descriptors of this process on files in the folder."""
    found = []
    for descriptor in range(1024):
        with suppress(OSError):
            if str(folder) in os.readlink(f"/proc/self/fd/{descriptor}"):
                found.append(descriptor)
    return found


def in_fork(question: Callable[[], object]) -> str:
    """The result of `question` in a forked child that ends without cleaning up."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, repr(question()).encode())
        except BaseException as error:
            os.write(writing, repr(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answer = pipe.read()
    os.waitpid(child, 0)
    return answer


# ---------------------------------------------------------------- exclusive


def test_two_owners_in_one_process_exclude_each_other() -> None:
    first = attach(PAIR)
    with pytest.raises(AcquireError, match=f"{BUSY_AT_ONCE}this process"):
        attach(PAIR)
    first.detach()
    with attach(PAIR) as second:
        assert second.attached and not first.attached
    assert not second.attached


def test_a_second_process_fails_at_once_and_is_told_who_has_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with other_process() as process, caplog.at_level(logging.DEBUG, "gpusim.devices"):
        with pytest.raises(AcquireError, match=f"{BUSY_AT_ONCE}process {process.pid} of "):
            attach(PAIR)
        assert not any("sleeping for" in each.msg for each in caplog.records)
        with attach(OTHER_PAIR):
            pass


@pytest.mark.parametrize("wait", ["", "0"])
def test_wait_for_ipu_unset_or_0_fails_at_once(wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPTORCH_WAIT_FOR_IPU", wait)
    with attach(PAIR), pytest.raises(AcquireError, match="Failed to acquire"):
        attach(PAIR)


@pytest.mark.parametrize("taken", [0, 1, 2, 3, 8, 9, 12])
def test_a_group_needs_all_of_its_ipus(taken: int) -> None:
    with attach(TABLE.device(taken)):
        assert not free(12) and not free(14)
        assert free(13), "the other half of the system is not concerned"


def test_a_group_that_fails_keeps_nothing() -> None:
    with attach(TABLE.device(7)):
        assert not free(14)
        assert all(free(ipu) for ipu in range(7))


def test_of_several_devices_the_first_free_one_is_taken() -> None:
    pairs = TABLE.of_size(2)
    taken = [attach(pairs) for _ in pairs]
    assert [attachment.device for attachment in taken] == list(pairs)
    with pytest.raises(AcquireError, match=r"^Failed to acquire 2 IPU\(s\): .*; and 4 more$"):
        attach(pairs)
    taken[2].detach()
    with attach(pairs) as again:
        assert again.device == pairs[2]


def test_of_many_threads_one_gets_the_device() -> None:
    barrier, won, lost = threading.Barrier(8), [], []

    def compete() -> None:
        barrier.wait()
        try:
            won.append(attach(ALL))
        except AcquireError as error:
            lost.append(error)

    threads = [threading.Thread(target=compete) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 7)


def test_groups_that_overlap_neither_deadlock_nor_overlap_in_time() -> None:
    overlapping = [TABLE.device(id) for id in (14, 12, 13, 8, 9, 2)]
    users: dict[int, int] = dict.fromkeys(range(8), 0)
    clashes: list[int] = []

    def use(k: int) -> None:
        for _ in range(5):
            with attach(overlapping[k], timeout=math.inf) as attachment:
                for ipu in attachment.device.ipus:
                    users[ipu] += 1
                    clashes.extend([ipu] * (users[ipu] != 1))
                for ipu in attachment.device.ipus:
                    users[ipu] -= 1

    threads = [threading.Thread(target=use, args=(k,)) for k in range(len(overlapping))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads)
    assert not clashes


def test_an_attempt_that_fails_disturbs_nobody_else() -> None:
    """IPU 0 is free all the time, though attempts at the group of IPUs 0 and 1 go on and on."""
    then = """
from gpusim.devices import AcquireError
while True:
    try:
        attach(Table(8).device(8))
    except AcquireError:
        pass
"""
    with other_process(1, then):
        assert all(free(0) for _ in range(100))


def test_an_attempt_that_fails_has_given_back_before_the_next_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    really_gate, left_locked = locks.gate, []

    @contextmanager
    def gate(folder: Path) -> Iterator[None]:
        with really_gate(folder):
            yield
            left_locked.append(locks.peek(folder / "ipu-0.lock") is not None)

    with attach(TABLE.device(1)):
        monkeypatch.setattr(locks, "gate", gate)
        with pytest.raises(AcquireError):
            attach(PAIR)
    assert left_locked == [False, False], "the attempt, and the look at who has it"


@pytest.mark.parametrize("action", [lambda: attach(PAIR).detach(), holders])
def test_attempts_and_looks_come_one_after_the_other(
    action: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    attach(PAIR).detach()
    thread = threading.Thread(target=action)
    with locks.gate(locks.open_folder()):
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()
    thread.join(PATIENCE)
    assert not thread.is_alive()


# ---------------------------------------------------------------- waiting


def test_waiting_ends_when_the_device_is_free(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("POPTORCH_WAIT_FOR_IPU", "1")
    with other_process() as process, caplog.at_level(logging.DEBUG, "gpusim.devices"):
        said = lambda: [each for each in caplog.records if "sleeping for" in each.msg]  # noqa: E731
        killer = threading.Thread(target=lambda: until(lambda: len(said()) > 1) and process.kill())
        killer.start()
        with attach(PAIR) as attachment:
            assert attachment.attached
        killer.join()
    messages = [record for record in caplog.records if "No IPU available, sleeping" in record.msg]
    assert [record.levelname for record in messages[:2]] == ["WARNING", "DEBUG"]


def test_waiting_in_one_thread_for_another() -> None:
    first = attach(PAIR)
    timer = threading.Timer(0.2, first.detach)
    timer.start()
    with attach(PAIR, timeout=math.inf) as second:
        assert second.attached
    timer.join()


def test_the_timeout_ends_waiting() -> None:
    with attach(PAIR):
        began = time.monotonic()
        with pytest.raises(AcquireError, match=r"device Id 8 within 0\.2 seconds: IPU 0 is used"):
            attach(PAIR, timeout=0.2)
        assert time.monotonic() - began >= 0.2


def test_ctrl_c_ends_waiting() -> None:
    program = """
import logging, signal, sys
from gpusim.devices import Table, attach
logging.basicConfig(stream=sys.stdout, format="%(message)s")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
try:
    attach(Table(8).device(8), timeout=float("inf"))
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""
    with attach(PAIR):
        command = [sys.executable, "-c", program]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("No IPU available, sleeping for")
            process.send_signal(signal.SIGINT)
            assert process.stdout.read() == "interrupted\n"
    assert process.returncode == 0


@pytest.mark.parametrize("timeout", [-1, math.nan])
def test_a_senseless_timeout_is_named(timeout: float) -> None:
    with pytest.raises(ValueError, match=r"timeout=.*expected a number of seconds"):
        attach(PAIR, timeout=timeout)


def test_a_senseless_wait_for_ipu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPTORCH_WAIT_FOR_IPU", "yes")
    with pytest.raises(ValueError, match="POPTORCH_WAIT_FOR_IPU='yes': expected 0 or 1"):
        attach(PAIR)
    with attach(PAIR, timeout=0):
        pass


def test_no_device_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a Device, or at least one"):
        attach([])


# ---------------------------------------------------------------- over


def test_an_owner_that_is_collected_lets_go() -> None:
    class Owner:
        def __init__(self) -> None:
            self.attachment = attach(PAIR)
            self.itself = self  # a cycle, as executors have them

    owner = Owner()
    assert not free(8)
    del owner
    gc.collect()
    assert free(8)


def test_detaching_twice_does_not_take_it_from_the_next_owner() -> None:
    first = attach(PAIR)
    first.detach()
    with attach(PAIR):
        first.detach()
        assert not free(8)


def test_a_killed_process_lets_go() -> None:
    with other_process() as process:
        assert not free(8)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert holders() == {}, "what it wrote about itself is stale"
        with attach(PAIR):
            pass


def test_a_process_that_ends_lets_go_and_leaves_no_record(folder: Path) -> None:
    with other_process(then="pass") as process:
        process.wait()
    assert free(8)
    assert (folder / "ipu-0.lock").read_bytes() == b""


def test_a_killed_process_lets_go_though_its_forked_child_lives() -> None:
    then = """
if os.fork() == 0:
    assert not attachment.attached
    print("child", os.getpid(), flush=True)
sys.stdin.read()
"""
    with other_process(then=then) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline().split()[1])
        try:
            assert not free(8)
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert free(8)
        finally:
            os.kill(child, signal.SIGKILL)


# ---------------------------------------------------------------- children


def test_a_forked_child_is_not_attached_and_cannot_detach_its_parent() -> None:
    attachment = attach(PAIR)

    def question() -> object:
        attached = attachment.attached
        attachment.detach()
        return attached, free(8)

    assert in_fork(question) == "(False, False)"
    assert attachment.attached
    assert not free(8)


def test_a_forked_child_that_ends_cleanly_leaves_its_parent_attached() -> None:
    attachment = attach(PAIR)
    child = os.fork()
    if child == 0:
        attachment._finalizer()  # what atexit does in a child that does not use os._exit
        os._exit(0)
    os.waitpid(child, 0)
    assert not free(8)


def test_a_forked_child_has_no_descriptor_of_the_lock_files(folder: Path) -> None:
    attachment = attach(PAIR)

    assert len(descriptors_in(folder)) == 2, "two lock files"
    assert in_fork(lambda: descriptors_in(folder)) == "[]"
    assert attachment.attached


def test_children_forked_while_threads_attach_inherit_nothing() -> None:
    """Nor does any deadlock: the fork waits until no attempt is half done."""
    ended = threading.Event()

    def attach_and_detach() -> None:
        while not ended.is_set():
            attach(ALL, timeout=math.inf).detach()

    thread = threading.Thread(target=attach_and_detach)
    thread.start()
    children = []
    try:
        for _ in range(20):
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            children.append(child)
    finally:
        ended.set()
        thread.join()
        still_free = free(14)
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert still_free


def test_a_forked_child_can_attach_to_another_device() -> None:
    with attach(PAIR):
        assert in_fork(lambda: attach(OTHER_PAIR).attached) == "True"
    assert free(9)


def ask_for_the_pair(answers: multiprocessing.Queue[str]) -> None:
    try:
        answers.put(f"attached: {attach(PAIR)}")
    except AcquireError as error:
        answers.put(str(error))


def test_a_spawned_worker_does_not_inherit() -> None:
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    with attach(PAIR):
        worker = spawn.Process(target=ask_for_the_pair, args=(answers,))
        worker.start()
        assert f"is used by process {os.getpid()}" in answers.get(timeout=PATIENCE)
        worker.join()


def test_a_program_started_meanwhile_does_not_keep_the_lock() -> None:
    attachment = attach(PAIR)
    with subprocess.Popen(["sleep", "60"], close_fds=False) as process:
        attachment.detach()
        assert free(8)
        process.kill()


def test_a_program_being_started_does_not_keep_the_lock(folder: Path) -> None:
    """Between fork and exec it has copies of the descriptors, as `os.dup` makes them."""
    attachment = attach(PAIR)
    copies = [os.dup(file) for file in descriptors_in(folder)]
    assert copies
    attachment.detach()
    assert free(8)
    for copy in copies:
        os.close(copy)


def test_an_attachment_does_not_travel() -> None:
    with attach(PAIR) as attachment, pytest.raises(TypeError, match="belongs to its process"):
        pickle.dumps(attachment)


# ---------------------------------------------------------------- holders


def test_holders_say_who_has_what_since_when() -> None:
    before = time.time()
    with attach(PAIR):
        found = holders()
        assert list(found) == [0, 1]
        assert {(holder.device, holder.pid) for holder in found.values()} == {(8, os.getpid())}
        assert before <= (found[0].since or 0) <= time.time()
        assert found[0].user and "python" in (found[0].command or "")
    assert holders() == {}


def test_looking_makes_no_folder(folder: Path) -> None:
    assert holders() == {}
    assert not folder.exists()


@pytest.mark.parametrize(
    "record", [b"", b"{", b"[1]", b'{"pid": "1", "since": true, "user": 3}', b"\xff" * 70000]
)
def test_a_record_that_makes_no_sense_is_still_a_holder(record: bytes) -> None:
    hold = locks.try_hold([3], record)
    assert hold is not None
    (holder,) = holders().values()
    assert (holder.ipu, holder.pid, holder.user, holder.since) == (3, None, None, None)
    with pytest.raises(AcquireError, match="IPU 3 is used by an unknown process"):
        attach(TABLE.device(3))
    hold.release()


def test_a_record_cannot_move_the_readers_cursor() -> None:
    hold = locks.try_hold([3], b'{"user": "a\\u001b[2Jb", "command": "x\\ny", "since": 1e300}')
    assert hold is not None
    holder = holders()[3]
    assert (holder.user, holder.command, holder.started) == ("a?[2Jb", "x?y", None)
    hold.release()


# ---------------------------------------------------------------- the folder


def test_the_folder_and_its_files_are_the_users_alone(folder: Path) -> None:
    with attach(PAIR):
        modes = [path.stat().st_mode & 0o777 for path in (folder, *folder.iterdir())]
    assert modes == [0o700] + [0o600] * 3


def test_a_folder_that_is_shared_has_files_that_are_shared(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o1777)
    with attach(PAIR):
        modes = {path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == {0o666}


def test_systemd_tmpfiles_leaves_lock_files_alone(folder: Path) -> None:
    """It removes old files from /tmp, but no sticky ones."""
    with attach(PAIR):
        assert all(path.stat().st_mode & stat.S_ISVTX for path in folder.glob("ipu-*"))


def test_users_have_folders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPUSIM_RUNTIME_DIR")
    first = locks.runtime_folder()
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    second = locks.runtime_folder()
    assert first != second and second.name == "gpusim-4711"


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_a_default_folder_that_others_can_enter_is_refused(
    mode: int, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir()
    folder.chmod(mode)
    monkeypatch.delenv("GPUSIM_RUNTIME_DIR")
    monkeypatch.setattr(locks, "runtime_folder", lambda: folder)
    with pytest.raises(DeviceError, match=r"not this user's alone: .*GPUSIM_RUNTIME_DIR"):
        attach(PAIR)


def test_a_default_folder_of_another_user_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(mode=0o700)
    monkeypatch.delenv("GPUSIM_RUNTIME_DIR")
    monkeypatch.setattr(locks, "runtime_folder", lambda: folder)
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    with pytest.raises(DeviceError, match="not this user's alone"):
        attach(PAIR)


def test_links_are_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DeviceError, match="is not a usable folder"):
        attach(PAIR)
    with pytest.raises(DeviceError, match="is not a usable folder"):
        holders()
    folder.unlink()
    folder.mkdir()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (folder / "ipu-0.lock").symlink_to(victim)
    (folder / "ipu-4.lock").hardlink_to(victim)
    os.mkfifo(folder / "ipu-6.lock")
    for ipu in (0, 4, 6):
        with pytest.raises(DeviceError, match=rf"ipu-{ipu}\.lock cannot be used"):
            attach(TABLE.device(ipu))
    assert victim.read_text() == "precious"
    assert free(9), "what cannot be used concerns nobody else"


def test_a_folder_that_cannot_be_made_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUSIM_RUNTIME_DIR", str(tmp_path / "missing" / "run"))
    with pytest.raises(DeviceError, match="missing does not exist: name another folder"):
        attach(PAIR)
    (tmp_path / "file").touch()
    monkeypatch.setenv("GPUSIM_RUNTIME_DIR", str(tmp_path / "file"))
    with pytest.raises(DeviceError, match="is not a usable folder"):
        attach(PAIR)


def test_a_failed_attempt_leaves_no_descriptor(folder: Path) -> None:
    attach(PAIR).detach()
    (folder / "ipu-5.lock").symlink_to("nowhere")
    for _ in range(3):
        with pytest.raises(DeviceError):
            attach(ALL)
        with attach(PAIR):
            assert not free(0)
        holders(range(4))
    assert descriptors_in(folder) == []


def test_a_file_system_without_locks_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    attach(PAIR).detach()
    monkeypatch.setattr(fcntl, "flock", flock)
    for refused in (lambda: attach(PAIR), holders):
        with pytest.raises(DeviceError, match=r"cannot lock files \(No locks available\): name an"):
            refused()
    assert descriptors_in(folder) == []


def test_a_process_stopped_at_the_gate_does_not_stop_the_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locks, "GATE_PATIENCE", 0.1)
    attach(PAIR).detach()
    with locks.gate(locks.open_folder()):
        assert free(8)


def test_a_lock_file_that_was_removed_is_replaced(folder: Path) -> None:
    attach(PAIR).detach()
    (folder / "ipu-0.lock").unlink()
    with attach(PAIR):
        assert not free(0)


def test_a_lock_file_that_is_removed_meanwhile_is_not_taken_for_the_lock(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_open, victim = os.open, folder / "ipu-0.lock"
    removals = [victim]

    def open_and_remove(path: Any, *args: Any, **options: Any) -> int:
        file = really_open(path, *args, **options)
        if str(path) == str(victim) and removals:
            removals.pop().unlink()
            victim.touch()
        return file

    monkeypatch.setattr(os, "open", open_and_remove)
    with attach(TABLE.device(0)):
        assert not removals
        monkeypatch.undo()
        monkeypatch.setenv("GPUSIM_RUNTIME_DIR", str(folder))
        assert not free(0)


# ---------------------------------------------------------------- connections


def test_always_attaches_from_the_start() -> None:
    connection = Connection(PAIR)
    assert connection.attached and not free(8)
    assert connection.before_run() == PAIR
    del connection
    assert free(8)


def test_on_demand_attaches_at_the_first_run() -> None:
    connection = Connection(TABLE.of_size(2), ConnectionType.OnDemand)
    assert (connection.attached, connection.device) == (False, None)
    with attach(PAIR):
        assert connection.before_run() == OTHER_PAIR == connection.device
    connection.detach()
    assert connection.attach() == OTHER_PAIR, "it keeps to the device that it was given"


def test_never_attaches_not_even_when_it_runs() -> None:
    connection = Connection((), ConnectionType.Never)
    for refused in (connection.attach, connection.before_run):
        with pytest.raises(DeviceError, match=r"offline device \(ConnectionType\.Never\)"):
            refused()
    with pytest.raises(DeviceError, match="Device is not attached"):
        connection.detach()


def test_a_connection_refuses_what_is_done_already() -> None:
    connection = Connection(PAIR)
    with pytest.raises(DeviceError, match="Device is already attached"):
        connection.attach()
    connection.detach()
    with pytest.raises(DeviceError, match="Device is not attached"):
        connection.detach()
    assert connection.before_run() == PAIR


def test_a_connection_fails_where_attaching_does(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: Attachment = attach(PAIR)
    with pytest.raises(AcquireError, match="Failed to acquire device Id 8"):
        Connection(PAIR)
    with pytest.raises(AcquireError, match=r"within 0\.1 seconds"):
        Connection(PAIR, timeout=0.1)
    taken.detach()


def test_a_forked_childs_connection_is_not_attached() -> None:
    connection = Connection(PAIR)
    answer = in_fork(connection.before_run)
    assert "AcquireError" in answer and f"process {os.getpid()}" in answer
    assert connection.attached


def test_connection_types_are_poptorchs_numbers() -> None:
    assert [(kind.name, kind.value) for kind in ConnectionType] == [
        ("Always", 0),
        ("OnDemand", 1),
        ("Never", 2),
    ]
    with pytest.raises(ValueError, match="3 is not a valid ConnectionType"):
        Connection(PAIR, 3)
