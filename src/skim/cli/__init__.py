"""The command line: `skim serve`, `chat`, `ask` and `pull`. Nothing here is imported by the engine."""
