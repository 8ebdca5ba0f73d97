"""`gpusim resume`: whether a run that is resumed goes on as if it had never been interrupted.

The way of an answer: `command` has the script run by `gpusim torchrun`, whose ranks have a
`tracing.StateTracer` each. It writes the whole state at each step (`gpusim.tools.equal.traces`).
`running` runs the script uninterrupted, up to a checkpoint, and from there, for each pair of sizes.
`wholes` puts the ranks' parts together, `comparing` finds the first state that differs, with
`sampling` for the data, and `report` says it to people.
"""
