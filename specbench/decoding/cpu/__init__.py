"""What makes passes faster on a CPU. Nothing here changes what is computed, and no method needs to know it."""
