"""Building of graphs by user code, and the feeds of runs."""
