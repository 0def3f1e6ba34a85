"""Getting a model ready: any source becomes a transformers directory, and that becomes a running module."""
