"""The embedded model family: its small world, its tokenizer and questions, its training, and its weights."""
