"""How does a plan run? `Session`, `Run`, `Executor`, `Scheduler`."""
