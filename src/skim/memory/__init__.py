"""Storage of keys and values: the paged pool and the prefix tree. Knows nothing of models or prompts."""
