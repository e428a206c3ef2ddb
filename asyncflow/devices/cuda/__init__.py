"""CUDA devices: CuPy on streams of their own."""
