"""What scorers share: their contract, windows of a prompt, texts of tokens, drafters."""
