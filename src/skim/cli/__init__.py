"""The command line, one module for each command of `skim`. Nothing here is imported by the engine."""

import os
import signal
import sys
import threading

INTERRUPTED = 130  # exit code


def start() -> int:
    """`skim`, from its first moment to its last: Ctrl-C may come while modules are still being imported.

    A second one may come while an engine's thread is waited for. Python would end under that thread, which
    aborts the process, so it ends without Python. A third is ignored, or would end in a traceback.
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
