"""The command line, one module for each command of `skim`. Nothing here is imported by the engine."""
