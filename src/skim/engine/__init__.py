"""Sequences through time: what runs next, one forward at a time."""
