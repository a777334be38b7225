"""Prompt lookup decoding (Saxena 2023): the draft is what followed the same n-gram earlier in the text. No model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from specbench.decoding.draft import Context, Draft, Drafter, Needs
from specbench.decoding.rows import span
from specbench.errors import at_least
from specbench.pairs import Pair
from specbench.values import Count

if TYPE_CHECKING:
    from specbench.decoding.batch import Rows


class PromptLookup(Drafter):
    """Finds the newest tokens, longest n-gram first, at the latest earlier place that has a token behind it.

    Args:
        pair: not used.
        max_draft_tokens: longest draft.
        max_ngram: longest n-gram that is looked for.
        min_ngram: shortest n-gram that is looked for.

    Raises:
        UserError: `min_ngram` is above `max_ngram`.
    """

    needs = Needs(batching=True)
    certain = True

    def __init__(self, pair: Pair, max_draft_tokens: Count = 10, max_ngram: Count = 3, min_ngram: Count = 1):
        at_least(min_ngram, max_ngram=max_ngram)
        self.max_draft_tokens = max_draft_tokens
        self.ngrams = range(max_ngram, min_ngram - 1, -1)

    def draft(self, context: Context) -> Draft:
        """The tokens that followed the same n-gram earlier; an empty draft where there is none."""
        known = context.known()
        length = min(self.max_draft_tokens, context.max_draft)
        for n in self.ngrams:
            if known.shape[0] <= n:
                continue
            # Windows that end before the last token: the n-gram itself is not its own earlier occurrence.
            matches = (known[:-1].unfold(0, n, 1) == known[-n:]).all(1).nonzero()
            if matches.shape[0]:
                start = matches[-1, 0] + n
                return Draft(known[start : start + length].clone())
        return Draft(known[:0])

    def draft_rows(self, rows: Rows) -> Draft:
        """The same for the running sequences of a batch; `counts` holds the length of each draft."""
        b, device = rows.known.shape[0], rows.known.device
        tokens = rows.tokens[:b, : rows.reach]
        known = rows.known.unsqueeze(1)
        behind = torch.zeros(b, dtype=torch.int64, device=device)  # where each row's draft begins; 0: nowhere
        for n in self.ngrams:
            if tokens.shape[1] <= n:
                continue
            newest = rows.newest(n)
            ends = torch.arange(n, tokens.shape[1], device=device)  # just behind each earlier n-gram
            fits = (tokens[:, :-1].unfold(1, n, 1) == newest.unsqueeze(1)).all(2) & (ends < known)
            latest = (fits * ends).amax(1)
            behind = torch.where(behind > 0, behind, latest)
        counts = torch.where(behind > 0, rows.known - behind, 0).clamp(max=self.max_draft_tokens)
        k = int(counts.minimum(rows.limits).amax())  # the one wait: a shorter draft is a cheaper verification
        places = span(behind, k).clamp(max=rows.tokens.shape[1] - 1)
        return Draft(rows.tokens[:b].gather(1, places), counts=counts)
