"""Programs that sum with a real engine; each is run by its path, in processes of its own.

They import NumPy and their engine only: the Python of an engine need not have gpusim.
"""
