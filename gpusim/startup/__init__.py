"""Runs first in each Python process that a script under `gpusim run` or `torchrun` starts.

The folder stands on PYTHONPATH, where Python looks for `sitecustomize`. The modules here import
nothing of gpusim, so that processes that are no ranks pay nothing.
"""
