"""Stores of elements and of rows that loops write and read."""
