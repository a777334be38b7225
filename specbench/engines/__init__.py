"""Other engines as arms of a run, and the audit of any engine's answers by the target."""
