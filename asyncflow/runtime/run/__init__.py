"""One run, from what is asked of it to fetched values."""
