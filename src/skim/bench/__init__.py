"""Speed, measured: contenders take turns, what breaks is a failed row, limits stand beside the figures."""
