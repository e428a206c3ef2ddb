"""Who waits for a state, in which order, and how event loops learn of it."""
