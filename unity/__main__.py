"""`python -m unity` is the command line."""

import sys

from unity.cli import main

if __name__ == "__main__":
    sys.exit(main())
