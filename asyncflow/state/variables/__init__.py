"""Variables, and their values, which never change in place."""
