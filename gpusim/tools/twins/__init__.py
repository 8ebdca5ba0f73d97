"""Compare the twins with real engines, and find the fold of an engine's all-reduce."""
