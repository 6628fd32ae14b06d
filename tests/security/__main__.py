"""Runs lies.py: see there."""

import sys

from lies import main

if __name__ == "__main__":
    sys.exit(main())
