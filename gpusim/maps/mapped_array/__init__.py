"""MappedArray: an array per replica, stacked, that follows NumPy's protocols; and its rules."""
