"""What survives a run? Variables and containers."""
