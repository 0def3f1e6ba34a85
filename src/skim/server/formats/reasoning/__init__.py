"""The formats of reasoning: one file each, found by `skim.registry`. Nothing is imported here."""
