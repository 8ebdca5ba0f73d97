"""Commands that run a script on ranks: `python -m bench.torchrun`.

`gpusim torchrun` with processes and with threads, beside torchrun over gloo: the seconds of
a step of DDP, of FSDP2 and of an all_reduce of one number, and of the whole command. The commands
take turns, and the medians of all rounds are compared as ratios to torchrun's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import machine

ROOT = Path(__file__).parents[1]
GLOO, PROCESSES, THREADS = "torchrun", "processes", "threads"
COMMANDS: dict[str, tuple[str, ...]] = {
    GLOO: ("torch.distributed.run",),
    PROCESSES: ("gpusim", "torchrun", "--processes"),
    THREADS: ("gpusim", "torchrun", "--threads"),
}
CASES = ("number", "ddp", "fsdp2")
RANKS = (4, 16, 64)
ROUNDS, STEPS = 3, 10
#: At most these many times torchrun's seconds: of a step, and of the command.
TARGETS = {PROCESSES: (0.8, 0.35), THREADS: (0.7, 0.35)}
#: Seconds for the all_reduce of one number, at most, at this number of ranks.
NUMBER, NUMBER_RANKS = 5e-3, 64


def program(case: str) -> None:
    """The script: rank 0 prints the seconds of a step."""
    import torch
    import torch.distributed as dist

    from bench.ranks_program import CASES as STEPS_OF

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    number = torch.ones(1)
    step = STEPS_OF[case](dist.get_rank()) if case in STEPS_OF else lambda: dist.all_reduce(number)
    for _ in range(2):
        step()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": (time.perf_counter() - start) / STEPS}), flush=True)
    dist.destroy_process_group()


def run(command: str, case: str, ranks: int) -> tuple[float, float]:
    """Run a command once.

    **Returns**: the seconds of a step, and of the command.

    **Raises**: RuntimeError with the last line that a failed command wrote.
    """
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    port = ("--master-port", "29517") if command == GLOO else ()
    line = [
        sys.executable,
        "-m",
        *COMMANDS[command],
        "--nproc-per-node",
        str(ranks),
        *port,
        "-m",
        "bench.torchrun",
        "program",
        case,
    ]
    start = time.perf_counter()
    done = subprocess.run(line, cwd=ROOT, env=os.environ | settings, capture_output=True, text=True)
    whole = time.perf_counter() - start
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise RuntimeError(
            f"{command} of {case} on {ranks} ranks: {said[-1] if said else 'failed'}"
        )
    answer = next(line for line in done.stdout.splitlines() if '"seconds"' in line)
    return float(json.loads(answer[answer.index("{") :])["seconds"]), whole


def measure(case: str, ranks: int, rounds: int) -> dict[str, Any]:
    """The medians of all commands' seconds, which take turns."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for number in range(rounds):
        for name in COMMANDS:
            print(f"\r{case}, {ranks} ranks, round {number + 1} of {rounds}: {name:10}", end="",
                  file=sys.stderr)  # fmt: skip
            found[name].append(run(name, case, ranks))
    print("\r" + " " * 60, end="\r", file=sys.stderr)
    return {
        "case": case,
        "ranks": ranks,
        "load": machine.load(),
        "seconds": {
            name: {
                "step": statistics.median(step for step, _ in seconds),
                "command": statistics.median(whole for _, whole in seconds),
            }
            for name, seconds in found.items()
        },
    }


def show(case: dict[str, Any]) -> None:
    """Print a line for each command, with ratios to torchrun and the missed targets."""
    gloo = case["seconds"][GLOO]
    for name, seconds in case["seconds"].items():
        ratios = [seconds[what] / gloo[what] for what in ("step", "command")]
        text = f"{case['case']:7} {case['ranks']:3} ranks  {name:10}"
        text += f" step {1e3 * seconds['step']:9.2f} ms ({ratios[0]:.2f})"
        text += f"  command {seconds['command']:6.1f} s ({ratios[1]:.2f})"
        if name in TARGETS and case["case"] != "number":
            missed = [
                f"{what} target {target}"
                for what, ratio, target in zip(
                    ("step", "command"), ratios, TARGETS[name], strict=True
                )
                if ratio > target
            ]
            text += "  missed: " + ", ".join(missed) if missed else "  met"
        elif name in TARGETS and case["ranks"] == NUMBER_RANKS:
            text += "  met" if seconds["step"] <= NUMBER else f"  missed: target {1e3 * NUMBER} ms"
        print(text, flush=True)


def main(words: Sequence[str]) -> int:
    if words[:1] == ["program"]:
        program(words[1])
        return 0
    parser = argparse.ArgumentParser(prog="python -m bench.torchrun", description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    options = parser.parse_args(words)
    cases = []
    for ranks in options.ranks:
        for case in options.cases:
            cases.append(measure(case, ranks, options.rounds))
            show(cases[-1])
            if options.json is not None:
                result = {"machine": machine.survey(), "rounds": options.rounds, "cases": cases}
                options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
