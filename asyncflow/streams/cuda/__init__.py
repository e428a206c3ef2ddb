"""CUDA streams and events, and how the host learns that their work is done."""
