"""Prepare models: turn any source into a transformers directory, and load that directory as a module."""
