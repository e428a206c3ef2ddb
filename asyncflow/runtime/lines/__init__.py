"""Who waits in a session, and who goes next."""
