"""Peers in other processes, and the sockets that lead to them.

They sleep between commands, so that they do not disturb the others' turns.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, ClassVar

from bench import mpirun
from bench.cases import FOLDS, Case, Size
from bench.machine import kernel_set

from .base import Peer, Samples, Unserved

START_SECONDS = 60.0
ANSWER_SECONDS = 120.0
ROOT = Path(__file__).parents[2]


class Worker(Peer):
    """Processes of `bench.worker`, started when the first case comes."""

    elsewhere: ClassVar[bool] = True
    processes = 1

    def __init__(self, name: str) -> None:
        self.name = name
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._channels: list[Channel] = []
        self._never: str | None = None  # why it cannot be started at all
        self._case: Case | None = None
        self._slow: set[tuple[str, Size]] = set()  # what took too long is not tried in each dtype

    # ------------------------------------------------------------ a peer's duties

    def prepare(self, case: Case) -> None:
        if self._never:
            raise Unserved(self._never)
        if (case.collective, case.size) in self._slow:
            raise Unserved(f"no answer in {ANSWER_SECONDS:.0f} s")
        if self._process is None:
            self._start(case)
        self._case = case
        self._ask(do="prepare", case=case.describe())

    def run(self, repeats: int) -> list[float]:
        """The slowest process counts."""
        each = self._ask(do="run", repeats=repeats)
        return [max(seconds) for seconds in zip(*each, strict=True)]

    def sample(self, replicas: list[int], positions: list[int]) -> Samples:
        found: Samples = {}
        for answer in self._ask(do="sample", replicas=replicas, positions=positions):
            found |= {int(replica): values for replica, values in answer.items()}
        return found

    def release(self) -> None:
        if self._process is not None:
            self._ask(do="release")

    def close(self) -> None:
        """Hang up, and end what does not end by itself."""
        for channel in self._channels:
            channel.close()
        self._channels = []
        if self._process is not None:
            end(self._process)
            self._process = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    # ------------------------------------------------------------ processes

    def _command(self, path: str) -> list[str]:
        return [sys.executable, "-m", "bench.worker", self.name, path]

    def _environment(self, case: Case) -> dict[str, str]:
        return dict(os.environ)

    def _start(self, case: Case) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gpusim-bench-")
        path = os.path.join(self._folder.name, "socket")
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(self.processes)
            listener.settimeout(0.2)
            with open(self._log, "wb") as log:
                self._process = subprocess.Popen(
                    self._command(path),
                    cwd=ROOT,
                    env=self._environment(case),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is for the bench, which then hangs up
                )
            self._accept(listener)
        try:
            self._collect(START_SECONDS)
        except Unserved as error:
            if "not installed" in str(error):
                self._never = str(error)
            raise

    def _accept(self, listener: socket.socket) -> None:
        """Wait until all processes have connected."""
        end = time.monotonic() + START_SECONDS
        while len(self._channels) < self.processes:
            try:
                self._channels.append(Channel(listener.accept()[0]))
            except TimeoutError:
                assert self._process is not None
                if self._process.poll() is not None:
                    raise self._gone("does not start") from None
                if time.monotonic() > end:
                    raise self._gone(f"has not started in {START_SECONDS:.0f} s") from None

    @property
    def _log(self) -> Path:
        assert self._folder is not None
        return Path(self._folder.name) / "log"

    def _gone(self, what: str) -> Unserved:
        """End the processes; the reason, with the last line of their log."""
        said = self._log.read_text(errors="replace").split("\n") if self._folder else []
        last = next((line.strip() for line in reversed(said) if line.strip()), "")
        self.close()
        return Unserved(what + (f": {last[:160]}" if last else ""))

    # ------------------------------------------------------------ commands

    def _ask(self, **command: Any) -> list[Any]:
        """Send a command to all processes; the answer of each."""
        if not self._channels:
            raise Unserved("is not running any more")
        for channel in self._channels:
            channel.send(command)
        return self._collect(ANSWER_SECONDS)

    def _collect(self, seconds: float) -> list[Any]:
        end = time.monotonic() + seconds
        try:
            answers = [channel.receive(end) for channel in self._channels]
        except TimeoutError:
            if self._case is not None:
                self._slow.add((self._case.collective, self._case.size))
            self.close()
            raise Unserved(f"no answer in {seconds:.0f} s") from None
        except ConnectionError:
            raise self._gone("the process died") from None
        for answer in answers:
            if "problem" in answer:
                raise Unserved(answer["problem"])
        return [answer["value"] for answer in answers]


class NumPyKernels(Worker):
    """gpusim with NumPy's kernels, where compiled ones run in this process."""

    def prepare(self, case: Case) -> None:
        if kernel_set() == "numpy":
            raise Unserved("gpusim itself runs them")
        narrow = case.collective in FOLDS and case.dtype.itemsize < 4
        if not narrow and not case.ragged:
            raise Unserved("gpusim itself runs them")
        super().prepare(case)

    def _environment(self, case: Case) -> dict[str, str]:
        return os.environ | {"GPUSIM_KERNELS": "numpy"}


class JaxWorker(Worker):
    """JAX: shard_map wants as many devices as replicas, a number that is fixed when it starts."""

    MAX_DEVICES = 256

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._devices = 0

    def prepare(self, case: Case) -> None:
        devices = 1 if self.name == "JAX vmap" else case.replicas
        if devices > self.MAX_DEVICES:
            raise Unserved(f"measured up to {self.MAX_DEVICES} fake devices")
        if devices != self._devices:
            self.close()
        self._devices = devices
        super().prepare(case)

    def _environment(self, case: Case) -> dict[str, str]:
        flags = f"--xla_force_host_platform_device_count={self._devices}"
        return os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}


class MpiWorkers(Worker):
    """Some processes under mpirun; with more of them than cores they yield while they wait."""

    def __init__(self, name: str, processes: int) -> None:
        super().__init__(name)
        self.processes = processes

    def _command(self, path: str) -> list[str]:
        start = mpirun.command(self.processes)
        if start is None:
            self._never = "mpirun is not installed"
            raise Unserved(self._never)
        return [*start, *super()._command(path)]

    def _environment(self, case: Case) -> dict[str, str]:
        return mpirun.environment()


class Channel:
    """Lines of JSON over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self._socket = connection
        self._read = b""

    def send(self, message: dict[str, Any]) -> None:
        try:
            self._socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # the other side is gone, which `receive` will find

    def receive(self, end: float) -> dict[str, Any]:
        """The next line; TimeoutError if none has come at `end`, by time.monotonic."""
        while b"\n" not in self._read:
            self._socket.settimeout(max(0.001, end - time.monotonic()))
            part = self._socket.recv(2**16)
            if not part:
                raise ConnectionError
            self._read += part
        line, self._read = self._read.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        self._socket.close()


def end(process: subprocess.Popen[bytes], patience: float = 3.0) -> None:
    """Wait a moment, then end the session that the process leads."""
    for number, seconds in ((None, patience), (signal.SIGTERM, 3.0), (signal.SIGKILL, 3.0)):
        if number is not None:
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                pass
        try:
            process.wait(seconds)
            return
        except subprocess.TimeoutExpired:
            continue
