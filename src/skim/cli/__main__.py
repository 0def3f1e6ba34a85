"""`python -m skim.cli` is `skim`, for where the script is not installed."""

import sys

from skim.cli.main import main

sys.exit(main())
