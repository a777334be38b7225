"""A module (or small folder) per method: its drafter, and the training of its parts; `common` has what they share."""

import specbench  # noqa: F401 - before torch, for how its threads wait
