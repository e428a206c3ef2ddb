"""The pure state machine that says which firings of a partition are ready."""
