"""The precision studies of `gpusim.study` and the command `gpusim study`."""
