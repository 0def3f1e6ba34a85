"""The OpenAI-compatible HTTP surface: what clients may ask, and how it is answered. Knows no tensors."""
