"""Settings on the command line: fields, sources, parsers."""
