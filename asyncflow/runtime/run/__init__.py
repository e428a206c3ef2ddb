"""One run from feeds to fetched values, and all that a session has in flight."""
