"""A folder for the end of sys.path: `import poptorch` finds its file here if nobody else has one.

Processes that a program starts anew inherit sys.path and nothing else of `gpusim.aliases`.
"""

from __future__ import annotations
