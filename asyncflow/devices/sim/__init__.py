"""Simulated devices: NumPy's results on virtual time."""
