"""Orders in which the vertices of a batch are computed."""
