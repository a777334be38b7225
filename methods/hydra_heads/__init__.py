"""Hydra and Hydra++ (Ankner et al. 2024): heads on the target's states that see the tokens drafted before theirs."""

from methods.hydra_heads.drafter import HydraHeads

__all__ = ["HydraHeads"]
