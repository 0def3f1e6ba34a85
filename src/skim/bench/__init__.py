"""Speed benchmarks: contenders take turns, a broken run is a failed row, figures have their limits."""
