"""One run, from its request to fetched values."""
