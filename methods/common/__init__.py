"""What methods share: trees of draft tokens, heads, suffix structures, checkpoints and training."""
