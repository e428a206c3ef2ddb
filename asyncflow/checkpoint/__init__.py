"""How is state kept? Checkpoints: written beside runs, published as a whole, checked before they are taken."""
