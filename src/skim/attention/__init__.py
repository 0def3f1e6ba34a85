"""Attention: the transformers hook, the step's metadata, and a backend for each kind of device."""
