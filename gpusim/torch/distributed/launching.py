"""Starting ranks: as threads of this process, as processes, or spread over instances of a World."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from ...collectives import dispatch
from ...errors import GpusimError
from ...recording import Recorder
from ...recording import recorder as recording
from ...runtime.world import current_world, without_world
from .calls.folds import ReductionLike, as_chooser
from .own.seeds import as_seed
from .private import has_gpu
from .runners.threads import Around, Launch, Rank, environment_of

if TYPE_CHECKING:
    from .checks import Check
    from .faults.plans import Fault

__all__ = ["launch", "run_ranks"]

T = TypeVar("T")
SCHEDULES = ("turns", "free")

# Held as long as a launch runs: it replaces functions of the whole process. Not waited for, as a
# launch inside of a launch would wait for itself.
_launching = threading.Lock()


def launch(
    f: Callable[..., T],
    ranks: int,
    args: Sequence[Any] = (),
    *,
    reduction: ReductionLike | None = None,
    schedule: str = "turns",
    recorder: Recorder | None = None,
    device: str | None = None,
    processes: bool = False,
    address: str = "127.0.0.1",
    seed: int = 0,
    check: bool | str | Check = False,
) -> list[T]:
    """Run `f(rank, *args)` on simulated ranks, each a thread with a torch.distributed of its own.

    `f` does what it would do in a process: it calls `init_process_group`, with any backend, and
    then torch.distributed. Each rank has RANK, WORLD_SIZE and torchrun's other variables.

    **Arguments**:

    - `f`: a function of the rank's number and of `args`, as torch.multiprocessing.spawn takes it.
    - `ranks`: how many there are.
    - `reduction`: how sums are added: what `gpusim.as_reduction` takes, such as "gloo-ring", or a
      function of a `FoldCall` that returns that. None is that of the
      `gpusim.reduction` context, which each rank can enter for itself. The `pg_options` of a new
      group are the same for the group.
    - `schedule`: "turns" runs one rank at a time, up to where it has to wait, in a fixed order, and
      gives each rank generators, a default dtype, os.environ, sys.argv and a working directory of
      its own. "free" lets as many ranks run as there are cores; generators and os.environ are
      the rank's, all else is shared.
    - `recorder`: a `Recorder` that records every call. None is that of a `gpusim.record` block
      around the launch; without one it costs nothing.
    - `device`: "cpu" lets the CPU play the GPUs that a program asks for: "cuda" and "cuda:3" are
      the host. "cuda" lets one real GPU play them: "cuda" and "cuda:3" are the machine's first.
      None leaves devices as they are.
    - `processes`: True runs each rank in a process of its own, forked from this one, so that the
      globals of modules belong to the rank. Linux only. The bits, errors and records are the same.
    - `address`: MASTER_ADDR of the ranks. In a `gpusim.World` of several instances, instance 0
      listens there for the others. Each instance makes the launch, and runs the ranks that are its
      replicas as processes; all get the results or the error. The recorder is instance 0's.
    - `seed`: the base seed. Generators that a rank does not seed start with states that follow from
      it and from the rank's number: torch's, NumPy's global one, and Python's `random`. So ranks
      differ, as processes do, and runs repeat. The caller's own generators have no part in it.
    - `check`: True looks for programs whose ranks agree and that are wrong or would not survive
      NCCL: results read before they are there, gradients that are never reduced, and more; see
      the page "Programs whose ranks agree". "nccl" and "gloo" check operands by this engine's rules
      whatever the program names. A `Check` is the same, and keeps the findings.

    **Returns**: what each rank returned; None for one that calls `sys.exit()`. Processes can hand
    back tensors, NumPy arrays and plain data: what `torch.load(weights_only=True)` reads.

    **Raises**:

    - ReplicaError: if a rank raises; the exception is its cause, and the others are ended. Also
      if its process ends by a signal or an exit code.
    - CollectiveMismatchError: if ranks make calls that differ, naming both.
    - DeadlockError: as soon as no rank can go on, naming what each waits for.
    - InstanceError: if an instance of the World is gone, with its ranks.
    - CheckError: if the check has findings, and the ranks end well.
    - GpusimError: inside of another launch.

    >>> import torch, torch.distributed as dist
    >>> from gpusim.torch.distributed import launch
    >>> def train(rank):
    ...     dist.init_process_group()
    ...     x = torch.tensor([1.0, 2.0]) * (rank + 1)
    ...     dist.all_reduce(x)
    ...     return x.tolist()
    >>> launch(train, 3)
    [[6.0, 12.0], [6.0, 12.0], [6.0, 12.0]]
    """
    if not callable(f):
        raise TypeError(f"launch needs a function, got {f!r:.60}")
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"launch: ranks={ranks!r}: expected an integer from 1")
    environments = [
        environment_of(rank, ranks, ranks, MASTER_ADDR=address) for rank in range(ranks)
    ]
    return run_ranks(
        lambda rank: f(rank.index, *args),
        environments,
        reduction,
        schedule,
        recorder,
        device,
        processes,
        seed=seed,
        check=check,
    )


def run_ranks(
    run: Callable[[Rank], T],
    environments: Sequence[Mapping[str, str]],
    reduction: ReductionLike | None,
    schedule: str,
    recorder: Recorder | None = None,
    device: str | None = None,
    processes: bool = False,
    around: Around | None = None,
    leaves_blocked: bool = False,
    seed: int = 0,
    preload: Sequence[str] = (),
    check: bool | str | Check = False,
    faults: Sequence[Fault] = (),
    attempt: int = 0,
    mortal: bool = False,
) -> Any:
    """Run a function for a rank with each of the environments; see `launch`.

    `leaves_blocked`: after Ctrl-C, do not wait for ranks that are in C code. `preload`: modules
    that are imported once, before ranks are forked, if they are processes. `check` is as in
    `launch`; the findings of a `Check` that is given are its own, and raise nothing.

    `mortal`: ranks are processes that may die, hang and be late, as the `faults` of start number
    `attempt` have it, and the others see what c10d shows. Faults imply it.

    **Returns**: what each rank returned, in a list. Of mortal ranks: `faults.survivors.Endings`,
    which says how each has ended; a rank's end raises nothing.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"launch: schedule={schedule!r}: expected one of {SCHEDULES}")
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"launch: device={device!r}: expected None, 'cpu' or 'cuda'")
    if device == "cuda":
        if not has_gpu():
            raise ValueError("launch: device='cuda': PyTorch finds no GPU here; 'cpu' plays them")
        if processes:
            raise ValueError(
                "launch: device='cuda' with processes=True: ranks that share a GPU are threads"
            )
    if not isinstance(recorder, Recorder | None):
        raise TypeError(f"launch: recorder={recorder!r:.60}: expected a Recorder")
    seed = as_seed(seed, "launch: seed")
    checking = as_check(check)
    chooser = as_chooser(reduction, "launch: reduction")
    mortal = mortal or bool(faults)
    if mortal:
        check_mortal(faults, processes)
    recorder = recorder or recording.block_recorder
    if not _launching.acquire(blocking=False):
        raise GpusimError("launch: another launch is running in this process")
    # A fold of the exchange goes through the dispatcher too, and would be recorded as one more
    # call.
    recorded, dispatch.record_call = dispatch.record_call, None  # ranks record their own calls
    try:
        kind: Callable[..., Launch] = Launch
        world = current_world()
        if world is not None and world.instances > 1:
            if device == "cuda":
                raise ValueError("launch: device='cuda': instances run ranks as processes")
            from .runners.instances import InstancesLaunch

            kind = functools.partial(InstancesLaunch, world)
        elif mortal:
            from .faults.survivors import MortalLaunch

            kind = functools.partial(MortalLaunch, faults, attempt)
        elif processes:
            from .runners.processes import ProcessLaunch

            kind = ProcessLaunch
        # A rank's own collectives of gpusim.lax are its own, and not those of all instances.
        with without_world():  # which ranks do not enter
            found = kind(environments, run, chooser, schedule, recorder, device, around, seed)
            found.preload = preload
            found.check = checking
            if checking is not None:
                found.scheduler.pick = checking.pick_turns()
            found.scheduler.leaves_blocked = leaves_blocked
            found.scheduler.caller = "torchrun" if leaves_blocked else "launch"
            with checking or nullcontext():
                results = found.execute()
    finally:
        dispatch.record_call = recorded
        _launching.release()
    if checking is not None and checking is not check:
        checking.raise_findings()
    return results


def check_mortal(faults: Sequence[Fault], processes: bool) -> None:
    """ValueError if ranks that may die are to be threads, or run on several instances."""
    name = f"faults={[str(fault) for fault in faults]}" if faults else "mortal=True"
    world = current_world()
    if world is not None and world.instances > 1:
        raise ValueError(f"launch: {name}: the ranks of one instance alone can have faults")
    if not processes:
        raise ValueError(
            f"launch: {name}: ranks that are threads cannot die by themselves; give processes=True"
        )


def as_check(given: bool | str | Check) -> Check | None:
    """The check of a launch; None without one, for which nothing is imported."""
    if given is False:
        return None
    from .checks import as_check

    return as_check(given)
