"""Faster forwards of decoder layers: fewer operations, packed weights, compiled layers."""
