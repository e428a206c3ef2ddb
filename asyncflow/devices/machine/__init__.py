"""The machine that the program runs on: processor, memory, BLAS."""
