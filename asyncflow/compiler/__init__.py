"""The compiler: from a graph to a plan. One module a pass; `pipeline.py` lists them in order."""
