"""From journal records to numbers: pure functions."""
