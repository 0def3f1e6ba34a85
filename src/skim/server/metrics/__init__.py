"""Prometheus metrics, with vLLM's names under `skim:`. Nearly all of them are one row of a table."""
