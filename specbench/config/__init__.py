"""The configuration: composed, its settings chosen, and checked before anything is loaded."""
