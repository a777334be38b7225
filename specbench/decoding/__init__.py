"""The decoding core: target, cache, drafts, acceptance rules, engine and trace."""
