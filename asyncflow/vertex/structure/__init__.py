"""The structure of graphs as data: edges, levels, `InputGraph`."""
