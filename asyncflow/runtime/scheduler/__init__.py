"""How one partition of a plan runs: a pure state machine, and the executor that drives it."""
