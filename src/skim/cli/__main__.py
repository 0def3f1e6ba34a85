"""`python -m skim.cli` is `skim`, for where the script is not installed."""

import sys

from skim.cli import start

sys.exit(start())
