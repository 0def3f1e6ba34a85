"""GGUF files: reading them and converting them into transformers directories."""
