"""Fourier transforms, and convolution by them."""
