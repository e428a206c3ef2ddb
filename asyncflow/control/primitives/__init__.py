"""The primitives of dynamic control flow (EuroSys '18 §4.1), one per module."""
