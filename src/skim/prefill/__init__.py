"""Sparse prefill: prompt anatomy, scorers, block selection, plans and follow-ups."""
