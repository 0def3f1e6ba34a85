"""Where keys and values live: the paged pool and the prefix tree. Knows nothing of models or prompts."""
