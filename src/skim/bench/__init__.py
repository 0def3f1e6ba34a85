"""Speed benchmarks: contenders take turns, a broken run is a failed row, figures stand beside limits."""
