"""One module (or small folder) per method: its drafter, and the training of its own parts."""

import specbench  # noqa: F401 - before torch, for how its threads wait
