"""What speed and quality are measured with: modes to compare, statistics, reports."""
