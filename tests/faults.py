"""Faults that the tests must find: `python -m tests.faults [NAME ...] [--jobs 2]`.

Each fault is one replacement in one file, planted in a copy of the project. The tests that should find it run first,
whatever the turn, then the fast ones, and the table says which test turned red. Exit code: 1 if a fault is not found.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from specbench import ROOT

# The tests of `make test` and of `make test-fast`.
EVERY, FAST = re.findall(r"^(?:EVERY|FAST) := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
FAST = FAST.replace("$(EVERY)", EVERY)
SECONDS = 900.0  # for the tests of one fault: a fault may make them wait for ever


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        name: its name.
        area: what it breaks.
        file: where, from the project's root.
        before: text that stands there exactly once.
        after: what takes its place.
        tests: files, or ids, of the tests that should find it.
    """

    name: str
    area: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]


D, M = "specbench/decoding", "specbench/measure"
ACCEPT = ("tests/decoding/test_acceptance.py", "tests/decoding/test_lossless.py")
LOSSLESS = ("tests/decoding/test_lossless.py", "tests/methods/test_lossless.py")
BATCHES = ("tests/decoding/test_batch.py", "tests/methods/test_batches.py")
FAULTS = (
    # acceptance
    Fault(
        "a block's ratio may pass 1",
        "acceptance",
        f"{D}/acceptance.py",
        "(sums - sums.cummax(-1).values.clamp(min=0.0)).exp()",
        "sums.exp()",
        ("tests/decoding/test_block_verification.py",),
    ),
    Fault(
        "a block's next token is drawn from the residual of one token",
        "acceptance",
        f"{D}/acceptance.py",
        "residual(_at(joint, count).unsqueeze(-1) * _row(probs, count), _row(q, count))",
        "residual(_row(probs, count), _row(q, count))",
        ("tests/decoding/test_block_verification.py",),
    ),
    Fault(
        "a rejected token is kept",
        "acceptance",
        f"{D}/acceptance.py",
        "return (fits if valid_mask is None else fits & valid_mask).cumprod(-1).sum(-1)",
        "return (fits if valid_mask is None else fits & valid_mask).sum(-1)",
        ACCEPT,
    ),
    Fault(
        "a rejected draft token follows in place of the target's own",
        "acceptance",
        f"{D}/acceptance.py",
        "return Accepted(leading(choices[..., :-1] == tokens, valid_mask), choices)",
        "return Accepted(leading(choices[..., :-1] == tokens, valid_mask), torch.cat([tokens, choices[..., -1:]], -1))",
        ACCEPT,
    ),
    Fault(
        "limits let one token too many through",
        "acceptance",
        f"{D}/acceptance.py",
        "within = depths <= limits.unsqueeze(1)",
        "within = depths <= 1 + limits.unsqueeze(1)",
        (*ACCEPT, "tests/decoding/test_engine.py"),
    ),
    Fault(
        "padding is accepted",
        "acceptance",
        f"{D}/state.py",
        "device=self.tokens.device) < self.candidates.unsqueeze(1)",
        "device=self.tokens.device) <= self.candidates.unsqueeze(1)",
        (*ACCEPT, *BATCHES),
    ),
    # trees
    Fault(
        "a tree's path goes through a node that does not fit",
        "trees",
        f"{D}/acceptance.py",
        "survives = ~(tree.on_path & ~fits.unsqueeze(1)).any(-1)",
        "survives = fits",
        ACCEPT,
    ),
    Fault(
        "a node attends to its siblings",
        "trees",
        f"{D}/tree.py",
        "return cls(parents, seen[:, 1:, 1:].sum(-1), seen, max_children=max_children)",
        "return cls(parents, seen[:, 1:, 1:].sum(-1), torch.ones_like(seen).tril(), max_children=max_children)",
        LOSSLESS,
    ),
    Fault(
        "depths of trees made on the host are short by one",
        "trees",
        f"{D}/tree.py",
        "deep.append(deep[1 + parent] + 1)",
        "deep.append(max(deep[1 + parent], 1))",
        ("tests/decoding/test_acceptance.py", "tests/methods/test_lossless.py"),
    ),
    Fault(
        "ancestors reach half as far",
        "trees",
        f"{D}/tree.py",
        "for _ in range(max(k - 1, 0).bit_length()):",
        "for _ in range(max(k - 1, 0).bit_length() // 2):",
        ACCEPT,
    ),
    Fault(
        "an accepted path is not moved to the end",
        "trees",
        f"{D}/kv_layout.py",
        "self.cache.move_entries(batch.seq_lens.unsqueeze(1) + within, ends)",
        "self.cache.move_entries(ends, ends)",
        LOSSLESS,
    ),
    Fault(
        "later siblings are tried again with the same share",
        "trees",
        f"{D}/acceptance.py",
        "p = torch.where(rejected, residual(p / p.sum(-1, keepdim=True), q), p)",
        "p = torch.where(rejected, p / p.sum(-1, keepdim=True), p)",
        ACCEPT,
    ),
    # sampling
    Fault(
        "more is accepted than p / q",
        "sampling",
        f"{D}/acceptance.py",
        "leading(uniforms * q < p, valid_mask)",
        "leading(uniforms * q < 1.2 * p, valid_mask)",
        (*ACCEPT, "tests/methods/test_sampling.py"),
    ),
    Fault(
        "after a rejection the target's own distribution is drawn from",
        "sampling",
        f"{D}/acceptance.py",
        "rest = (p - q).clamp_(min=0.0)",
        "rest = p.clone()",
        (*ACCEPT, "tests/methods/test_sampling.py"),
    ),
    Fault(
        "after a draft's end the residual is taken",
        "sampling",
        f"{D}/acceptance.py",
        "drafted = count < k\n",
        "drafted = count <= k\n",
        ACCEPT,
    ),
    Fault(
        "a distribution's last token is lost",
        "sampling",
        f"{D}/sampling.py",
        "drawn = drawn.clamp(max=weights.shape[-1] - 1)",
        "drawn = drawn.clamp(max=weights.shape[-1] - 2)",
        ("tests/decoding/test_sampling.py",),
    ),
    Fault(
        "the temperature multiplies",
        "sampling",
        f"{D}/sampling.py",
        "return torch.softmax(logits.float() / self.temperature, dim=-1)",
        "return torch.softmax(logits.float() * self.temperature, dim=-1)",
        ("tests/decoding/test_sampling.py",),
    ),
    Fault(
        "every position has the first one's number",
        "sampling",
        f"{D}/engine.py",
        "self._uniforms[slot, n : n + positions] = numbers",
        "self._uniforms[slot, n : n + positions] = numbers[:1]",
        (
            "tests/decoding/test_sampling.py",
            "tests/decoding/test_lossless.py",
            "tests/methods/test_sampling.py",
        ),
    ),
    Fault(
        "NaN gives a token",
        "sampling",
        f"{D}/sampling.py",
        "if NOT_DRAWN in tokens:",
        "if False:",
        ("tests/decoding/test_sampling.py", "tests/decoding/test_engine.py"),
    ),
    # masks
    Fault(
        "a token does not see itself",
        "masks",
        f"{D}/model/layer_stack.py",
        "allowed = back >= 0\n",
        "allowed = (back > 0) | (kv_positions.unsqueeze(-2) == 0)\n",
        ("tests/decoding/test_staged_model.py", *LOSSLESS),
    ),
    Fault(
        "a window is one position too wide",
        "masks",
        f"{D}/model/layer_stack.py",
        "allowed &= back < window",
        "allowed &= back <= window",
        ("tests/decoding/test_staged_model.py", "tests/decoding/test_families.py"),
    ),
    Fault(
        "query heads see each other's masks",
        "masks",
        f"{D}/cpu/grouped_attention.py",
        "mask.repeat(1, 1, groups, 1)",
        "mask.repeat_interleave(groups, -2)",
        ("tests/decoding/test_grouped_attention.py", *LOSSLESS),
    ),
    Fault(
        "in a batch a tree sees the pending token's entry twice",
        "masks",
        f"{D}/kv_layout.py",
        "sees = self._entries[:, :kv_len] < (batch.seq_lens - 1).unsqueeze(1)",
        "sees = self._entries[:, :kv_len] < (batch.seq_lens - 2).unsqueeze(1)",
        BATCHES,
    ),
    # caches
    Fault(
        "values are written where keys go",
        "caches",
        f"{D}/kv_cache.py",
        "zip(entries[2:], (keys, values))",
        "zip(entries[2:], (keys, keys))",
        ("tests/decoding/test_kv_cache.py", "tests/decoding/test_staged_model.py"),
    ),
    Fault(
        "a pass writes one entry late",
        "caches",
        f"{D}/kv_cache.py",
        "return cls(start + n, start, start)",
        "return cls(start + n, max(start - 1, 0), start)",
        ("tests/decoding/test_staged_model.py", *LOSSLESS),
    ),
    Fault(
        "slots are taken for each other",
        "caches",
        f"{D}/kv_cache.py",
        "return (entries + self.capacity * slots).flatten()",
        "return (entries + self.capacity * slots.flip(0)).flatten()",
        ("tests/decoding/test_kv_cache.py", *BATCHES),
    ),
    Fault(
        "a moved slot loses its last entry",
        "caches",
        f"{D}/kv_cache.py",
        "layer[:, goal, :kv_len] = layer[:, origin, :kv_len]",
        "layer[:, goal, : kv_len - 2] = layer[:, origin, : kv_len - 2]",
        ("tests/decoding/test_kv_cache.py", "tests/decoding/test_schedules.py", *BATCHES),
    ),
    Fault(
        "the draft model does not know what it lacks",
        "caches",
        "methods/sps/drafter.py",
        "self._fed[slot] = length + min(self._drafted - 1, count)",
        "self._fed[slot] = length + min(self._drafted, count)",
        ("tests/methods/test_lossless.py", "tests/methods/test_contract.py"),
    ),
    Fault(
        "the adapter's last exit state is that of the round's first token",
        "caches",
        "methods/kangaroo/drafter.py",
        "self._before[: batch.size, 0] = verified.last(self._states)",
        "self._before[: batch.size, 0] = self._states[:, 0]",
        ("tests/methods/test_kangaroo.py", "tests/methods/test_contract.py"),
    ),
    # batches
    Fault(
        "holes count as tokens",
        "batches",
        "methods/common/aligned_layout.py",
        "self._held[:b, end : end + width].masked_fill_(gone, EMPTY)",
        "self._held[:b, end : end + width].masked_fill_(gone, 0)",
        ("tests/methods/test_schedules.py", "tests/methods/test_batches.py"),
    ),
    Fault(
        "alignment forgets the order",
        "batches",
        "methods/common/aligned_layout.py",
        "keys = held.masked_fill(held == EMPTY, -1)",
        "keys = held.masked_fill(held == EMPTY, -1).neg()",
        ("tests/methods/test_schedules.py", "tests/methods/test_batches.py"),
    ),
    Fault(
        "a group of unequal lengths counts as grouped",
        "batches",
        "methods/exspec.py",
        'self.stats = {"grouped": len({held[slot].length for slot in chosen}) == 1} if b > 1 else {}',
        'self.stats = {"grouped": True} if b > 1 else {}',
        ("tests/methods/test_batches.py", "tests/decoding/test_schedules.py"),
    ),
    Fault(
        "sequences starve",
        "batches",
        "methods/exspec.py",
        "if all(self._skipped[one.request_index] < self.max_skipped_rounds for one in held):",
        "if True:",
        ("tests/methods/test_batches.py", "tests/decoding/test_schedules.py"),
    ),
    Fault(
        "a drafter's state is lost when a sequence moves",
        "batches",
        f"{D}/engine.py",
        "        self._slots.move(sources, destinations, kv_len)\n",
        "",
        (*BATCHES, "tests/methods/test_schedules.py"),
    ),
    Fault(
        "an answer continues after its stop token",
        "batches",
        f"{D}/engine.py",
        "new_tokens, rest = truncate_at_stop(check_sampled(rest[: count + 1]), one.stop_ids), rest[1 + k :]",
        "new_tokens, rest = check_sampled(rest[: count + 1]), rest[1 + k :]",
        ("tests/decoding/test_engine.py", *LOSSLESS),
    ),
    Fault(
        "a draft may run over the cap",
        "batches",
        f"{D}/engine.py",
        "min(one.remaining - 1, most, wished(slot))",
        "min(one.remaining, most, wished(slot))",
        ("tests/decoding/test_engine.py", *LOSSLESS),
    ),
    # drafting
    Fault(
        "prompt lookup copies one token late",
        "drafting",
        "methods/pld.py",
        "start = ends_by_length[n][0 if self.earliest else -1] + 1",
        "start = ends_by_length[n][0 if self.earliest else -1] + 2",
        ("tests/methods/test_pld.py",),
    ),
    Fault(
        "shallow nodes overwrite accepted ones in the table",
        "drafting",
        "methods/recycling.py",
        "priority = torch.where(accepted[:, : 1 + k], deepest + depths, deepest - depths)",
        "priority = deepest - depths",
        ("tests/methods/test_recycling.py",),
    ),
    Fault(
        "a state that is split is not the one of the earlier occurrence",
        "drafting",
        "methods/common/suffix_automaton.py",
        "self.link[shorter], self.link[longer] = self.link[longer], shorter",
        "self.link[shorter] = self.link[longer]",
        ("tests/methods/test_suffix_structures.py",),
    ),
    Fault(
        "a trimmed head gives rows for ids",
        "drafting",
        "methods/common/heads.py",
        "return rows if self.token_ids is None else self.token_ids[rows]",
        "return rows",
        ("tests/methods/test_heads.py", "tests/methods/test_vocab_trim.py"),
    ),
    # kernels of a CPU
    Fault(
        "attention sees what the mask hides",
        "kernels",
        f"{D}/cpu/kernels/attention.cpp",
        "inline bool hides(float bias) { return bias != 0; }",
        "inline bool hides(float) { return false; }",
        ("tests/decoding/test_attention_kernel.py",),
    ),
    Fault(
        "the last rows of a matrix are left out",
        "kernels",
        f"{D}/cpu/kernels/product.cpp",
        "const int64_t last = std::min(panel + SET, end);",
        "const int64_t last = std::min(panel + SET, end - 1);",
        ("tests/decoding/test_native.py",),
    ),
    Fault(
        "two tokens are summed in another order than one",
        "kernels",
        f"{D}/cpu/kernels/product.cpp",
        "sum = fma(weight[v], state[t][v], sum);",
        "sum = T == 2 ? weight[v] * state[t][v] + sum : fma(weight[v], state[t][v], sum);",
        ("tests/decoding/test_native.py",),
    ),
    Fault(
        "a compiled layer reads the panels of a weight that was changed",
        "kernels",
        f"{D}/cpu/packed_linear.py",
        "self._pointers != self._where() or self._versions != self._changes():",
        "self._pointers != self._where():",
        ("tests/decoding/test_compiled_layers.py",),
    ),
    Fault(
        "a compiled layer writes the new keys of a batch over one another",
        "kernels",
        f"{D}/cpu/kernels/layer.cpp",
        "to.index_copy_(0, *layer.index,",
        "to.index_copy_(0, layer.index->fill_(0),",
        ("tests/decoding/test_compiled_layers.py",),
    ),
    Fault(
        "a compiled layer keeps the norm that it was compiled with",
        "kernels",
        f"{D}/cpu/compiled_layers.py",
        "tensors = {name: tensor for name, tensor in tensors.items()",
        "tensors = {name: tensor.clone() for name, tensor in tensors.items()",
        ("tests/decoding/test_compiled_layers.py",),
    ),
    Fault(
        "whether a compiled layer gives the layer's states is not looked at",
        "kernels",
        f"{D}/cpu/compiled_layers.py",
        "if output.shape != expected.shape or not apart <= TOLERANCE[output.dtype]:",
        "if output.shape != expected.shape:",
        ("tests/decoding/test_compiled_layers.py",),
    ),
    Fault(
        "generate is judged by the noise of our own passes",
        "kernels",
        f"{M}/certify.py",
        "return max(self._noise_of_shapes, self._noise_of_forwards) if arm == HF else self._noise_of_shapes",
        "return self._noise_of_shapes",
        ("tests/methods/test_verify_width.py",),
    ),
    # statistics
    Fault(
        "an interval uses the normal distribution",
        "statistics",
        f"{M}/metrics/statistics.py",
        "squares = [variance * stdtrit(freedom, 0.5 + CONFIDENCE / 2) ** 2 for variance, freedom in estimates]",
        "squares = [variance * stdtrit(10**6, 0.5 + CONFIDENCE / 2) ** 2 for variance, freedom in estimates]",
        ("tests/measure/test_statistics.py", "tests/measure/test_coverage.py"),
    ),
    Fault(
        "the jackknife divides by n",
        "statistics",
        f"{M}/metrics/statistics.py",
        "return float((count - 1) / count * np.square(logs - logs.mean()).sum()), count - 1",
        "return float(1 / count * np.square(logs - logs.mean()).sum()), count - 1",
        ("tests/measure/test_statistics.py",),
    ),
    Fault(
        "what differs between processes is left out",
        "statistics",
        f"{M}/metrics/statistics.py",
        "if parts.ndim == 2 and parts.shape[1] >= LEAST_PASSES:",
        "if False:",
        ("tests/measure/test_statistics.py",),
    ),
    Fault(
        "a shorter answer wins by being short",
        "statistics",
        f"{M}/metrics/timing.py",
        'decoding = (seconds["method"] - prefill["method"]) * factor.where(~equal, 1.0)',
        'decoding = seconds["method"] - prefill["method"]',
        ("tests/measure/test_metrics.py",),
    ),
    Fault(
        "the bonus token is not in the acceptance length",
        "statistics",
        f"{M}/metrics/acceptance.py",
        'return ratio(rounds["emitted"].sum(), len(rounds))',
        'return ratio(rounds["accepted"].sum(), len(rounds))',
        ("tests/measure/test_acceptance_metrics.py", "tests/measure/test_metrics.py"),
    ),
    Fault(
        "MBSU counts no draft",
        "statistics",
        f"{M}/metrics/acceptance.py",
        'read = ((rounds["draft_bytes"] + rounds["target_bytes"]) / rounds["sequences"]).sum(skipna=False)',
        'read = (rounds["target_bytes"] / rounds["sequences"]).sum(skipna=False)',
        ("tests/measure/test_acceptance_metrics.py", "tests/measure/test_metrics.py"),
    ),
    # certificates
    Fault(
        "a wide margin is a tie",
        "certificates",
        f"{M}/certify.py",
        'return Certificate("tie" if abs(margin) <= limit else "violation", index, margin, limit)',
        'return Certificate("tie", index, margin, limit)',
        ("tests/measure/test_certify.py",),
    ),
    Fault(
        "a missing end is exact",
        "certificates",
        f"{M}/certify.py",
        "for index, (reference_token, answer_token) in enumerate(zip_longest(theirs, ours)):",
        "for index, (reference_token, answer_token) in enumerate(zip(theirs, ours)):",
        ("tests/measure/test_certify.py",),
    ),
    Fault(
        "the best of the repeats is counted",
        "certificates",
        f"{M}/certify.py",
        "return max(certificates, key=lambda c: VERDICTS.index(c.verdict))",
        "return min(certificates, key=lambda c: VERDICTS.index(c.verdict))",
        ("tests/measure/test_runner.py", "tests/measure/test_certify.py"),
    ),
    Fault(
        "noise is what our verification says",
        "certificates",
        f"{M}/numeric_noise.py",
        "largest = ours if ours <= NOT_ROUNDING * model else model",
        "largest = ours",
        ("tests/methods/test_verify_width.py",),
    ),
    # measuring
    Fault(
        "arms keep one order",
        "measuring",
        f"{M}/protocol.py",
        "order = orders[7 * (pool + turn + repeat) % len(orders)]",
        "order = orders[0]",
        ("tests/measure/test_runner.py",),
    ),
    Fault(
        "a repeat knows the answer before",
        "measuring",
        f"{M}/conductor.py",
        "            drafter.restore(learnt)  # or it would copy the answer that it has just given\n",
        "",
        ("tests/measure/test_runner.py", "tests/measure/test_remeasure.py"),
    ),
    Fault(
        "of two attempts the disturbed one is kept",
        "measuring",
        f"{M}/remeasure.py",
        'best = min(attempts, key=lambda attempt: attempt.counted()["disturbed"])',
        'best = max(attempts, key=lambda attempt: attempt.counted()["disturbed"])',
        ("tests/measure/test_remeasure.py",),
    ),
    # stores
    Fault(
        "a run goes on with other code",
        "stores",
        f"{M}/records/run_folder.py",
        'return None if read_json(run_dir / CODE) == code else "the code has changed since"',
        "return None",
        ("tests/measure/test_run_folder.py",),
    ),
    Fault(
        "half a line stays in the journal",
        "stores",
        f"{M}/records/run_folder.py",
        "                os.truncate(path, intact_bytes)\n        yield",
        "                pass\n        yield",
        ("tests/measure/test_run_folder.py",),
    ),
    Fault(
        "a file appears before it is whole",
        "stores",
        "specbench/system/files.py",
        'temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")',
        "temporary = path",
        ("tests/measure/test_run_folder.py",),
    ),
    # contamination
    Fault(
        "a question inside a longer message is not found",
        "contamination",
        "specbench/data/contamination.py",
        "words[i : i + len(passage)] == passage",
        "words == passage",
        ("tests/methods/test_rest.py", "tests/data/test_warm_start.py"),
    ),
    Fault(
        "only the first turn is looked for",
        "contamination",
        "specbench/data/contamination.py",
        "for text in (*question.turns, *(question.reference or ())):",
        "for text in (*question.turns[:1], *(question.reference or ())):",
        ("tests/methods/test_rest.py", "tests/data/test_warm_start.py"),
    ),
    Fault(
        "eight words of the benchmark are let through",
        "contamination",
        "specbench/data/contamination.py",
        "for words in turns for ngram in ngrams(words, WORDS)}",
        "for words in turns for ngram in ngrams(words, WORDS + 1)}",
        ("tests/data/test_synthesis.py",),
    ),
    # training text and shared weights
    Fault(
        "a loop is learnt",
        "training",
        "specbench/commands/converse.py",
        "ids = ids[: loop_start(ids)]",
        "ids = list(ids)",
        ("tests/commands/test_converse.py",),
    ),
    Fault(
        "a stop token is learnt where an answer was cut",
        "training",
        "specbench/data/conversations.py",
        'answer += stop if message.get("complete", True) else []',
        "answer += stop",
        ("tests/data/test_conversations.py",),
    ),
    Fault(
        "the audit looks one place too far",
        "audit",
        "specbench/engines/audit.py",
        "margins = highest[:-1] - logits[:-1].gather(1, ids).squeeze(1)",
        "margins = highest[1:] - logits[1:].gather(1, ids).squeeze(1)",
        ("tests/engines/test_audit.py",),
    ),
    Fault(
        "the audit takes a wrong plain arm for rounding",
        "audit",
        "specbench/engines/audit.py",
        "margins[margins <= ENGINE_NOISE].max(initial=0.0)",
        "margins.max(initial=0.0)",
        ("tests/engines/test_audit.py",),
    ),
    Fault(
        "the audit forgets the entropy",
        "audit",
        "specbench/measure/likelihood.py",
        "(chosen + entropy).sum().item()",
        "chosen.sum().item()",
        ("tests/engines/test_audit.py",),
    ),
    Fault(
        "a token too many belongs to a pass",
        "engines",
        "specbench/engines/dialects.py",
        "left = now_accepted - accepted + 1",
        "left = now_accepted - accepted + 2",
        ("tests/engines/test_served.py",),
    ),
    Fault(
        "a head that accepts nothing is measured",
        "engines",
        "specbench/engines/served.py",
        "if all(len(one.tokens) == 1 for one in passes):",
        "if not passes:",
        ("tests/engines/test_served.py",),
    ),
    Fault(
        "a prefix cache is not seen",
        "engines",
        "specbench/engines/served.py",
        "    if reply.cached_tokens:\n",
        "    if reply.cached_tokens is False:\n",
        ("tests/engines/test_served.py",),
    ),
    Fault(
        "a stream that breaks off counts as an answer",
        "engines",
        "specbench/engines/dialects.py",
        "[-1] in stops:\n            return reply\n    raise",
        "[-1] in stops:\n            return reply\n    return reply\n    raise",
        ("tests/engines/test_served.py",),
    ),
    Fault(
        "our server sends the last token of a pass again",
        "engines",
        "specbench/engines/own.py",
        "self._sent = len(answer)",
        "self._sent = len(answer) - 1",
        ("tests/engines/test_completions.py",),
    ),
    Fault(
        "drafts that are not counted count as none",
        "engines",
        f"{M}/metrics/acceptance.py",
        'rounds["drafted"].sum(skipna=False))',
        'rounds["drafted"].sum())',
        ("tests/measure/test_acceptance_metrics.py",),
    ),
    Fault(
        "inside vLLM a drafter misses the target's own token",
        "engines",
        "specbench/engines/vllm_proposer.py",
        "self._batch(sequence), text[-new:]",
        "self._batch(sequence), text[-new:-1]",
        ("tests/methods/test_vllm_proposer.py",),
    ),
    Fault(
        "a server knows what it was warmed up with",
        "engines",
        "specbench/commands/serve.py",
        "setup.drafter.forget()",
        "setup.drafter.snapshot()",
        ("tests/commands/test_serve.py",),
    ),
    Fault(
        "plain answers of an engine are not judged",
        "engines",
        f"{M}/arms.py",
        "for arm in (HF, OWN_LOOP) if arm",
        "for arm in (HF,) if arm",
        ("tests/measure/test_engine_runs.py",),
    ),
    Fault(
        "an engine's servers stay behind",
        "engines",
        "specbench/engines/server.py",
        "            _end(self._process)\n",
        "            pass\n",
        ("tests/engines/test_served.py",),
    ),
    Fault(
        "a drawn token stands for itself alone",
        "training",
        "methods/common/losses.py",
        "shifts[len(likely) :] = log(len(rest) / len(drawn))",
        "shifts[len(likely) :] = 0.0",
        ("tests/methods/test_states.py",),
    ),
    Fault(
        "stored distributions are of the place after",
        "training",
        "methods/common/losses.py",
        "goals.before(batch[LIKELIEST]).long())\n",
        "goals.before(batch[LIKELIEST], 0).long())\n",
        ("tests/methods/test_states.py",),
    ),
    Fault(
        "the embeddings of the target are trained",
        "training",
        "methods/common/training.py",
        "weight.requires_grad_(name not in shared)",
        "weight.requires_grad_(True)",
        ("tests/methods/test_shared_embeddings.py",),
    ),
    Fault(
        "a draft model keeps a head of its own",
        "training",
        "specbench/models/surgery.py",
        "    draft.set_output_embeddings(head)\n",
        "",
        ("tests/methods/test_shared_embeddings.py",),
    ),
    Fault(
        "a mask sees the masks after it",
        "training",
        "methods/common/masked_places.py",
        " & (self.masks <= mask)",
        "",
        ("tests/methods/test_pard.py", "tests/methods/test_peagle.py"),
    ),
    Fault(
        "a place keeps masks that it has lost",
        "training",
        "methods/pard/train.py",
        "guessed[:, some + 1 + j] = 1.0",
        "guessed[:, 1 + j :] = 1.0",
        ("tests/methods/test_pard.py",),
    ),
    Fault(
        "a draft model counts masks as tokens that it has seen",
        "caches",
        "methods/pard/drafter.py",
        "                self._fed[slot] = length\n",
        "                self._fed[slot] = length + 1\n",
        ("tests/methods/test_pard.py",),
    ),
    Fault(
        "a mask takes the place of a sequence's last true pair",
        "batches",
        "methods/peagle/drafter.py",
        "masked = (places > last)",
        "masked = (places >= last)",
        ("tests/methods/test_peagle.py",),
    ),
    Fault(
        "a mask has the token that stands there",
        "masks",
        "methods/peagle/drafter.py",
        "_replaced(embeds, mask_embeds, masked)",
        "_replaced(embeds, mask_embeds, masked & (places >= n).view(1, -1, 1))",
        ("tests/methods/test_peagle.py",),
    ),
    Fault(
        "the outputs of a draft are those of the longest sequence of a batch",
        "batches",
        "methods/eagle/drafter.py",
        "wanted = span(count, self.outputs)",
        "wanted = span(count * 0 + n - 1, self.outputs)",
        ("tests/methods/test_peagle.py", "tests/methods/test_mtp.py"),
    ),
    Fault(
        "what a mask guesses is judged by the token before",
        "training",
        "methods/peagle/train.py",
        "goals = Goals(rows, places[columns] + 2 + j,",
        "goals = Goals(rows, places[columns] + 1 + j,",
        ("tests/methods/test_peagle.py",),
    ),
    Fault(
        "every token of a chain is written to the same entry",
        "caches",
        "methods/mtp/drafter.py",
        "before.unsqueeze(1), j - 1)",
        "before.unsqueeze(1), 0)",
        ("tests/methods/test_mtp.py",),
    ),
    Fault(
        "an MTP head reads the state that it was given in every step",
        "states",
        "methods/mtp/drafter.py",
        "                    out = self._level(",
        "                    _ = self._level(",
        ("tests/methods/test_mtp.py",),
    ),
    Fault(
        "an answer's first draft is as long as the last one of another answer",
        "schedules",
        "specbench/measure/draft_length.py",
        "self._lengths[slot], self._counts[slot] = self.rule.initial, 0.0",
        "self._lengths[slot], self._counts[slot] = max(self._lengths[slot], 1), 0.0",
        ("tests/methods/test_draft_length.py",),
    ),
    Fault(
        "a rejected token counts as one that was not judged",
        "schedules",
        "specbench/measure/draft_length.py",
        "counts += accepted, min(accepted + 1, last)",
        "counts += accepted, accepted",
        ("tests/methods/test_draft_length.py",),
    ),
    Fault(
        "a sequence of a batch drafts as many tokens as the longest draft beside it",
        "schedules",
        "specbench/decoding/engine.py",
        "limits = [min(one.remaining - 1, most, wished(slot)) for slot, one in enumerate(running)]",
        "limits = [min(one.remaining - 1, most, max(map(wished, range(len(running))))) for one in running]",
        ("tests/methods/test_draft_length.py",),
    ),
    Fault(
        "a selector looks at the token that the block begins with, at every place",
        "states",
        "methods/dflash/drafter.py",
        "selector.scores(projected[:, j], before, successors[:, j])",
        "selector.scores(projected[:, j], batch.last_tokens(1)[:, 0], successors[:, j])",
        ("tests/methods/test_dflash.py",),
    ),
    Fault(
        "a convolution sums a place with the one after it",
        "masks",
        "methods/dflash/layers.py",
        "torch.cat([torch.zeros_like(blocks[:, :back]), blocks[:, :-back]], dim=1)",
        "torch.cat([blocks[:, back:], torch.zeros_like(blocks[:, :back])], dim=1)",
        ("tests/methods/test_dflash.py",),
    ),
    Fault(
        "a place of a block sees none after it",
        "masks",
        "methods/dflash/drafter.py",
        "torch.ones(1, places, places, dtype=torch.bool, device=device)",
        "torch.ones(1, places, places, dtype=torch.bool, device=device).tril()",
        ("tests/methods/test_dflash.py",),
    ),
    Fault(
        "a block guesses the token before it",
        "masks",
        "methods/dflash/drafter.py",
        "return states[:, config.fills_in : config.fills_in + k]",
        "return states[:, :k]",
        ("tests/methods/test_dflash.py",),
    ),
    Fault(
        "states of tokens that stay are written one entry too late",
        "caches",
        "methods/dflash/drafter.py",
        "self._layers.arguments(batch, features, masked=False)",
        "self._layers.arguments(batch, features, 1, masked=False)",
        ("tests/methods/test_dflash.py",),
    ),
    Fault(
        "an estimate of acceptance sees the token that it is of",
        "sampling",
        "methods/dflash/drafter.py",
        "before = torch.cat([batch.last_tokens(1), chosen[0][:, :-1]], dim=1)",
        "before = chosen[0]",
        ("tests/methods/test_dflash.py",),
    ),
    Fault(
        "a tree leaves out children of likely paths",
        "trees",
        "methods/common/dynamic_trees.py",
        "for rank in range(width // (i + 1))]",
        "for rank in range(max(1, width // (2 * i + 2)))]",
        ("tests/methods/test_dflash.py",),
    ),
    Fault(
        "a block in training sees the state of the token that it begins with",
        "training",
        "methods/dflash/train.py",
        "in_front = positions < starts",
        "in_front = positions <= starts",
        ("tests/methods/test_dflash.py",),
    ),
    Fault(
        "a block is judged beyond a token that the assistant does not say",
        "training",
        "methods/dflash/train.py",
        "weights = weights * (weights > 0).long().cumprod(-1) * self.weights",
        "weights = weights * self.weights",
        ("tests/methods/test_dflash.py",),
    ),
    Fault(
        "a lossy rule keeps what the target finds unlikely",
        "acceptance",
        f"{D}/acceptance.py",
        ".clamp(max=THRESHOLD)",
        ".clamp(max=0.0)",
        ("tests/decoding/test_acceptance.py",),
    ),
    Fault(
        "a report takes a method whose answers are violations",
        "reports",
        "specbench/report/decision.py",
        "return NONE if one.faults else OF_VERDICT",
        "return OF_VERDICT",
        ("tests/report/test_decision.py",),
    ),
    Fault(
        "a schedule drafts where no gain is shown",
        "reports",
        "specbench/report/schedule.py",
        '== "faster"',
        '!= "slower"',
        ("tests/report/test_schedule.py",),
    ),
    Fault(
        "a placeholder is asked as a question",
        "data",
        "specbench/data/question_files.py",
        "    if placeholder and any(",
        "    if placeholder and not any(",
        ("tests/data/test_questions.py",),
    ),
)


def planted(fault: Fault, root: Path) -> None:
    """Plants a fault in a copy of the project. Raises ValueError unless its text stands there exactly once."""
    path = root / fault.file
    text = path.read_text(encoding="utf-8")
    if text.count(fault.before) != 1:
        raise ValueError(f"{fault.name}: found {text.count(fault.before)} times in {fault.file}")
    path.write_text(text.replace(fault.before, fault.after), encoding="utf-8")


def copied(to: Path) -> None:
    """Copies the files that git knows."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def found_by(fault: Fault, most: int = 3) -> list[str]:
    """The tests that turn red with a fault, the first few of them; empty where none does."""
    with tempfile.TemporaryDirectory() as folder:
        copied(Path(folder))
        planted(fault, Path(folder))
        # Those of this turn, then all of them: most faults are found by a few.
        for turn, chosen in (
            ("0", [*fault.tests, "-m", EVERY]),
            ("all", [*fault.tests, "-m", EVERY]),
            ("0", ["-m", FAST]),
        ):
            red = failed(Path(folder), [*chosen, f"--maxfail={most}"], turn)
            if red:
                return red
    return []


def failed(root: Path, arguments: list[str], turn: str) -> list[str]:
    """The ids of the tests that fail in a copy, of those whose `turn` it is; one line where the run hung.

    Raises RuntimeError where pytest could not run them: that would pass for a fault that was found.
    """
    # Not the test of this list: it misses the text that the fault has replaced, whatever the fault does.
    ignored = "--ignore=tests/test_faults.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rfE", ignored, *arguments]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "SPECBENCH_TURN": turn}
    try:
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return [f"(the tests did not end within {SECONDS:g} s)"]
    found = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if not found and done.returncode != 0:
        raise RuntimeError(
            f"pytest {' '.join(arguments)}: exit code {done.returncode}\n{done.stdout[-2000:]}"
        )
    return found


def main() -> int:
    """Does what the command line says; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="of faults; all without any")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="faults at once (%(default)s)")
    given = parser.parse_args()
    chosen = [fault for fault in FAULTS if not given.names or fault.name in given.names]
    missed = 0
    print("| area | fault | found by |\n| --- | --- | --- |")
    with ThreadPoolExecutor(given.jobs) as pool:
        results = tqdm(pool.map(found_by, chosen), total=len(chosen), unit="fault")
        for fault, red in zip(chosen, results):
            tests = ", ".join(f"`{one}`" for one in red) or "**not found**"
            print(f"| {fault.area} | {fault.name} | {tests} |", flush=True)
            missed += not red
    print(f"\n{len(chosen) - missed} of {len(chosen)} faults found")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
