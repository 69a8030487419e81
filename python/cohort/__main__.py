"""The command line: `python -m cohort`, and the script `cohort`."""
import os
import signal
import sys

from . import _cohort


def main() -> int:
    """Runs the command in `sys.argv` and returns its exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    arguments = sys.argv[1:]
    program = [sys.executable, *sys.orig_argv[1:len(sys.orig_argv) - len(arguments)]]
    return _cohort.run_command(program, [os.fsencode(argument) for argument in arguments])


if __name__ == "__main__":
    sys.exit(main())
