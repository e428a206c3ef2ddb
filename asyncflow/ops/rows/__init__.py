"""Row rules: what an op is when its inputs have a row axis in front."""
