"""Instances: what launchers tell a process, the World it joins, and the engines that move data."""
