"""Owns how the command begins: `spr`, which is `python -m spr`."""

import io
import signal
import sys
from typing import NoReturn


def main() -> int:
    """Run the command line, or say that it can't run here."""
    if sys.platform != "linux":
        sys.stderr.write(f"spr: Linux is needed, this is {sys.platform}: a container or a virtual machine will do\n")
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names may hold what a terminal's alphabet lacks
    # Libraries that are interrupted while they are imported show tracebacks; nothing is lost by ending at once.
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not ignored, as in a background job
    if heard:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from spr.cli import main as run  # noqa: PLC0415 - elsewhere its imports would fail with a traceback

    if heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C, so that a half-written file is removed
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _stop)
    return run()


def _stop(*_: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
