"""How elements come in: files and generators, read ahead beside the runs that use them."""
