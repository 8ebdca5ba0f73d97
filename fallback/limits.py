"""Sizes, in elements, that decide how a fold is cut up; the bits do not depend on them.
Each has been measured, on two cores of a server processor."""

# A float32 block with its buffers stays in the caches, if not in a core's own. Much smaller ones
# make two threads slower than one: the interpreter's lock is then held for a larger part of the
# time, and a thread that waits for it sleeps for longer than a NumPy call takes.
BLOCK = 256 * 1024

# At least so many members, of fewer elements than this (a ring: than this in a block), are folded
# by rows: a NumPy call costs 0.5 us, in which it adds some 4096 float32 numbers. Where members are
# converted, or one call adds all rows, that holds for rows so many times as wide.
ROW_MEMBERS = 8
ROW_WIDTH = 2048
CONVERTED, RUNNING = 64, 64

# Rows narrower than this are added by one call of a ufunc for all of them, and not by a call each;
# where sums are rounded to float16, NumPy takes five times as long by the element as we do.
ACCUMULATE_WIDTH = 128 * 1024
HALF_WIDTH = 300

# Blocks smaller than this are converted by NumPy's own casts: slow by the element, but one call.
CAST_WIDTH = 1024

# Work of fewer elements than this is not shared with other threads: waking one takes about 20 us.
# Nor are boxes made narrower than this to have one for each: rows are then read in short pieces.
SHARED_WORK = 256 * 1024
SHARED_WIDTH = 8 * 1024
