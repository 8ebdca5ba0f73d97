"""`gpusim torchrun`: a script for torchrun, on simulated ranks: forked processes, or threads."""

from __future__ import annotations

import argparse
import copy
import gc
import json
import marshal
import multiprocessing
import os
import secrets
import signal
import sys
import traceback
from bdb import BdbQuit
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import CodeType, FrameType
from typing import Any

import numpy as np

from gpusim.errors import GpusimError, InstanceError, ReplicaError
from gpusim.files import flush_all
from gpusim.maps.call_site import is_users
from gpusim.maps.ending import quiet_ends
from gpusim.optional import require
from gpusim.recording import Recorder
from gpusim.runtime import environment
from gpusim.runtime.world import World
from gpusim.tools import elastic, program
from gpusim.tools import options as shared_options
from gpusim.tools.faults.command import add_campaign, asks_for_campaign, run_campaign
from gpusim.tools.findings import check_report_target, show_findings
from gpusim.tools.hub import hub
from gpusim.tools.options import WRONG, UsageError, note
from gpusim.tools.outputs import RankOutputs, tagged_output
from gpusim.tools.program import NoProgramError, UserProgram, main_module
from gpusim.tools.records import numbered, record_of, show_summary
from gpusim.tools.torchrun_options import ENGINES, add_modes, add_ranks, add_torchruns
from gpusim.words import count, every

__all__ = ["add", "options_of", "run"]

INTERRUPTED = 130
"""The exit code after Ctrl-C: 128 + SIGINT, the shell's convention."""

TERMINATED = 143
"""The same after SIGTERM."""

NO_GPU = (
    "gpusim torchrun: PyTorch finds no GPU here. If the script asks for one, --device cpu lets the "
    "CPU play it"
)

FEW_GPUS = (
    "gpusim torchrun: the script names a GPU that is not there. --device cuda lets one GPU play "
    "those of all ranks, --device cpu the CPU"
)

NO_CUDA = "--device cuda: PyTorch finds no GPU here; --device cpu lets the CPU play it"

CUDA_NEEDS_THREADS = (
    "--device cuda: ranks that share a GPU are threads: leave out --processes and --instances"
)

NO_INPUT = "with --only-rank R, rank R alone has the standard input"

NO_PRELOAD = "--preload is for ranks as processes; threads share what one of them imports"

PRELOAD_HERE = "--preload is for the processes of one instance: leave out --instances"

CHECK_HERE = "--check is for the ranks of one instance: leave out --instances"

ORDERS_TAKE_TURNS = "--orders and --check-order are orders of turns: leave out --schedule free"

NO_THREADS = "--instances runs ranks as processes: leave out --threads"

DRAWN_BITS = 32
"""The bits of the base seed that --seed random draws."""


def add(commands: Any) -> None:
    """Add the command to those of `gpusim`."""
    parser = commands.add_parser(
        "torchrun",
        usage="gpusim torchrun [OPTIONS] [-m] SCRIPT ...",
        help="run a PyTorch script of torchrun's on simulated ranks",
        description="Run a script for torchrun on simulated ranks, processes that take turns. The "
        "script's backend, such as nccl or gloo, is replaced by gpusim's. "
        "torchrun's options about how processes meet, such as --rdzv-backend, are accepted and "
        "have no effect; --max-restarts has torchrun's.",
        epilog="Ctrl-C ends all ranks. The exit code is 0 if all ranks end well, 1 if one fails, "
        "whatever its own code, 2 after a wrong argument or without the script, 130 after Ctrl-C, "
        "143 after SIGTERM.",
    )
    add_ranks(parser)
    add_torchruns(parser)
    elastic.add_elastic(parser)
    add_campaign(parser)
    shared_options.add_reduction(parser)
    add_modes(parser)
    shared_options.add_records(parser)
    shared_options.add_verbosity(parser)
    shared_options.add_program(parser, "training script")
    parser.set_defaults(run=run)


def options_of(words: Sequence[str]) -> argparse.Namespace:
    """The options of the command, from the words behind its name."""
    parser = argparse.ArgumentParser()
    add(parser.add_subparsers(dest="command"))
    return parser.parse_args(["torchrun", *words])


def run(options: argparse.Namespace) -> int:
    """Run the script; 0 if all ranks end well, else 1, as torchrun."""
    ranks = options.ranks or options.nnodes * (options.nproc_per_node or 1)
    options.nproc_per_node, rest = divmod(ranks, options.nnodes)
    if rest:
        raise UsageError(f"--ranks {ranks}: expected a multiple of --nnodes {options.nnodes}")
    if options.only_rank is not None and options.only_rank >= ranks:
        raise UsageError(f"--only-rank {options.only_rank}: expected a rank below {ranks}")
    if options.threads and options.instances > 1:
        raise UsageError(NO_THREADS)
    if options.device == "cuda":
        check_cuda(options)
    if options.preload and options.instances > 1:
        raise UsageError(PRELOAD_HERE)
    if options.preload and not runs_processes(options):
        raise UsageError(NO_PRELOAD)
    asked = (options.check_report, options.check_order, options.orders or None)
    if options.check is None and any(each is not None for each in asked):
        options.check = ""
    if options.check is not None and options.instances > 1:
        raise UsageError(CHECK_HERE)
    if options.check is not None and options.json is not None and options.faults is None:
        if options.check_report is not None:
            raise UsageError(
                f"--json {options.json}: expected no --check-report, which is the same"
            )
        options.check_report, options.json = options.json, None
    check_report_target(options)
    if options.schedule == "free" and (options.orders or options.check_order is not None):
        raise UsageError(ORDERS_TAKE_TURNS)
    shared_options.check_records(options)
    require("simulated ranks need", "torch")
    if asks_for_campaign(options):
        with ends_by_signals():  # of the runs' forks
            return run_campaign(options, run, ranks, runs_processes(options))
    elastic.check_elastic(options, ranks, runs_processes(options))
    if options.orders:
        from gpusim.tools.orders import run_orders

        with ends_by_signals():  # of the runs' forks
            return run_orders(options, run)
    try:
        find = program.found_module if options.module else program.found_script
        script = find(options.script)
    except NoProgramError as error:
        hint = f"; --check={options.script} is one word" if options.script in ENGINES else ""
        print(f"gpusim torchrun: {error}{hint}", file=sys.stderr)
        return WRONG
    except Exception as error:  # a syntax error, or a package that fails
        return program.ended(error)
    program.lead_path(script.folder)
    workers = multiprocessing.active_children()
    # The command's own ranks are the first world; those that the script starts follow.
    devices = options.nproc_per_node if options.device == "cpu" else 0
    alone = runs_processes(options)  # the command starts no others
    processes = alone or options.instances > 1
    note(
        options,
        f"{options.script} on {count(ranks, 'rank')}, "
        f"{'processes' if processes else 'threads of this process'}, "
        f"{'in turns' if options.schedule == 'turns' else 'as many at a time as there are cores'}; "
        f"sums: {options.reduction or 'linear'}",
    )
    with hub(options, devices, first=2, hooks_torch=True, starts_none=alone) as to:
        code = launch_script(options, script, ranks)
        if to is not None:
            to.interrupted = code in (INTERRUPTED, TERMINATED)
    return end(code, workers) if code else 0


def launch_script(options: argparse.Namespace, script: UserProgram, ranks: int) -> int:
    """Run the script on the ranks; the exit code."""
    from gpusim.torch.distributed.runners.threads import environment_of

    more = {
        "MASTER_ADDR": options.master_addr,
        "MASTER_PORT": options.master_port,
        "ROLE_NAME": options.role,
        "TORCHELASTIC_RUN_ID": options.rdzv_id or "none",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": options.signals_to_handle or elastic.SIGNALS,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    environments = [
        environment_of(rank, ranks, options.nproc_per_node, **more) for rank in range(ranks)
    ]
    if options.only_rank is not None:
        for rank, variables in enumerate(environments):
            if rank != options.only_rank:
                variables["PYTHONBREAKPOINT"] = "0"  # breakpoint() does nothing
    world = world_of(options.instances, ranks)
    code = 0
    try:
        with world:
            code = run_on(world, options, script, environments)
    except InstanceError:  # on leaving
        if not code:
            raise
    return code


def run_on(
    world: World, options: argparse.Namespace, script: UserProgram, environments: list[Any]
) -> int:
    """Run the script on the instances, of which instance 0 shows and records what there is."""
    from gpusim.torch.distributed.accelerator import asks_for_gpu
    from gpusim.torch.distributed.private import has_gpu

    check = check_of(options)
    ranks = len(environments)
    processes = world.instances > 1 or runs_processes(options)
    seed = base_seed(world, options.seed)
    if world.instance:
        options.summary, options.record, options.trace = False, None, None
    failure: GpusimError | None = None
    interrupt: KeyboardInterrupt | None = None
    with (
        ends_by_signals(),
        quiet_ends(KeyboardInterrupt),
        tagged_output(options.only_rank, options.quiet) as outputs,
    ):
        start = Start(options, script, outputs, seed, processes)
        try:
            if elastic.is_elastic(options):
                return run_elastic(start, environments)
            with elastic.error_files() as files:
                start.run(with_variables(environments, elastic.variables(files, ranks)), check)
        except GpusimError as error:
            failure = error
        except KeyboardInterrupt as raised:
            interrupt = raised
    if options.summary and start.recorder is not None:
        show_summary(start.recorder, ranks)
    if interrupt is not None:
        return interrupted(interrupt)
    found = 0 if check is None else show_check(options, check, failure is not None)
    if failure is None:
        return found
    if world.instance:
        return 1
    show(failure, options.only_rank if processes else None)
    if options.device is None and asks_for_gpu(failure.__cause__):
        print(FEW_GPUS if has_gpu() else NO_GPU, file=sys.stderr)
    return 1


class Start:
    """How all ranks are started, once or several times.

    **Attributes**: `recorder` is that of the last start, if anything is recorded.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        script: UserProgram,
        outputs: RankOutputs,
        seed: int,
        processes: bool,
    ) -> None:
        self.options, self.script, self.outputs = options, script, outputs
        self.seed, self.processes = seed, processes
        self.recorder: Recorder | None = None

    def run(self, environments: list[Any], check: Any, attempt: int = 0, **how: Any) -> Any:
        """Run the script on ranks with these environments, which have the same seeds each time.

        From the second start on, files of records have its number in their names.
        """
        from gpusim.torch.distributed.launching import run_ranks

        options, ranks = copy.copy(self.options), len(environments)
        options.record = numbered(options.record, attempt + 1)
        options.trace = numbered(options.trace, attempt + 1)

        def body(rank: Any) -> None:
            self.outputs.follow_process(rank.index)
            with traced_as(options.traced, rank.index, ranks):
                run_script(self.script, options.arguments)

        with record_of(options, ranks, self.outputs) as recorder:
            self.recorder = recorder
            return run_ranks(
                body,
                environments,
                options.reduction,
                options.schedule,
                recorder,
                options.device,
                self.processes,
                self.outputs.of_rank,
                leaves_blocked=True,
                seed=self.seed,
                preload=options.preload,
                check=check or False,
                attempt=attempt,
                **how,
            )


def with_variables(
    environments: Sequence[Mapping[str, str]], more: Sequence[Mapping[str, str]]
) -> list[dict[str, str]]:
    """The ranks' environments, with more variables of each."""
    return [{**each, **own} for each, own in zip(environments, more, strict=True)]


def run_elastic(start: Start, environments: list[Any]) -> int:
    """Start ranks that may die, and again as often as --max-restarts says; the exit code."""
    options, ranks = start.options, len(environments)
    checks: list[Any] = []

    def once(attempt: int, more: Sequence[Mapping[str, str]]) -> Any:
        checks.append(check_of(options))
        how = {"faults": options.plan, "mortal": True}
        return start.run(with_variables(environments, more), checks[-1], attempt, **how)

    outcome = elastic.run_attempts(options, once, ranks)
    if options.summary and start.recorder is not None:
        show_summary(start.recorder, ranks)
    found = 0
    if checks[-1] is not None:
        findings = [each for check in checks for each in check.findings]
        checks[-1].findings = [each for n, each in enumerate(findings) if each not in findings[:n]]
        found = show_check(options, checks[-1], outcome.failed)
    return elastic.show_outcome(options, outcome, options.nproc_per_node) or found


def check_cuda(options: argparse.Namespace) -> None:
    """UsageError where one GPU cannot play those of all ranks."""
    from gpusim.torch.distributed.private import has_gpu

    if options.processes or options.instances > 1:
        raise UsageError(CUDA_NEEDS_THREADS)
    if not has_gpu():
        raise UsageError(NO_CUDA)


def runs_processes(options: argparse.Namespace) -> bool:
    """Whether ranks are processes, and not threads."""
    from gpusim.torch.distributed.private import has_gpu

    if options.processes or options.threads:
        return bool(options.processes)
    return sys.platform == "linux" and (options.device == "cpu" or not has_gpu())


def check_of(options: argparse.Namespace) -> Any:
    """The check that the options ask for; None without."""
    if options.check is None:
        return None
    from gpusim.torch.distributed.checks import Check

    keeps = options.check_values is not None
    return Check(options.check, is_script=True, order=options.check_order, keeps_values=keeps)


def show_check(options: argparse.Namespace, check: Any, failed: bool) -> int:
    """Show the findings of a check, and write them; the exit code."""
    text = str(check)
    if failed and not check.findings:
        text = text.replace("no findings", "no findings up to where the program failed", 1)
    code = show_findings(options, check.findings, text)
    if options.check_values is not None:
        findings = [each.as_json() for each in check.findings]
        left = {"values": check.values, "findings": findings, "failed": failed}
        options.check_values.write_text(json.dumps(left))
    return code


def base_seed(world: World, given: int | None) -> int:
    """The base seed of all instances; one that instance 0 has drawn and says if none is given."""
    if given is not None:
        return given
    seed = secrets.randbits(DRAWN_BITS)
    if world.instances > 1:
        row = np.array([seed], np.uint64)
        seed = int(world.gather("gpusim torchrun: the base seed", row)[0, 0])
    if world.instance == 0:
        print(f"gpusim torchrun: --seed {seed}", file=sys.stderr)
    return seed


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
        raise UsageError(
            f"--instances {instances}: this command runs as {count(found, 'instance')}; "
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
            f"gpusim torchrun: {launch.launcher} has started "
            f"{count(launch.instances, 'instance')} of this "
            f"command, and each runs {every(ranks, 'rank')}; --instances {launch.instances} "
            "spreads the "
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


def end_quickly() -> None:
    """Leave the memory of the ranks' models to the system. (By `atexit`.)

    Python's end walks through all of it several times, in cycles: 64 ranks take seconds. What would
    be freed there may be files that hold text back.
    """
    flush_all()
    if "triton" not in sys.modules:  # whose nanobind would list what is not freed
        gc.freeze()


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


def traced_as(settings: str | None, rank: int, ranks: int) -> AbstractContextManager[Any]:
    """A block in which the rank is traced, if `gpusim equal` or `gpusim resume` asks for it."""
    if settings is None:
        return nullcontext()
    if "faults" in json.loads(settings):  # of a campaign
        from gpusim.tools.faults.observing import observed

        return observed(json.loads(settings)["faults"], rank)
    if "checkpoint" in json.loads(settings):
        from gpusim.tools.resume import settings as resume
        from gpusim.tools.resume import tracing

        return tracing.traced(resume.Settings(**json.loads(settings)), rank, ranks)
    from gpusim.tools.equal.settings import Settings
    from gpusim.tools.equal.tracing import traced

    return traced(Settings(**json.loads(settings)), rank, ranks)


class ExitCodeError(Exception):
    """A rank has ended with an exit code."""


def run_script(script: UserProgram, arguments: Sequence[str]) -> None:
    """The script in the calling rank, as `__main__`."""
    from gpusim.torch.distributed.own.forks import ends_forks

    sys.argv = [script.name, *arguments]
    try:
        with ends_forks():
            exec(own_code(script.code), vars(main_module(script)))
    except SystemExit as ended:
        if ended.code is None or (isinstance(ended.code, int) and ended.code == 0):
            return
        code = f"exit code {ended.code}" if isinstance(ended.code, int) else repr(str(ended.code))
        frames = [each for each in traceback.walk_tb(ended.__traceback__) if is_users(each[0])]
        for frame, line in frames[-1:]:  # none of a module that is installed
            code += f" at {frame.f_code.co_filename}:{line}"
        raise ExitCodeError(code) from None


def own_code(code: CodeType) -> CodeType:
    """A copy of the script's code for the calling rank.

    Dynamo keeps what it has compiled with the code, in terms of the rank's own `__main__`.
    """
    copy: CodeType = marshal.loads(marshal.dumps(code))
    return copy


def show(error: GpusimError, only_input: int | None) -> None:
    """The traceback of a rank's own exception, with the rank as its tag, and what went wrong.

    A debugger of another rank than `only_input`, if that is given, ends as it has nothing to read.
    """
    from gpusim.torch.distributed.tracebacks import RemoteTraceback

    cause = error.__cause__
    if isinstance(error, ReplicaError) and cause is not None:
        if isinstance(cause, ExitCodeError):
            print(f"gpusim torchrun: rank {error.index} ended with {cause}", file=sys.stderr)
            return
        if isinstance(cause, BdbQuit):
            text = f"gpusim torchrun: rank {error.index} ended in the debugger"
            has_input = only_input in (None, error.index)
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
