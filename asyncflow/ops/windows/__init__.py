"""Convolution and pooling: ops on windows of the last axes."""
