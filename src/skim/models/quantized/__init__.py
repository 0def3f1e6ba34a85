"""Weights as integer codes: their format, products with them, and files that hold them."""
