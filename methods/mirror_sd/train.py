"""Trains a draft model to stream: `specbench train mirror_sd pair=... [draft=MODEL streams=2]`.

Speculative Streaming (Bhendawade et al. 2024, section 3): beside the next token each position also predicts the tokens
further on, from stream states; loss = main + `stream_weight` * sum of the streams' (future n-grams). The main loss is
taken against the target's own distribution, as that of a plain draft model is (`methods.sps.train`), so that the two
differ in the streams alone; the streams' losses are taken against the text. Here the streams begin at the embeddings
and go through every layer, as draft models are shallow; the paper's begin some layers below the top. The result is a
draft model like any other, with the streams' embeddings beside it in streams.safetensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from methods.common.losses import ALL, Goals, Guess, Head, Loss, first_choices, teacher_of, text_of
from methods.common.training import (
    DRAFT_SETTINGS,
    NextToken,
    agreement,
    check_length,
    check_window,
    finals_of,
    pair_to_train,
    train_draft,
    trainer,
)
from methods.mirror_sd.streams import save_streams
from specbench.config.compose import program
from specbench.models.pairs import draft_of
from specbench.system.settings import Count, NotNegative

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from transformers import PreTrainedModel

    from specbench.data.training import Batch
    from specbench.decoding.model.staged_model import StagedModel


class Streaming(NextToken):
    """batch -> weighted sum of the cross-entropies of the next token and of the `streams` tokens after it."""

    def __init__(
        self,
        model: PreTrainedModel,
        target: StagedModel,
        streams: int,
        stream_weight: float,
        loss: Loss = ALL,
    ):
        super().__init__(Head.of(model), target, loss)
        self.model, self.stream_weight = model, stream_weight
        embeddings: Any = model.get_input_embeddings()
        width = embeddings.weight.shape[1]
        self.streams = torch.nn.Parameter(0.02 * torch.randn(streams, width, device=model.device))

    def forward(self, batch: Batch) -> torch.Tensor:
        """The weighted sum [] of the cross-entropies of a batch."""
        states, (head, target_head) = self.states(batch["input_ids"]), self.heads
        goals = self.loss.goals(batch, ahead=states.shape[2])
        next_token, *others = (
            Guess(self.stream_weight if j else 1.0, states[:, :, j], head, 1 + j)
            for j in range(states.shape[2])
        )
        truth = teacher_of(batch, target_head, finals_of(self.target, batch))
        return self.loss(batch, goals, [next_token], truth) + self.loss(batch, goals, others, text_of(batch))

    def finals(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """As in `NextToken`; the student's are those of the main stream."""
        return self.states(batch["input_ids"])[:, :, 0], finals_of(self.target, batch)

    def states(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [B, T] -> final states [B, T, 1 + s, d] of each position and its streams."""
        (b, t), s = ids.shape, self.streams.shape[0]
        embedded = self.model.get_input_embeddings()(ids)
        streams = (embedded.unsqueeze(2) + self.streams).flatten(1, 2)
        at = torch.arange(t, device=ids.device)
        position = torch.cat([at, (at.unsqueeze(1) + 1 + torch.arange(s, device=ids.device)).flatten()])
        # Whose column and row it is: the position of the token, and the stream's number, 0 for the main one.
        token = torch.cat([at, at.repeat_interleave(s)])
        stream = torch.cat([at * 0, torch.arange(1, s + 1, device=ids.device).repeat(t)])
        seen = (stream == 0) & (token <= token.unsqueeze(1))
        seen = seen | ((token == token.unsqueeze(1)) & (stream <= stream.unsqueeze(1)))
        mask = torch.zeros(seen.shape, dtype=embedded.dtype, device=ids.device)
        mask = mask.masked_fill_(~seen, torch.finfo(embedded.dtype).min).expand(b, 1, -1, -1)
        hidden = self.model.get_decoder()(
            inputs_embeds=torch.cat([embedded, streams], dim=1),
            attention_mask=mask,
            position_ids=position.expand(b, -1),
            use_cache=False,
        ).last_hidden_state
        return torch.cat([hidden[:, :t].unsqueeze(2), hidden[:, t:].unflatten(1, (t, s))], dim=2)

    @torch.no_grad()
    def right(self, batch: Batch) -> torch.Tensor:
        """How often the first choice was right among the assistant's tokens.

        Returns:
            [1 + s, 2]: for the next token and each stream, how many tokens of the text were its first choice, and of
            how many.
        """
        states, counts = self.states(batch["input_ids"]), []
        batch = batch | {"loss_weight": (batch["loss_weight"] == 1).float()}
        for j in range(states.shape[2]):
            goals = Goals.of(batch, None, 1 + j)
            chosen = first_choices(self.heads[0], goals.before(states[:, :, j], 1 + j))
            true_tokens = batch["input_ids"][goals.batch_index, goals.positions]
            counts.append(torch.tensor([(chosen == true_tokens).sum(), len(true_tokens)]))
        return torch.stack(counts)


@trainer(DRAFT_SETTINGS | {"streams": Count, "stream_weight": NotNegative})
def train(cfg: DictConfig) -> Path:
    """Trains as configured (conf/train_mirror_sd.yaml) and returns the folder of the finished draft model."""
    check_length(cfg, "streams")
    pair = pair_to_train(cfg)
    draft = draft_of(pair)
    check_window(cfg, draft)
    module = Streaming(draft, pair.staged, cfg.streams, cfg.stream_weight, Loss.of(cfg))

    def evaluate(held_out: list[Batch]) -> dict[str, float]:
        right, of = torch.stack([module.right(batch) for batch in held_out]).sum(0).unbind(1)
        shares = (right / of).tolist()
        return {"held_out_agreement": agreement(module.choices, held_out)} | {
            f"held_out_right_{1 + j}": share for j, share in enumerate(shares)
        }

    def save_beside(out: Path) -> None:
        save_streams(module.streams.detach().to(draft.dtype), out)

    return train_draft(module, draft, evaluate, cfg, pair, save_beside)


main = program("train_mirror_sd", train)
