"""The `upper` command as a program. The verbs are in `upper.cli.verbs`.

Nothing that takes time is imported before Ctrl-C has its handler.
"""

import _signal  # type: ignore[import-not-found]  # what `signal` wraps, without its imports
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

INTERRUPTED = 130  # as in `ExitCode`


def main(argv: "Sequence[str] | None" = None) -> int:
    """Run `upper` with these arguments and return the exit code.

    By default they are those of the command line, and the process is one of its own.
    """
    if argv is not None:
        from upper.cli.verbs import run

        return run(list(argv))
    # Until the verb begins there is nothing to undo. Where the shell has it ignored, it stays ignored.
    if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    from upper.cli import interrupts
    from upper.cli.verbs import run
    from upper.spark.worker import hide_pandas

    hide_pandas()
    code = run(sys.argv[1:], begin=interrupts.unwind)
    if code == INTERRUPTED:
        interrupts.leave(code)
    return code
