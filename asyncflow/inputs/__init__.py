"""Inputs: files and generators, read ahead while runs use their elements."""
