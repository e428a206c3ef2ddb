"""Values on their way to and from a card, and host memory that a card copies to and from."""
