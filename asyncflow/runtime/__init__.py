"""The runtime: how a plan runs. `Session`, `Run`, `Executor`, `Scheduler`."""
