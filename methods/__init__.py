"""One module (or small folder) per method: its drafter, and the training of its own parts."""
