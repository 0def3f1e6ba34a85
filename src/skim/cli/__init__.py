"""The command line, one module for each command of `skim`. Nothing here is imported by the engine."""

import os
import signal
import sys
import threading

INTERRUPTED = 130  # exit code


def start() -> int:
    """Entry point of `skim`. Handles Ctrl-C even while modules are being imported.

    After an interrupt, further ones are ignored. If an engine thread still runs, the process exits at once:
    a normal exit of Python under that thread would abort.
    """
    try:
        from skim.cli.main import main

        code = main()
    except KeyboardInterrupt:
        print("skim: interrupted", file=sys.stderr)
        code = INTERRUPTED
    if code == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if any(thread.name.startswith("skim-") for thread in threading.enumerate()):
            sys.stderr.flush()
            os._exit(code)
    return code
