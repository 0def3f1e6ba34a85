"""The scorers: one file each, found by `skim.registry`. Nothing is imported here."""
