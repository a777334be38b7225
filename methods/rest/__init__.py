"""REST (He et al. 2024, arXiv 2311.08252): what followed the newest tokens in a large text on the disk."""

from methods.rest.drafter import REST

__all__ = ["REST"]
