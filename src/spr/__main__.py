"""Owns how the command begins: `spr`, which is `python -m spr`."""

import io
import sys


def main() -> int:
    """Run the command line, or say that it can't run here."""
    if sys.platform != "linux":
        sys.stderr.write(f"spr: Linux is needed, this is {sys.platform}: a container or a virtual machine will do\n")
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names may hold what a terminal's alphabet lacks
    try:
        from spr.cli import main as run  # noqa: PLC0415 - elsewhere its imports would fail with a traceback
    except KeyboardInterrupt:
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
