"""Settings on the command line: the fields of `skim.config`, their sources, their flags."""
