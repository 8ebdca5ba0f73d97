"""A folder for the end of sys.path, where `import poptorch` finds a file if it is not installed.

New processes of a program inherit sys.path and nothing else of `gpusim.aliases`.
"""

from __future__ import annotations
