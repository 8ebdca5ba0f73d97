"""Sizes, in elements, that decide how a fold is cut up; the bits do not depend on them.
Each is measured on two cores of a server processor. Plans are cached: set them before any fold."""

# A float32 block with its buffers stays in the caches, if not in a core's own. Much smaller ones
# make two threads slower than one: the interpreter's lock is then held for a larger part of the
# time, and a thread that waits for it sleeps for longer than a NumPy call takes.
BLOCK = 256 * 1024

# From this number of members on, of fewer elements than this (a ring: in a block), the vectorised
# path is taken: a NumPy call costs 0.5 us, the time to add some 4096 float32 numbers. If members
# are converted, or one call adds all rows, rows may be wider by the factors below; so may rows of
# fewer members that one call adds where they lie.
ROW_MEMBERS = 8
ROW_WIDTH = 2048
CONVERTED, RUNNING, STACKED = 64, 64, 8

# Rows narrower than this are added by one ufunc call for all of them, not by one call each. NumPy
# takes five times as long as the kernels here per element of a sum rounded to float16.
ACCUMULATE_WIDTH = 128 * 1024
HALF_WIDTH = 300

# Elements of the rows that an exact sum adds at a time, in float64. A box has an eighth.
EXACT_BLOCK = 64 * 1024

# Elements of a box of a fold whose messages are rounded, which takes several buffers of its size.
SENT_BLOCK = 64 * 1024

# Blocks smaller than this are converted by NumPy's own casts: slow by the element, but one call.
CAST_WIDTH = 1024

# Work of fewer elements than this is not shared with other threads: waking one takes about 20 us.
# Boxes are not made narrower than this to have one per thread: rows would be read in short pieces.
SHARED_WORK = 256 * 1024
SHARED_WIDTH = 8 * 1024

# In the time of one of these elements, so many bytes are copied, and so many elements go through a
# compiled kernel that draws no random numbers.
COPIED_BYTES, COMPILED_ELEMENTS = 16, 4

# Folds and roundings of fewer steps of elements are left to NumPy, and need no compiled kernel.
COMPILED_WORK = 4096

# Copies of so many bytes go past the caches, which hold little of them: a store through a cache
# reads first what it overwrites.
STREAMED = 16 * 1024 * 1024
