"""`gpusim compare` and `gpusim invariant`: where two runs of a program begin to differ."""
