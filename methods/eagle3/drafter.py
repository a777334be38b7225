"""EAGLE-3's drafter: EAGLE-2's growing tree, and a drafting model that reads three depths and has its own head."""

from __future__ import annotations

from methods.eagle.drafter import DynamicEagle
from specbench.decoding.drafter import Needs
from specbench.decoding.model.cost import weight_bytes
from specbench.models.pairs import Pair
from specbench.system.settings import Count, Natural, Positive


class Eagle3(DynamicEagle):
    """EAGLE-3; see the module.

    Args:
        pair: with the target.
        weights: folder of the drafting model's checkpoint.
        nodes: as in `DynamicEagle`; the published 60 count the pending token.
        width: as in `DynamicEagle`.
        max_draft_tokens: as in `DynamicEagle`; the published depth of 5 is one of 6 levels.
        layers: for each state that is read, the number of target layers before it, in place of what config.json
            names.
        rope_theta: base of the rotary positions, in place of config.json's. Some published files name one that they
            were not trained with.

    Raises:
        UserError: the checkpoint cannot be read, or does not fit the target.
    """

    needs = Needs(part="eagle3")

    def __init__(
        self,
        pair: Pair,
        weights: str,
        nodes: Count = 59,
        width: Count = 10,
        max_draft_tokens: Count = 6,
        layers: list[Natural] | None = None,
        rope_theta: Positive | None = None,
    ):
        from methods.eagle3.checkpoint import load_eagle3  # late: transformers' models take seconds to import

        model = load_eagle3(weights, pair.staged, pair.expansion, layers, rope_theta)
        super().__init__(pair, model, nodes, width, max_draft_tokens)
        # A round reads the layers for features once.
        once = [model.fc, model.fc_norm, *([model.input_norm] if model.input_norm is not None else [])]
        self._once = sum(map(weight_bytes, once))
        self._bytes -= self._once
        self.upkeep_bytes -= weight_bytes(model.lm_head) + (
            0 if model.config.norm_output else weight_bytes(model.norm)
        )
