"""Formats in which model families write thoughts and tool calls: parsers, grammars and histories."""
