"""The OpenAI-compatible HTTP server. Knows nothing of tensors."""
