"""A folder for sys.path and PYTHONPATH, in which `import poptorch` finds a file.

Processes that a program starts inherit these, but not the import hook of `gpusim.aliases`.
"""

from __future__ import annotations
