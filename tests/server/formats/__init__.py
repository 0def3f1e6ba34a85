"""Formats of tool calls and reasoning."""
