"""Mirror-SD: draft model and target at work at the same time (Bhendawade et al. 2025)."""

from methods.mirror_sd.drafter import MirrorSD, StreamingMirrorSD, StreamingSampling

__all__ = ["MirrorSD", "StreamingMirrorSD", "StreamingSampling"]
