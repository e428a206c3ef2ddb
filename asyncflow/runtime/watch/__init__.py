"""Records of runs for others: traces, observers, the order of firings."""
