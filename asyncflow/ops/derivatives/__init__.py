"""How are operations differentiated? One module a family, as in `asyncflow.ops`; importing it installs the rules."""
