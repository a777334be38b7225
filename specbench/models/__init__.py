"""Model pairs: where their weights come from, and how they are loaded."""
