"""`settle_heap`: objects that exist at start are excluded from garbage collection."""

from __future__ import annotations

import gc
import subprocess
import sys

from skim.engine.start import settle_heap

PROGRAM = """
import gc, weakref
from skim.engine.start import settle_heap
class Ring:
    def __init__(self): self.ring = self
early, dropped = Ring(), Ring()
gone = weakref.ref(dropped)
del dropped
settle_heap()
assert gone() is None, "garbage is collected first"
assert gc.get_freeze_count() > 1000
late = Ring()
seen = weakref.ref(early), weakref.ref(late)
del early, late
gc.collect()
assert [one() is not None for one in seen] == [True, False], "early objects stay, later ones are collected"
import atexit
atexit.register(lambda: print(gc.get_freeze_count()))  # exit handlers run in reverse order
settle_heap()
"""


def test_the_collector_skips_early_objects_until_the_process_ends() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert found.stdout == "0\n"
    assert "leaked" not in found.stderr


def test_freezing_can_be_undone() -> None:
    settle_heap()
    try:
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
    assert gc.get_freeze_count() == 0
