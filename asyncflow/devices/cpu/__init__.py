"""The CPU as a device: NumPy on the event loop and on a few threads."""
