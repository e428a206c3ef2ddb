"""State that survives a run. Variables, tables, queues and containers."""
