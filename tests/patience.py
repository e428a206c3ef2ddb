"""How long a test waits for what has to come, before it says that it did not."""

from __future__ import annotations

PATIENCE_S = 100.0
"""For threads, processes and runs. No work takes so long, also where the machine is slow and busy with other tests, and
it is less than pytest gives a test. Where all is well nobody waits for it, so there is no reason for less."""
