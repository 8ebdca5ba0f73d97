"""Runs of the programs of tests/jax/ground in processes of their own, and what is compared."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np

from tests.jax.child import ROOT
from tests.oracles.machine_time import PATIENCE

#: The folder's modules that have programs.
MODULES = sorted(
    path.stem
    for path in (Path(__file__).parent / "ground").glob("*.py")
    if not path.stem.startswith("_")
)

#: Operations whose partitioned forms add zeros to what one device holds: their sums move data, and
#: stay XLA's.
MOVES = {
    "concatenate", "dynamic_slice", "dynamic_update_slice", "gather", "pad", "slice", "squeeze",
    "transpose",
}  # fmt: skip

#: By bytes of a number: the share of a program's last bits in which its numbers may differ.
SHARES = {1: 1 / 16, 2: 1 / 4, 4: 1.0}


@dataclass
class Run:
    """The outcomes of programs, by name."""

    outcomes: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: Programs in which the process ended, with the end of what it said.
    crashed: dict[str, str] = field(default_factory=dict)


def run(
    *names: str,
    reduction: str | None = None,
    sample: int | None = None,
    seed: int = 0,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Run:
    """Run the programs of modules, or single ones.

    A process that ends in a program is started again behind it.

    **Arguments**: `reduction` is what gpusim is installed with; None is JAX alone. `sample` is how
    many programs of each module run at most, which the seed draws.
    """
    found = Run()
    how = ["--json", *(("--reduction", reduction) if reduction else ("--plain",))]
    which = [] if sample is None else ["--sample", str(sample), "--seed", str(seed)]
    left = [*names]
    while left:
        done = call(*how, *which, *left, environment=environment)
        begun = None
        for line in done.stdout.splitlines():
            said = json.loads(line)
            if "programs" in said:
                left, which = said["programs"], []
            elif "begins" in said:
                begun = said["begins"]
            else:
                found.outcomes[said["name"]] = said
        assert begun is not None, done.stdout + done.stderr
        if begun not in found.outcomes:
            found.crashed[begun] = f"exit {done.returncode}: {done.stderr[-2000:]}"
        left = left[left.index(begun) + 1 :]
    return found


def call(*words: str, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Call `python -m tests.jax.ground`."""
    # Some errors of JAX's list sets of names, in the order of their hashes.
    own = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONHASHSEED": "0"}
    for name in ("XLA_FLAGS", "JAX_ENABLE_X64"):
        own.pop(name, None)
    command = [sys.executable, "-m", "tests.jax.ground", *words]
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**own, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def failures(plain: Run) -> dict[str, str]:
    """The programs that fail with JAX alone, with tracebacks."""
    failed = {name: each["traceback"] for name, each in plain.outcomes.items() if "error" in each}
    return {**plain.crashed, **failed}


def differences(plain: Run, other: Run, *, bits: bool = False) -> dict[str, list[str]]:
    """By program, how the results of a run differ from those of another.

    **Arguments**: with `bits`, numbers of all types have equal bits; otherwise floating-point
    numbers may differ in their last bits, as many as the program says.
    """
    found = {name: [text] for name, text in other.crashed.items()}
    for name in plain.outcomes.keys() & other.outcomes.keys():
        lines = of_program(plain.outcomes[name], other.outcomes[name], bits)
        if lines:
            found[name] = lines
    return found


def of_program(before: dict[str, Any], after: dict[str, Any], bits: bool) -> list[str]:
    """How the outcomes of one program differ."""
    if "error" in after:
        return [after["traceback"]] if before.get("error") != after["error"] else []
    found = [
        f"{key}: {before.get(key)!r} and {after.get(key)!r}"
        for key in ("skip", "compilations")
        if before.get(key) != after.get(key)
    ]
    if "result" not in before or "result" not in after:
        return found
    one, two = before["result"], after["result"]
    if one["structure"] != two["structure"]:
        return [*found, f"structure: {one['structure']} and {two['structure']}"]
    for path, leaf in one["leaves"].items():
        found += [
            f"result{path}: {each}"
            for each in of_leaf(leaf, two["leaves"][path], 0 if bits else before["last_bits"])
        ]
    return found


def of_leaf(one: dict[str, Any], two: dict[str, Any], last_bits: float) -> list[str]:
    """How two leaves differ: in what they are, or in their numbers."""
    numbers = ("data", "text") if one["kind"] in ("float", "complex") else ("data",)
    found = [
        f"{key}: {one.get(key)!r} and {two.get(key)!r}"
        for key in one.keys() | two.keys()
        if key not in (*numbers, "key") and one.get(key) != two.get(key)
    ]
    if found:
        return found
    if "key" in one:
        return of_leaf(one["key"], two["key"], 0)
    if "data" in one:
        return of_arrays(array(one), array(two), last_bits)
    if "text" in numbers:
        pair = [np.asarray(complex(each["text"]), np.complex64) for each in (one, two)]
        return of_arrays(pair[0], pair[1], last_bits)
    return []


def array(leaf: dict[str, Any]) -> np.ndarray:
    """The array of a leaf."""
    dtype = np.dtype(getattr(ml_dtypes, leaf["dtype"], None) or leaf["dtype"])
    return np.frombuffer(base64.b64decode(leaf["data"]), dtype).reshape(leaf["shape"])


def of_arrays(one: np.ndarray, two: np.ndarray, last_bits: float) -> list[str]:
    """How the numbers of two arrays of one dtype and shape differ."""
    if one.tobytes() == two.tobytes():
        return []
    floating = one.dtype.kind in "fcV" and "int" not in one.dtype.name
    if not floating or not last_bits:
        count = int((bits_of(one) != bits_of(two)).any(-1).sum())
        return [f"{count} of {one.size} elements differ: {one} and {two}"]
    wide = np.complex128 if one.dtype.kind == "c" else np.float64
    one_wide, two_wide = one.astype(wide), two.astype(wide)
    known = np.isfinite(one_wide)
    if (known != np.isfinite(two_wide)).any():
        return [f"infinities or NaN differ: {one} and {two}"]
    if not np.array_equal(one_wide[~known], two_wide[~known], equal_nan=True):
        return [f"infinities differ: {one} and {two}"]
    size = np.abs(one_wide[known]).max(initial=1)
    allowed = last_bits * SHARES[min(one.dtype.itemsize, 4)] * eps(one.dtype) * size
    worst = np.abs(one_wide[known] - two_wide[known]).max(initial=0)
    if worst > allowed:
        return [f"numbers differ by {worst:.3g}, more than {allowed:.3g}: {one} and {two}"]
    return []


def eps(dtype: Any) -> float:
    """The distance of 1 from the next larger number."""
    return float(ml_dtypes.finfo(dtype).eps)


def bits_of(x: np.ndarray) -> np.ndarray:
    """The bytes of each element."""
    return np.frombuffer(np.ascontiguousarray(x).tobytes(), np.uint8).reshape(x.size, -1)


def unexplained(found: Run) -> dict[str, list[str]]:
    """By program, the sums that XLA has kept without a warning, those that move data left out."""
    kept = {
        name: [text for text in outcome["sums"]["left"] if is_chosen(text)]
        for name, outcome in found.outcomes.items()
        if not outcome["warnings"]
    }
    return {name: texts for name, texts in kept.items() if texts}


def is_chosen(text: str) -> bool:
    """Whether a reduction of a compiled program should be gpusim's.

    >>> is_chosen("all-reduce by add of f32 for jit(f)/reduce_sum")
    True
    >>> is_chosen("all-reduce by add of f32 for call/jit(f)/(gather:jit(g)/squeeze)")
    False
    """
    kind, _, source = text.partition(" for ")
    if not any(f" by {word} of " in kind for word in ("add", "maximum", "minimum")):
        return False
    # XLA joins the names of operations that it makes one of.
    names = re.split("[:;]", source)
    return any(name.rpartition("/")[2].strip("()") not in MOVES for name in names)
