"""`gpusim equal`: whether a program on several ranks computes what it computes on one.

The way of a comparison: `command` has both programs run by `gpusim torchrun`, whose ranks have a
`tracing.Tracer` each. It writes every tensor that has a name (`traces`). `comparing` takes both
traces, finds how each tensor's parts relate to the whole (`relations`), and the first that does not
in the order of computation. `reasons` says why, `report` says it to people.
"""
