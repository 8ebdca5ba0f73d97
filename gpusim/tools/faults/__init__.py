"""Campaigns of faults: many plans against one script, and a verdict of each.

`command` reads the options and shows the report. `campaign` runs the plans: `drawing` makes them
of what `observing` has seen in a run without faults, `running` runs each in a fork with a folder
of its own, `verdicts` judges it, and `shrinking` makes the worst small.
"""
