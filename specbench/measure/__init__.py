"""Measuring: from finished questions to a run folder and its numbers."""
