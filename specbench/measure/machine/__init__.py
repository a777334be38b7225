"""The machine: what it is, its speed, what else runs on it, and the provenance of a run."""
