"""Many elements become few: sums, extremes, counts, quantiles; running sums."""
