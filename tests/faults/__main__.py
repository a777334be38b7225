"""`python -m tests.faults`."""

import sys

from tests.faults.runner import main

sys.exit(main())
