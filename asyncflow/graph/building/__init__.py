"""How user code adds nodes, and how runs are fed."""
