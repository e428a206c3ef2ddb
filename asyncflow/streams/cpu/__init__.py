"""The stream of a CPU: a thread."""
