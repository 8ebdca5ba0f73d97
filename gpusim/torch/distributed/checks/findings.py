"""Findings: what is wrong, where, on which ranks, and what a cluster would do."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["KINDS", "Finding", "Kind", "merged", "shown"]


class Kind(NamedTuple):
    """A kind of finding: what a real machine does, the cure, and the source of the rule."""

    cluster: str
    cure: str
    source: str


NCCL_GUIDE = "NCCL user guide"
C10D = "torch.distributed's documentation"

KINDS: dict[str, Kind] = {
    "read-before-wait": Kind(
        "the values are old, new or half of each, as it happens",
        "call wait() on the work before the tensor is used",
        f"{C10D}, synchronous and asynchronous collective operations",
    ),
    "write-before-wait": Kind(
        "what is sent, or what is received, is the old values, the new ones or half of each, as it "
        "happens",
        "call wait() on the work before the tensor is written, or give the call one of its own",
        f"{C10D}, synchronous and asynchronous collective operations",
    ),
    "never-waited": Kind(
        "the result may come after it is used, and an error of the call is never seen",
        "keep the work and call wait() on it",
        f"{C10D}, synchronous and asynchronous collective operations",
    ),
    "overlapping-buffers": Kind(
        "gloo runs the calls side by side, and NCCL calls of two groups too: the result is either "
        "call's, or half of each",
        "wait for the first call before the second, or give each a tensor of its own",
        f"{C10D}, synchronous and asynchronous collective operations",
    ),
    "aliased-operands": Kind(
        "the engine may read what it has written already, or write one output over another",
        "give each operand memory of its own, or take the in-place form that the engine documents",
        f"{NCCL_GUIDE}, in-place operations",
    ),
    "communicator-order": Kind(
        "NCCL may hang: each call can wait for room that the other one holds",
        "enqueue the calls of several groups in the same order on all ranks",
        f"{NCCL_GUIDE}, using multiple NCCL communicators concurrently",
    ),
    "host-sync-in-cycle": Kind(
        "NCCL hangs: the host waits for the first call and never enqueues the second, which "
        "another rank waits for",
        "enqueue the calls of several groups in the same order on all ranks, or let the host wait "
        "after both",
        f"{NCCL_GUIDE}, using multiple NCCL communicators concurrently",
    ),
    "send-order": Kind(
        "NCCL hangs as soon as the messages do not fit its buffers: each send waits for a receive "
        "that stands behind another send",
        "put the sends and receives into one batch_isend_irecv, or let one end receive first",
        f"{NCCL_GUIDE}, point-to-point communication; {C10D}, batch_isend_irecv",
    ),
    "not-contiguous": Kind(
        "the call raises an error: tensors must be contiguous",
        "call contiguous() on the tensor",
        "ProcessGroupNCCL and ProcessGroupGloo, checks of arguments",
    ),
    "dtype-refused": Kind(
        "the call raises an error, as the engine has no such dtype, or no such operator for it",
        "convert the tensor to a dtype that the engine has, or take another operator",
        f"{NCCL_GUIDE}, ncclDataType_t and ncclRedOp_t; ProcessGroupGloo, checks of arguments",
    ),
    "call-refused": Kind(
        "the call raises an error, as the engine has no such call",
        "take a call that the engine has",
        f"{C10D}, backends",
    ),
    "device-refused": Kind(
        "the call raises an error: no backend for tensors of this device",
        "move the tensor to the device of the group's backend, or make the group with both: "
        "'cpu:gloo,cuda:nccl'",
        f"{C10D}, backends",
    ),
    "stream-race": Kind(
        "the kernel may run before the tensor has been written, or while it is",
        "let the stream wait: wait_stream, wait_event, or wait() on the work in the stream that "
        "uses the tensor",
        "CUDA semantics in PyTorch's notes, CUDA streams",
    ),
    "unequal-parameters": Kind(
        "the replicas drift apart: each rank trains another model",
        "let all ranks step with the same gradients, states and settings",
        "the definition of data parallelism; DistributedDataParallel's documentation",
    ),
    "gradient-not-reduced": Kind(
        "the replicas drift apart: each rank follows its own data",
        "reduce the gradient over the ranks before the optimizer steps",
        "DistributedDataParallel's documentation, internal design and no_sync",
    ),
    "unseeded-difference": Kind(
        "gradients of different models are averaged, and training follows none of them",
        "seed all ranks alike before the model is made, or broadcast the weights",
        "DistributedDataParallel's documentation, internal design",
    ),
    "result-unread": Kind(
        "the ranks wait for each other and the result is lost",
        "use the result, or leave the call out",
        f"{C10D}: collectives write to the tensors they are given",
    ),
    "same-random-bits": Kind(
        "the parts of one activation are dropped out alike: the dropout is not that of one device",
        "draw from a generator that differs on the ranks of the group",
        "Megatron-LM's model-parallel random states",
    ),
    "other-random-bits": Kind(
        "copies of one activation are dropped out differently: what should be replicated is not",
        "draw from a generator that is equal on the ranks of the group",
        "Megatron-LM's model-parallel random states",
    ),
    "group-made-by-some": Kind(
        "groups made later have other names on the ranks that left this one out: their members "
        "wait for each other until the time-out; with device_id or TORCH_DIST_INIT_BARRIER=1 "
        "new_group itself waits",
        "call new_group on all ranks, in the same order, or pass use_local_synchronization=True",
        f"{C10D}, new_group",
    ),
    "uneven-calls": Kind(
        "the ranks that make more calls wait until the time-out",
        "let all ranks make the same calls: even out the data, or use the context Join",
        f"{C10D}; PyTorch's generic join context manager",
    ),
    "mean-of-means": Kind(
        "the average weighs a rank's few elements as much as another rank's many",
        "reduce sums and counts, and divide the one by the other",
        "arithmetic: the mean of means is the mean only for equal counts",
    ),
    "file-race": Kind(
        "the file is not there yet, is half written, or is another rank's",
        "write on one rank, call barrier() on all, then read",
        "POSIX: other processes see a write when it has been made, not before",
    ),
    "result-differs": Kind(
        "the result depends on when calls complete and in which order ranks run",
        "wait for works before their tensors are used, and order what ranks share",
        f"{C10D}, synchronous and asynchronous collective operations",
    ),
    "host-read-in-forward": Kind(
        "PopTorch compiles the forward method once, from what it is traced with: the value is a "
        "constant there, or tracing fails",
        "compute with tensors, or return the value from forward",
        "PopTorch's user guide, unsupported Python operations",
    ),
}
"""All kinds, by the names that reports have."""


@dataclass
class Finding:
    """Something that is wrong with a program.

    **Attributes**: `kind` is one of `KINDS`, `site` is file:line of the program, `ranks` are those
    on which it was found, `call` is the call in words, `text` says what was found, and `seen` is
    how often.
    """

    kind: str
    site: str
    ranks: list[int]
    text: str
    call: str = ""
    seen: int = 1
    related: list[str] = field(default_factory=list)
    """Other sites that belong to it, each with what happens there."""

    def as_json(self) -> dict[str, Any]:
        """As the report's file has it."""
        about = KINDS[self.kind]
        return {
            "kind": self.kind,
            "site": self.site,
            "ranks": self.ranks,
            "call": self.call,
            "text": self.text,
            "related": self.related,
            "seen": self.seen,
            "cluster": about.cluster,
            "cure": about.cure,
            "source": about.source,
        }

    def lines(self) -> list[str]:
        """For people to read."""
        about = KINDS[self.kind]
        times = f", {self.seen} times" if self.seen > 1 else ""
        of_replicas = self.kind == "host-read-in-forward"
        who = ranks_in_words(self.ranks, "replica" if of_replicas else "rank")
        machine = "an IPU" if of_replicas else "a cluster"
        head = f"{self.kind} at {self.site}, {who}{times}"
        rows = [head, f"  {self.text}"]
        rows += [f"  see {each}" for each in self.related if not each.startswith(f"{self.site}:")]
        rows += [f"  on {machine}: {about.cluster}", f"  cure: {about.cure}"]
        return rows


def ranks_in_words(ranks: Sequence[int], noun: str = "rank") -> str:
    """Ranks, or what the noun says, as reports name them.

    >>> ranks_in_words([0, 1, 2, 5])
    'ranks 0 to 2, 5'
    """
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and spans[-1][-1] == rank - 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    shown = [
        f"{each[0]} to {each[-1]}" if len(each) > 2 else ", ".join(map(str, each)) for each in spans
    ]
    return f"{noun}{'s' * (len(ranks) != 1)} {', '.join(shown)}"


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Findings of one kind, site and text as one, with the ranks of all."""
    found: dict[tuple[str, str, str], Finding] = {}
    for each in findings:
        key = each.kind, each.site, each.call
        same = found.get(key)
        if same is None:
            found[key] = Finding(**vars(each))
            continue
        same.ranks = sorted({*same.ranks, *each.ranks})
        same.seen = max(same.seen, each.seen)
        same.related = list(dict.fromkeys([*same.related, *each.related]))
    order = list(KINDS)
    return sorted(found.values(), key=lambda each: (order.index(each.kind), each.site))


def shown(findings: Sequence[Finding], engine: str) -> str:
    """The report as text."""
    rules = f", by the rules of {engine}" if engine else ""
    if not findings:
        return f"check: no findings{rules}"
    count = f"{len(findings)} finding{'s' * (len(findings) > 1)}"
    lines = [f"check: {count}{rules}", *(line for each in findings for line in each.lines())]
    return "\n".join(lines).replace(os.getcwd() + os.sep, "")
