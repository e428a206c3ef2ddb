"""Parts of ``asyncflow simulate``."""
