"""Programs that tests start under mpirun, as users start theirs."""
