"""`python -m specbench COMMAND ...` is the console command `specbench COMMAND ...`."""

import sys

from specbench.commands.cli import main

if __name__ == "__main__":
    sys.exit(main())
