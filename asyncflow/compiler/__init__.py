"""How does a graph become a plan? One module a pass; `pipeline.py` lists them in order."""
