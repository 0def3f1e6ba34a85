"""`python -m skim`: the command line where Skim runs from source and no script is installed."""

import sys

from skim.cli import start

sys.exit(start())
