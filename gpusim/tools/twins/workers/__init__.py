"""Programs that ask a real engine for sums; each is run by its path, in processes of its own.
They import NumPy and their engine only: the Python that has an engine need not have gpusim."""
