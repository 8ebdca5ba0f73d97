"""`gpusim torchrun`: a script for torchrun, on simulated ranks of this process."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from bdb import BdbQuit
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import get_terminal_size
from types import FrameType
from typing import Any, TextIO

from fallback.orders import EXACT, FIXED, ORDERS
from gpusim.errors import GpusimError, InstanceError, ReplicaError
from gpusim.maps.call_site import is_users
from gpusim.maps.ending import quiet_ends
from gpusim.recording import RecordedCall, Recorder
from gpusim.reduction import Reduction
from gpusim.runtime import environment
from gpusim.runtime.world import World
from gpusim.tools import program
from gpusim.tools.arguments import add_arrays, whole_number
from gpusim.tools.program import NoProgramError, UserProgram, main_module
from gpusim.tools.tables import print_table

__all__ = ["add"]

SHOWN = 20
"""Rows of the table."""

INTERVAL = 0.2
"""Seconds between two lines of progress."""

INTERRUPTED = 130
"""The exit code after Ctrl-C: 128 + SIGINT, the shell's convention."""

TERMINATED = 143
"""The same after SIGTERM."""

ERASE = "\r\x1b[K"
"""Takes the line of a terminal away."""

NO_GPU = (
    "gpusim torchrun: PyTorch finds no GPU here. If the script asks for one, --device cpu lets the "
    "CPU play it"
)

NO_INPUT = "ranks that are processes have no standard input; --only-rank R gives it to rank R"

ACCEPTED = (
    "rdzv-backend",
    "rdzv-endpoint",
    "rdzv-id",
    "rdzv-conf",
    "node-rank",
    "max-restarts",
    "monitor-interval",
    "start-method",
    "event-log-handler",
    "local-addr",
    "numa-binding",
    "shutdown-timeout",
    "signals-to-handle",
)
"""Options of torchrun that say how processes find each other, begin anew or end."""

OUTPUT = "redirect the command's output; --only-rank R shows that of rank R alone"
REFUSED = {
    ("--log-dir", "-r", "--redirects", "-t", "--tee", "--logs-specs"): OUTPUT,
    ("--local-ranks-filter",): "--only-rank R shows the output of rank R alone",
    ("--duplicate-stdout-filters", "--duplicate-stderr-filters"): "filter the command's output",
    ("--no-python",): "ranks run a Python script, or a module by -m",
    ("--run-path",): "give the script itself",
    ("--virtual-local-rank",): "LOCAL_RANK is that of torchrun without it",
}
"""Options of torchrun that gpusim lacks, and what to do instead."""


class Refuse(argparse.Action):
    """An option that is an error, and says what to do instead."""

    def __call__(
        self, parser: argparse.ArgumentParser, space: Any, value: Any, option: str | None = None
    ) -> None:
        parser.error(f"{option} is not simulated: {self.const}")


def add(commands: Any) -> None:
    """Add the command to those of `gpusim`."""
    parser = commands.add_parser(
        "torchrun",
        usage="gpusim torchrun [OPTIONS] [-m] SCRIPT ...",
        help="run a PyTorch script of torchrun's on simulated ranks",
        description="Run a script for torchrun on simulated ranks, threads of one process that "
        "take turns. The script's backend, such as nccl or gloo, is replaced by gpusim's. "
        "torchrun's options about how processes meet, such as --rdzv-backend, are accepted and "
        "have no effect.",
        epilog="Ctrl-C ends all ranks. The exit code is 0 if all ranks end well, 1 if one fails, "
        "2 after a wrong argument, 130 after Ctrl-C, 143 after SIGTERM.",
    )
    count = {"type": simulated_count, "default": 1, "metavar": "N"}
    nodes = {**count, "type": node_count}
    parser.add_argument("--nnodes", help="the number of nodes (default: %(default)s)", **nodes)
    parser.add_argument(
        "--nproc-per-node",
        "--nproc_per_node",
        help="the number of ranks of each node (default: %(default)s)",
        **count,
    )
    parser.add_argument("--standalone", action="store_true", help="accepted, without effect")
    for name in ACCEPTED:
        parser.add_argument(
            f"--{name}", f"--{name.replace('-', '_')}", help=argparse.SUPPRESS, metavar="VALUE"
        )
    for names, instead in REFUSED.items():
        both = [*names, *(f"--{name[2:].replace('-', '_')}" for name in names if name[2:])]
        spelled = dict.fromkeys(both)
        how = {"action": Refuse, "nargs": "?", "const": instead, "help": argparse.SUPPRESS}
        parser.add_argument(*spelled, dest="refused", **how)
    parser.add_argument(
        "--master-addr", "--master_addr", default="127.0.0.1", help="a value for MASTER_ADDR"
    )
    parser.add_argument(
        "--master-port", "--master_port", default="29500", help="a value for MASTER_PORT"
    )
    parser.add_argument("--role", default="default", help="a value for ROLE_NAME")
    parser.add_argument(
        "--reduction",
        metavar="ORDER",
        help=f"how sums are added: an order ({', '.join((*ORDERS, EXACT, FIXED))}) or the name of "
        f"a twin ({', '.join(Reduction.twins())}) (default: linear)",
    )
    parser.add_argument(
        "--schedule",
        choices=("turns", "free"),
        default="turns",
        help="turns: one rank at a time, so that runs repeat; free: as many as there are cores "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        choices=("cpu",),
        help="cpu: the CPU plays the GPUs that the script asks for, one for each rank of a node",
    )
    parser.add_argument(
        "--processes",
        action="store_true",
        help="run each rank in a process of its own, for scripts with state in modules (Linux)",
    )
    parser.add_argument(
        "--instances",
        type=whole_number(1),
        default=1,
        metavar="N",
        help="spread the ranks, as processes, over N instances of this command, which poprun, "
        "mpirun or srun has started, on one machine or several; instance 0 listens at "
        "--master-addr for the others (Linux, mpi4py)",
    )
    parser.add_argument(
        "--only-rank",
        type=whole_number(0),
        metavar="R",
        help="show the output of this rank alone, without its tag; breakpoint() stops in this "
        "rank alone",
    )
    parser.add_argument(
        "--summary", action="store_true", help="print a table of all collectives at the end"
    )
    parser.add_argument(
        "--record",
        type=Path,
        metavar="PATH",
        help="write a line of JSON for each collective of each rank: to a FILE.jsonl, or "
        "to a folder, with digests of operands and results, for gpusim compare",
    )
    add_arrays(parser)
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE.json",
        help="write a Chrome trace of the collectives' order, for Perfetto, without times",
    )
    parser.add_argument(
        "-m", "--module", action="store_true", help="SCRIPT is the name of a module"
    )
    parser.add_argument("script", metavar="SCRIPT", help="the training script")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script"
    ).required = False
    parser.set_defaults(run=run)


def simulated_count(text: str) -> int:
    """An argparse type: a number of ranks or nodes, which torchrun may find out by itself."""
    if text in ("auto", "cpu", "gpu", "xpu"):
        raise argparse.ArgumentTypeError(
            f"a whole number is needed, as no machine is asked how many there are; got {text!r}"
        )
    return whole_number(1)(text)


def node_count(text: str) -> int:
    """An argparse type: a number of nodes, also as torchrun's range of that number alone."""
    low, colon, high = text.partition(":")
    if colon and low != high:
        raise argparse.ArgumentTypeError(f"give one number, not a range; got {text!r}")
    return simulated_count(low)


def run(options: argparse.Namespace) -> int:
    """Run the script; 0 if all ranks end well, else 1, as torchrun."""
    from gpusim.torch.distributed.ranks import environment_of

    ranks = options.nnodes * options.nproc_per_node
    if options.only_rank is not None and options.only_rank >= ranks:
        raise ValueError(f"--only-rank {options.only_rank}: expected a rank below {ranks}")
    folder = options.record is not None and options.record.suffix != ".jsonl"
    if options.arrays is not None and not folder:
        raise ValueError("--arrays needs --record with a folder")
    try:
        find = program.found_module if options.module else program.found_script
        script = find(options.script)
    except NoProgramError as error:
        print(f"gpusim torchrun: {error}", file=sys.stderr)
        return error.code
    except Exception as error:  # a syntax error, or a package that fails
        return program.ended(error)
    program.lead_path(script.folder)
    more = {
        "MASTER_ADDR": options.master_addr,
        "MASTER_PORT": options.master_port,
        "ROLE_NAME": options.role,
        "TORCHELASTIC_RUN_ID": options.rdzv_id or "none",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    environments = [
        environment_of(rank, ranks, options.nproc_per_node, **more) for rank in range(ranks)
    ]
    if options.only_rank is not None:
        for rank, variables in enumerate(environments):
            if rank != options.only_rank:
                variables["PYTHONBREAKPOINT"] = "0"  # breakpoint() does nothing
    workers = multiprocessing.active_children()
    world = world_of(options.instances, ranks)
    code = 0
    try:
        with world:
            code = run_on(world, options, script, environments)
    except InstanceError:  # on leaving
        if not code:
            raise
    return end(code, workers) if code else 0


def run_on(
    world: World, options: argparse.Namespace, script: UserProgram, environments: list[Any]
) -> int:
    """Run the script on the instances, of which instance 0 shows and records what there is."""
    from gpusim.torch.distributed.accelerator import asks_for_gpu
    from gpusim.torch.distributed.ranks import run_ranks

    ranks = len(environments)
    if world.instance:
        options.summary, options.record, options.trace = False, None, None
    with (
        ends_by_signals(),
        quiet_ends(KeyboardInterrupt),
        tagged_output(options.only_rank) as outputs,
        record_of(options, ranks, outputs) as recorder,
    ):

        def body(rank: Any) -> None:
            outputs.follow_process(rank.index)
            run_script(script, options.arguments)

        how = (options.reduction, options.schedule, recorder)
        where = (options.device, options.processes, outputs.of_rank)
        failure: GpusimError | None = None
        interrupt: KeyboardInterrupt | None = None
        try:
            run_ranks(body, environments, *how, *where, leaves_blocked=True)
        except GpusimError as error:
            failure = error
        except KeyboardInterrupt as raised:
            interrupt = raised
    if options.summary and recorder is not None:
        show_summary(recorder, ranks)
    if interrupt is not None:
        return interrupted(interrupt)
    if failure is None:
        return 0
    if world.instance:
        return 1
    show(failure, options.only_rank is not None or not options.processes)
    if options.device is None and asks_for_gpu(failure.__cause__):
        print(NO_GPU, file=sys.stderr)
    return 1


def interrupted(error: KeyboardInterrupt) -> int:
    """Say that a signal has ended the command; the exit code."""
    terminated = isinstance(error, Terminated)
    print("\nterminated" if terminated else "\ninterrupted", file=sys.stderr)
    return TERMINATED if terminated else INTERRUPTED


def world_of(instances: int, ranks: int) -> World:
    """The instances that share the ranks; this process alone unless --instances says more."""
    if instances == 1:
        note_instances(ranks)
        return World([ranks])
    found = environment.read().instances
    if found != instances:
        raise ValueError(
            f"--instances {instances}: this command runs as {found} instance{'s' * (found > 1)}; "
            f"start it by mpirun -n {instances} gpusim torchrun --instances {instances} ..."
        )
    return World.from_environment(replicas=ranks)


def note_instances(ranks: int) -> None:
    """Say it if mpirun or srun has started several of this command, and each runs all ranks."""
    try:
        launch = environment.read()
    except ValueError:  # of variables that mean nothing here
        return
    if launch.launcher in ("openmpi", "mpich", "slurm") and launch.instances > 1 > launch.instance:
        print(
            f"gpusim torchrun: {launch.launcher} has started {launch.instances} instances of this "
            f"command, and each runs all {ranks} ranks; --instances {launch.instances} spreads the "
            "ranks over them",
            file=sys.stderr,
        )


def end(code: int, known: Sequence[Any]) -> int:
    """The exit code; ends the process at once if ranks have left workers of DataLoaders.

    A rank that was ended may have held a lock that it shares with its workers, and Python's own end
    would wait for it.
    """
    left = [worker for worker in multiprocessing.active_children() if worker not in known]
    if not left:
        return code
    for worker in left:
        worker.kill()
        worker.join()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends ranks as Ctrl-C does."""


@contextmanager
def ends_by_signals() -> Iterator[None]:
    """A block that SIGTERM interrupts as Ctrl-C does, and in which either ends workers of ranks."""
    process = os.getpid()
    defaults: dict[int, Any] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
    }
    replaced = [number for number in defaults if signal.getsignal(number) is defaults[number]]

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() != process:  # a worker of a DataLoader, maybe in the midst of its start
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    for number in replaced:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, defaults[number])


@contextmanager
def record_of(
    options: argparse.Namespace, ranks: int, outputs: RankOutputs
) -> Iterator[Recorder | None]:
    """The recorder that the options, and a terminal, ask for; None if they do not.

    The trace is written when the block ends.
    """
    shown = outputs.terminal is not None
    record: dict[str, Any] = {"path": options.record, "keep": 0}
    if options.record is not None and options.record.suffix != ".jsonl":
        record |= {"digests": True, "arrays": options.arrays, "limit": options.limit}
    if options.trace is None:
        asked = shown or options.summary or options.record is not None
        each = outputs.show_progress if shown else None
        yield Recorder(**record, each=each) if asked else None
        return
    from gpusim.poptorch.traces import Trace

    trace = Trace(options.trace.absolute(), {"unit of ts": "a call of the rank, not a time"})
    rows = [trace.row("ranks", f"rank {rank}") for rank in range(ranks)]

    def add(call: RecordedCall) -> None:
        fields = {name: value for name, value in call._asdict().items() if value is not None}
        begin = call.sequence * 1e-6  # ts counts microseconds
        trace.add(rows[call.rank], call.operation, "collective", begin, begin + 1e-6, **fields)
        if shown:
            outputs.show_progress(call)

    try:
        yield Recorder(**record, each=add)
    finally:
        trace.close()


def show_summary(recorder: Recorder, ranks: int) -> None:
    """Print a table of all calls, those with most bytes, on one screen."""
    rows = recorder.summary()
    cells = [
        [
            shorten_site(row.site),
            f"{row.operation} {row.op}".strip(),
            row.order,
            row.dtype,
            row.description,
            str(row.group_size),
            str(row.ranks),
            f"{row.calls:,}",
            f"{row.bytes:,}",
        ]
        for row in rows[:SHOWN]
    ]
    title = f"Collectives of {ranks} ranks, with the calls and bytes of the rank that makes most"
    if len(rows) > SHOWN:
        title += f" (the {SHOWN} with most bytes of {len(rows)})"
    headings = ["place", "operation", "order", "dtype", "group", "size", "ranks", "calls", "bytes"]
    print_table(title, headings, cells, left=headings[:5])


def shorten_site(site: str) -> str:
    """A call site relative to the current folder, or the end of its path."""
    folder = os.getcwd() + os.sep
    if site.startswith(folder):
        return site.removeprefix(folder)
    return os.sep.join(Path(site).parts[-2:])


class ExitCodeError(Exception):
    """A rank has ended with an exit code."""


def run_script(script: UserProgram, arguments: Sequence[str]) -> None:
    """The script in the calling rank, as `__main__`."""
    sys.argv = [script.name, *arguments]
    try:
        exec(script.code, vars(main_module(script)))
    except SystemExit as ended:
        if ended.code is None or (isinstance(ended.code, int) and ended.code == 0):
            return
        code = f"exit code {ended.code}" if isinstance(ended.code, int) else repr(str(ended.code))
        frames = [each for each in traceback.walk_tb(ended.__traceback__) if is_users(each[0])]
        for frame, line in frames[-1:]:  # none of a module that is installed
            code += f" at {frame.f_code.co_filename}:{line}"
        raise ExitCodeError(code) from None


def show(error: GpusimError, has_input: bool) -> None:
    """The traceback of a rank's own exception, with the rank as its tag, and what went wrong.

    Without `has_input` a debugger ends as it has nothing to read.
    """
    from gpusim.torch.distributed.wire import RemoteTraceback

    cause = error.__cause__
    if isinstance(error, ReplicaError) and cause is not None:
        if isinstance(cause, ExitCodeError):
            print(f"gpusim torchrun: rank {error.index} ended with {cause}", file=sys.stderr)
            return
        if isinstance(cause, BdbQuit):
            text = f"gpusim torchrun: rank {error.index} ended in the debugger"
            print(text if has_input else f"{text}: {NO_INPUT}", file=sys.stderr)
            return
        trace = cause.__traceback__
        while trace is not None and trace.tb_frame.f_code is not run_script.__code__:
            trace = trace.tb_next
        trace = cause.__traceback__ if trace is None else trace.tb_next
        text = "".join(traceback.format_exception(type(cause), cause, trace))
        if isinstance(cause.__cause__, RemoteTraceback):
            text = cause.__cause__.args[0]
        for line in text.splitlines():
            print(f"[rank{error.index}]: {line}", file=sys.stderr)
    print(f"gpusim torchrun: {error}", file=sys.stderr)


class RankOutputs:
    """Standard output and error, whose lines have the tag of the rank that writes them.

    A `terminal` shows below them how many calls were made, and the last one.
    """

    def __init__(self, only: int | None, terminal: TextIO | None) -> None:
        self.only, self.terminal = only, terminal
        self.tagged: Any = ()
        self.process = os.getpid()
        #: The rank and the terminal of a line without an end: a prompt, or a bar of progress.
        self.open: tuple[int | None, TextIO] | None = None
        self.local = threading.local()
        self.lock = threading.Lock()
        self.begun = self.last = time.monotonic()
        self.calls = 0
        self.shown = False

    def show_progress(self, call: RecordedCall) -> None:
        """Count a call, and show it if some time has passed since the last one that was shown."""
        with self.lock:
            self.calls += 1
            now = time.monotonic()
            if self.terminal is None or self.open or now - self.last < INTERVAL:
                return
            self.last = now
            minutes, seconds = divmod(int(now - self.begun), 60)
            text = (
                f"{minutes}:{seconds:02}  {self.calls:,} calls, now {call.operation} of rank "
                f"{call.rank} at {Path(call.site).name}"
            )
            self.terminal.write(f"{ERASE}{text[: get_terminal_size().columns - 1]}")
            self.terminal.flush()
            self.shown = True

    def erase_progress(self) -> None:
        """Take the line of progress away."""
        if self.terminal is not None and self.shown:
            self.terminal.write(ERASE)
            self.terminal.flush()
            self.shown = False

    def enter(self, rank: int) -> None:
        """The calling thread is this rank's."""
        self.local.rank, self.local.partial = rank, {}

    @contextmanager
    def of_rank(self, rank: int) -> Iterator[None]:
        """A block of a rank's thread, or of one that works for the rank meanwhile."""
        before = vars(self.local).copy()
        self.enter(rank)
        try:
            yield
        finally:
            self.leave()
            vars(self.local).update(before)

    def leave(self) -> None:
        """Write the lines that have no end."""
        partial: Mapping[TextIO, str] = self.local.partial
        for stream, text in partial.items():
            if text:
                self.put(stream, f"{text}\n", f"[rank{self.local.rank}]: ")
        self.local.rank = None

    def follow_process(self, rank: int) -> None:
        """In a rank's process: what logs keep of the streams is its own; one rank has the input."""
        if os.getpid() == self.process:
            return
        self.lock = threading.Lock()
        redirect_logs(self.tagged, (sys.stdout, sys.stderr))
        if rank == self.only:
            # Of another number than 0, as input() then writes its prompt to the rank's own output.
            sys.stdin = open(os.dup(0))

    def put(self, stream: TextIO, text: str, tag: str) -> None:
        """Write a line or a part of one, which goes on in the line that the rank has open."""
        me = getattr(self.local, "rank", None), stream
        with self.lock:
            self.erase_progress()
            if self.open == me:
                tag = ""
            elif self.open:
                self.open[1].write("\n")
            stream.write(tag + text)
            self.open = me if not text.endswith("\n") and stream.isatty() else None

    def write(self, stream: TextIO, text: str) -> int:
        rank = getattr(self.local, "rank", None)
        if rank in (None, self.only):  # as it comes: a debugger's prompt has no end of line
            if text:
                self.put(stream, text, "")
        elif self.only is None:
            *lines, rest = (self.local.partial.get(stream, "") + text).split("\n")
            for line in lines:
                tag = f"[rank{rank}]: "
                self.put(stream, f"{line}\n", "" if line.startswith(tag[:-1]) else tag)  # of a log
            self.local.partial[stream] = rest
        return len(text)

    def flush(self, stream: TextIO) -> None:
        """Show a line's beginning on a terminal, where it may be a prompt."""
        partial = getattr(self.local, "partial", {})
        if partial.get(stream) and stream.isatty():
            self.put(stream, partial.pop(stream), f"[rank{self.local.rank}]: ")
        stream.flush()


class TaggedStream:
    """A text stream that writes by RankOutputs; all else is the stream's own."""

    def __init__(self, stream: TextIO, outputs: RankOutputs) -> None:
        self._stream, self._outputs = stream, outputs

    def flush(self) -> None:
        self._outputs.flush(self._stream)

    def write(self, text: str) -> int:
        return self._outputs.write(self._stream, text)

    def writelines(self, lines: Sequence[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def tagged_output(only: int | None) -> Iterator[RankOutputs]:
    """A block in which standard output and error are tagged."""
    streams = sys.stdout, sys.stderr
    outputs = RankOutputs(only, sys.stderr if sys.stderr.isatty() else None)
    tagged: Any = [TaggedStream(stream, outputs) for stream in streams]
    outputs.tagged = tagged
    sys.stdout, sys.stderr = tagged
    redirect_logs(streams, tagged)
    try:
        yield outputs
    finally:
        redirect_logs(tagged, streams)
        sys.stdout, sys.stderr = streams
        outputs.erase_progress()


def redirect_logs(streams: Sequence[Any], others: Sequence[Any]) -> None:
    """Let the loggers that write to a stream, as torch's do, write to another in its place."""
    for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
        for handler in getattr(logger, "handlers", ()):
            stream = vars(handler).get("stream")  # elsewhere it is a property: the stream of now
            if isinstance(handler, logging.StreamHandler) and stream in streams:
                handler.setStream(others[streams.index(stream)])
