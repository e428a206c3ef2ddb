"""Variables, and values nobody can write to."""
