"""The OpenAI-compatible HTTP server. Knows no tensors."""
