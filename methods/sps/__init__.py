"""Speculative sampling with a draft model."""

from methods.sps.drafter import SpeculativeSampling

__all__ = ["SpeculativeSampling"]
