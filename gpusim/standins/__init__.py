"""A folder for the end of sys.path, in which `import poptorch` finds a file if none is installed.

Processes that a program starts inherit sys.path, but not the import hook of `gpusim.aliases`.
"""

from __future__ import annotations
