"""PARD: a draft model that drafts several tokens in one pass."""

from methods.pard.drafter import ParallelDraft

__all__ = ["ParallelDraft"]
