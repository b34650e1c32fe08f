"""Owns `python -m spr`, which is the command line."""

import sys

from spr.cli import main

sys.exit(main())
