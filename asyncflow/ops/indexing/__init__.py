"""Elements picked by position, written, and scattered."""
