"""Public reports of silent bugs as small programs, and what `gpusim equal` says of each."""
