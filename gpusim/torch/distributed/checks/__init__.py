"""The check of programs: what all ranks agree on, and what is wrong or would not survive NCCL.

`session` begins and ends it, in the processes of ranks or in their threads. Each rank has a
`watch`, which sees the rank's calls and keeps its `log`. What a part finds by one rank alone is a
finding at once. The rest is found from the logs of all ranks, after the launch: `analyse` of each
part, which needs no torch. The parts, each with the files that it alone uses:

- `flights`: async calls until their waits; `results`: results that are read by none. `reading` is
  the dispatch mode by which both hear of operators, `spans` the memory of tensors.
- `operands`: what engines refuse (`engines` says which one makes a call), aliases.
- `order`: cycles of calls on several groups (`cycles`), messages (`sends`), calls that some ranks
  leave out (`uneven`), groups that some make (`made`), all from calls as logs have them (`posts`).
- `files`: what ranks write and read (`opens` hears of it), and what happens before what
  (`happens`).
- `replicas`: notes at optimizer steps, of which `ranks` says who must be equal and `drift` who is
  not. `draws`: random bits, and `random_bits`, which compares them. `means`: averages of means
  (`taking` hears of means, `averages` compares). `training` hears of modules and backward passes,
  `described` names parameters, `digests` compares bits.
- `streams`: what streams have waited for (`clocks`), accesses (`accesses`), and `races` among them.
- `completions`: other orders of completions and turns, for `gpusim torchrun --orders`.

`here` puts functions of the check in the place of torch's, and gives them the rank's watch.
"""

from .findings import KINDS, Finding
from .session import ENGINES, Check, CheckError, as_check

__all__ = ["ENGINES", "KINDS", "Check", "CheckError", "Finding", "as_check"]
