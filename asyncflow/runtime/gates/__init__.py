"""The gates that a call passes before its run starts: its place, its plan, atomic runs, memory."""
