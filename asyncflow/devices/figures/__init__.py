"""Figures of cards, of links, and of the host that drives them."""
