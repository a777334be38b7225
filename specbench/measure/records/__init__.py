"""Run folders: what is written while measuring, and which code wrote it."""
