"""Classes of causes in sentences: the relation of the data, how sure it is, and what has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from gpusim.words import count, every, listed, named

from .causes import Cause

__all__ = ["words_of"]

Ranks = tuple[int, int]
"""The numbers of ranks of a and b."""
About = Mapping[str, Any]


def words_of(cause: Cause, ranks: Ranks) -> list[str]:
    """The class of a cause in sentences: the relation of the data, and how sure it is.

    >>> words_of(Cause("factor", "proven", about={"factor_name": "1/2", "ranks": [0, 1]}), (2, 2))
    ["Proven: a constant factor: b has a's values times 1/2, as of a sum and a mean over 2 ranks, or
    a loss divided otherwise."]
    """
    told = [_CAUSES[cause.name](cause, cause.about, ranks)]
    for name, alone in cause.about.get("not_finite", {}).items():
        if alone:
            other = "a" if name == "b" else "b"
            told.append(
                f"{name} has NaN or infinity in {count(alone, 'element')}, {other} numbers."
            )
    if cause.alternatives and cause.certainty != "proven":
        others = listed([_NAMES[name] for name in cause.alternatives], "or")
        told.append(f"The data allow {others}, too.")
    if cause.needs:
        told.append(
            "Whole arrays were not kept; with --arrays all in both runs, a constant factor, a cast "
            "and last bits are told apart."
        )
    return told


_NAMES = {
    "rounding": "rounding",
    "factor": "a constant factor",
    "buckets": "other buckets",
    "data": "other data or another seed",
    "permuted": "data dealt out to the ranks otherwise",
    "optimizer": "another update",
    "cast": "a cast",
    "missing": "a missing call",
    "doubled": "a doubled call",
    "additional": "an additional call",
    "scaled": "a constant factor on some ranks",
    "ended": "the end of a run",
    "other": "another cause",
}


def _rounding(cause: Cause, about: About, ranks: Ranks) -> str:
    if about.get("where") == "program":
        return (
            f"Consistent with rounding before the call: operands differ by a relative norm of "
            f"{about['norm']:.2g}, no more than {about['threshold']:.2g}, in last bits, as by "
            "another library, number of threads or order of the samples in a batch."
        )
    if cause.certainty == "proven":
        return "Proven: both results are sums of the same operands, rounded in another order."
    if "threshold" in about:
        return (
            f"Consistent with rounding of the same sum: the relative norm {about['norm']:.2g} is "
            f"no more than {about['threshold']:.2g}, which rounding may give."
        )
    return "Consistent with rounding of the same sum, in another order or format."


def _factor(cause: Cause, about: About, ranks: Ranks) -> str:
    if "factors" in about:
        each = ", ".join(f"{value:.6g} on rank {rank}" for rank, value in about["factors"].items())
        return f"Consistent with a factor of each rank's own: b has a's values times {each}."
    name = about["factor_name"]
    if about.get("operators"):
        return f"Proven: one run takes the sum and the other the mean, a factor of {name}."
    if ranks[0] != ranks[1]:
        design = name in {str(Fraction(*ranks)), str(Fraction(*ranks[::-1]))}
        more = ", as a sum over the ranks has by design" if design else ""
        return f"{_sure(cause)} a factor of {name} between the results{more}."
    if name.startswith("-"):
        more = "of the other sign"
    elif name in (str(ranks[0]), f"1/{ranks[0]}"):
        more = f"as of a sum and a mean over {ranks[0]} ranks, or a loss divided otherwise"
    else:
        more = "as of a loss divided otherwise: accumulation, the size of a batch, a GradScaler"
    return f"{_sure(cause)} a constant factor: b has a's values times {name}, {more}."


def _scaled(cause: Cause, about: About, ranks: Ranks) -> str:
    if "factors" in about:
        return _factor(cause, about, ranks)
    return (
        f"{_sure(cause)} a factor on {named('rank', about['ranks'])} alone: b has a's values times "
        f"{about['factor_name']} there."
    )


def _buckets(cause: Cause, about: About, ranks: Ranks) -> str:
    sides = [" + ".join(f"{n:,}" for n in about["sizes"][name]) for name in "ab"]
    if len(about["sizes"]["a"]) > len(about["sizes"]["b"]):
        sides.reverse()
    same = "The elements are equal" if cause.certainty == "proven" else "Their sums are equal"
    if about["ddp"]:
        return f"DDP's buckets differ ({' = '.join(sides)}): bucket_cap_mb. {same}."
    return (
        f"The same elements are cut into other calls ({' = '.join(sides)}), as by DDP's "
        f"bucket_cap_mb or find_unused_parameters, or FSDP's wrapping. {same}."
    )


def _data(cause: Cause, about: About, ranks: Ranks) -> str:
    if "root" in about:
        return (
            f"Consistent with other values on the root, rank {about['root']}: initial weights, "
            "their seed, or data that it has read."
        )
    if len(about["ranks"]) == ranks[0] > 1:
        return (
            "Consistent with other data on all ranks: a seed, a sampler, a missing set_epoch, or "
            "shuffling."
        )
    ranks_of = named("rank", about["ranks"])
    if "few" in about:
        return f"Consistent with other data, seed or weights: few values differ, on {ranks_of}."
    return f"Consistent with other data, seed or weights on {ranks_of} alone."


def _permuted(cause: Cause, about: About, ranks: Ranks) -> str:
    rest = "as by a sampler, set_epoch or a shard that is taken by another rank"
    if "sources" not in about:
        return (
            f"Consistent with the same data, dealt out to the ranks otherwise, {rest}: operands "
            "differ, and their sums agree up to rounding."
        )
    moved = [f"rank {rank} has rank {source}'s" for rank, source in about["sources"].items()]
    more = f" and {len(moved) - 4} more" if len(moved) > 4 else ""
    return (
        f"{_sure(cause)} data that moved: b has the same operands on other ranks "
        f"({', '.join(moved[:4])}{more}), {rest}."
    )


def _optimizer(cause: Cause, about: About, ranks: Ranks) -> str:
    bits = " in last bits" if "threshold" in about else ""
    if "across" in about:
        return (
            "Consistent with another update of the weights: this call differed by no more than "
            "rounding or a factor before (a learning rate that depends on the number of ranks)."
        )
    if len(about["ranks"]) == ranks[0]:
        return (
            "Consistent with another update of the weights: this call was equal before, and now "
            f"differs{bits} on {every(ranks[0], 'rank')} (learning rate, weight decay, momentum)."
        )
    return (
        f"Consistent with other weights on {named('rank', about['ranks'])} alone, as by a gradient "
        "that is changed after it was reduced."
    )


def _cast(cause: Cause, about: About, ranks: Ranks) -> str:
    if "of" in about:
        other = "a" if about["of"] == "b" else "b"
        return (
            f"{_sure(cause)} a cast: {about['of']} has {other}'s values, rounded to "
            f"{about['dtype']}."
        )
    if "before" in about:
        return (
            f"Consistent with a cast before the call: operands differ by a relative norm of "
            f"{about['norm']:.2g}, about what values rounded to {about['dtype']} give."
        )
    dtypes = about["dtypes"]
    return f"Consistent with a cast: a passes {dtypes['a']}, b {dtypes['b']}."


def _missing(cause: Cause, about: About, ranks: Ranks) -> str:
    if "calls" in about:
        return _often(about)
    return "A call of a is missing in b."


def _doubled(cause: Cause, about: About, ranks: Ranks) -> str:
    if cause.certainty == "proven":
        return "Proven: the call repeats the one beside it, on what that one had or gave."
    return "Consistent with a call that is made twice."


def _additional(cause: Cause, about: About, ranks: Ranks) -> str:
    if "calls" in about:
        return _often(about)
    return "A call of b is additional."


def _often(about: About) -> str:
    calls = about["calls"]
    return (
        f"Consistent with calls that one run alone makes: a makes this call {calls['a']:,} times, "
        f"b {calls['b']:,} times, as without no_sync in accumulation."
    )


def _ended(cause: Cause, about: About, ranks: Ranks) -> str:
    return "One run makes fewer calls, and all of these are calls of the other."


def _other(cause: Cause, about: About, ranks: Ranks) -> str:
    if "order" in about:
        return "Both runs make this call as often: they make their calls in another order."
    if "coarse" in about:
        return (
            f"Not told: rounding may give a relative norm of {about['threshold']:.2g} here, as an "
            f"accumulator or a wire is so narrow, so that {about['norm']:.2g} may be rounding or "
            "another cause. Record both runs with wider ones."
        )
    return "The data have none of the relations that would name a cause."


def _sure(cause: Cause) -> str:
    return "Proven:" if cause.certainty == "proven" else "Consistent with"


_CAUSES: dict[str, Callable[[Cause, About, Ranks], str]] = {
    "rounding": _rounding,
    "factor": _factor,
    "buckets": _buckets,
    "data": _data,
    "permuted": _permuted,
    "optimizer": _optimizer,
    "cast": _cast,
    "missing": _missing,
    "doubled": _doubled,
    "additional": _additional,
    "scaled": _scaled,
    "ended": _ended,
    "other": _other,
}
