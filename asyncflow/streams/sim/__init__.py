"""Streams and events on virtual time."""
