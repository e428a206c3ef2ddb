"""CUDA C++ of elementwise ops."""
