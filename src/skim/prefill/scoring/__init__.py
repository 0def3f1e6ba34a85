"""Code that scorers share: their contract, scoring windows, texts of tokens, drafters."""
