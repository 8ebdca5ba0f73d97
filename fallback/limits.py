"""Sizes, in elements, that decide how a fold is cut up; the bits do not depend on them.
Each has been measured, on two cores of a server processor."""

# A float32 block with its buffers stays in a core's cache. Much smaller ones make two threads
# slower than one, since the interpreter's lock is then held for a larger part of the time.
BLOCK = 128 * 1024

# At least so many members, of fewer elements than this (a ring: than this in a block), are folded
# by rows: a NumPy call costs 0.5 us, in which it adds some 4096 float32 numbers.
ROW_MEMBERS = 8
ROW_WIDTH = 2048

# Rows narrower than this are added by one ufunc.accumulate, and not by a call each.
ACCUMULATE_WIDTH = 200

# Blocks smaller than this are converted by NumPy's own casts: slow by the element, but one call.
CAST_WIDTH = 1024
