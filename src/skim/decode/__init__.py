"""Slow-fast decode: when a decode step reads the whole context."""
