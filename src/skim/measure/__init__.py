"""Code that speed and quality measurements share: modes to compare, statistics, reports."""
