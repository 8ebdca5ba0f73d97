"""Tests on simulated ranks: functions of pytest that are marked, and methods of unittest.TestCase.

- `mark`: the arguments of the mark, and the tests that it cannot be on.
- `outcomes`: a test on the ranks of one process, and how each of them ended; without pytest.
- `ranks`: a function of pytest: its arguments in each rank.
- `cases`, `case_marks`: methods of unittest.TestCase, for `gpusim.testing.ranks`.
- `torch_cases`: PyTorch's own classes of tests.
- `copies`, `outputs`: data and standard output of a rank.
- `failures`: the report of a failed test on its ranks.
- `processes`: ranks that are processes, by poprun.
"""
