"""Lines in which members of a session wait, and the order in which they go on."""
