"""Records of collectives: who called what in which order, on which values, with which results.

A record is a file of lines (calls only), or a folder with the lines in `calls.jsonl` and, if asked
for, whole arrays in `arrays/`. Where each rank is a process of its own, rank R writes
`calls-R.jsonl`. A line is one JSON object, and its "kind" says what it is:

- "launch", the first line: "format" (3), "gpusim" (the version), "ranks", and what the launch adds.
- "group", before the first call of a group: its label "group", and "name", "description", "ranks".
- "call": the fields of a `RecordedCall` that are not None.
- "result", in a folder, when calls are complete: "calls", their [rank, sequence], and "results", a
  list as the "operands" of a call. The ranks' parts of an all_reduce share a line.
- "end", the last line, if the launch came to an end: "calls" (their number), and "error" if it
  failed.

Readers ignore kinds and fields that they do not know. Operands and results are lists of
[dtype, shape, digest]; see `digest_of`. All NaNs count as one, NumPy's. `arrays/*.npz` has an array
of bytes for each digest: the elements in C order, little-endian. Each file is written whole, and
the oldest are removed to keep to a limit, so that readers find some digests without an array.

- `recorder`: the Recorder. `arrays`: digests, and the files of arrays.
- `traces`: what ran when, as files of the trace event format.
- `torch_hook`: the same record of a real torch.distributed program.
"""

from __future__ import annotations

from .arrays import digest_of
from .recorder import RecordedCall, RecordedGroup, Recorder, SummaryRow, settings_of

__all__ = [
    "RecordedCall",
    "RecordedGroup",
    "Recorder",
    "SummaryRow",
    "digest_of",
    "settings_of",
]
