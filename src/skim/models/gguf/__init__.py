"""Read GGUF files and convert them into transformers directories."""
