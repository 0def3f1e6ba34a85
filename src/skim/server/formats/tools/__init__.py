"""The formats of tool calls: one file each, found by `skim.registry`. Nothing is imported here."""
