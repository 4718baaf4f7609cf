"""`python -m upper` is `upper`, for places where the script is not on the path."""

import sys

from upper.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
