"""`python -m pipeswift`, the same as the `pipeswift` command."""

import sys

from pipeswift.cli import main

if __name__ == "__main__":
    sys.exit(main())
