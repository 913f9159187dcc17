"""Proposals of a draft model: a small model of the same vocabulary that goes ahead of the served one.

It has a runner and a page pool of its own. What it has computed of a sequence stays on its pages:

    tokens of the sequence   ────────────────known───────────│ not seen yet
    computed by the draft    ──────────────────────│ fed      fed: its own proposals of last time

Proposals that were drawn are computed already; from the first that was not, it computes anew. Draws use the
random number that the served model's draw will use, so that where the two distributions agree, so do the
tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Sequences
from dataclasses import dataclass, field, replace

from firsttoken_runtime.engine.requests import SamplingParams
from firsttoken_runtime.engine.sampling import Row, sample
from firsttoken_runtime.engine.sequence import Sequence
from firsttoken_runtime.engine.settings import Runner
from firsttoken_runtime.model.runner import Chunk

# Known tokens that the draft computes in one step before it can propose: a long prompt is caught up with over
# several steps, so that no step becomes long by it.
_CATCH_UP_TOKENS = 256


@dataclass(slots=True)
class _Draft:
    """One sequence in the draft model. known: the sequence's length when `fed` was proposed behind it."""

    sampling: SamplingParams
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    known: int = 0
    fed: list[int] = field(default_factory=list)


class DraftModel:
    """Proposes for a batch of sequences. vocab_size: tokens that both models have."""

    def __init__(
        self, runner: Runner, total_pages: int, page_tokens: int, max_length: int, vocab_size: int
    ) -> None:
        self._runner = runner
        self._page_tokens = page_tokens
        self._longest = min(max_length, total_pages * page_tokens)
        self._vocab_size = vocab_size
        self._total_pages = total_pages
        self._free = list(range(total_pages - 1, -1, -1))
        self._drafts: dict[int, _Draft] = {}  # by Sequence.number, the longest unused first

    def propose(self, wanted: Sequences[tuple[Sequence, int]]) -> dict[int, list[int]]:
        """Up to so many tokens for each; none where the draft has not caught up, or has no pages left.

        Costs one step of the draft model per token of the longest proposal.
        """
        ready: list[tuple[Sequence, int, _Draft]] = []
        chunks: list[Chunk] = []
        allowance = _CATCH_UP_TOKENS
        busy = {sequence.number for sequence, _ in wanted}
        drafts = [(sequence, count, self._draft(sequence)) for sequence, count in wanted]
        # Those who have caught up first: they have a few tokens to compute and keep going.
        for sequence, count, draft in sorted(drafts, key=lambda each: len(each[0].tokens) - each[2].computed):
            known = len(sequence.tokens)
            end = min(known, draft.computed + allowance)
            tokens = sequence.tokens[draft.computed : end]
            complete = end == known
            length = known + count - 1 if complete else end
            if not tokens or length > self._longest or max(tokens) >= self._vocab_size:
                continue
            if not self._grow(draft, length, busy):
                continue
            allowance -= len(tokens)
            chunks.append(Chunk(tokens, draft.computed, draft.pages, int(complete)))
            draft.computed = end
            if complete:
                draft.known, draft.fed = known, []
                ready.append((sequence, count, draft))
        return self._go_ahead(ready, chunks)

    def _go_ahead(
        self, ready: list[tuple[Sequence, int, _Draft]], chunks: list[Chunk]
    ) -> dict[int, list[int]]:
        proposals: dict[int, list[int]] = {sequence.number: [] for sequence, _, _ in ready}
        while chunks:
            logits = self._runner.run(chunks)
            rows = [
                Row(draft.sampling, sequence.seed, len(sequence.tokens) + len(proposals[sequence.number]))
                for sequence, _, draft in ready
            ]
            chunks, following = [], []
            for (sequence, count, draft), result in zip(ready, sample(logits, rows), strict=True):
                tokens = proposals[sequence.number]
                if result.token is None or result.token >= self._vocab_size:
                    continue
                tokens.append(result.token)
                if len(tokens) < count:
                    chunks.append(Chunk((result.token,), draft.computed, draft.pages, 1))
                    draft.fed.append(result.token)
                    draft.computed += 1
                    following.append((sequence, count, draft))
            ready = following
        return {number: tokens for number, tokens in proposals.items() if tokens}

    def forget(self, number: int) -> None:
        """The sequence ended; its pages are free."""
        draft = self._drafts.pop(number, None)
        if draft is not None:
            self._free += draft.pages

    def clear(self) -> None:
        """Forget everybody."""
        for number in list(self._drafts):
            self.forget(number)

    def set_fused_kernels(self, allowed: bool) -> None:
        self._runner.set_fused_kernels(allowed)

    @property
    def pages_in_use(self) -> int:
        return self._total_pages - len(self._free)

    def _draft(self, sequence: Sequence) -> _Draft:
        """What there is of a sequence, cut to what is still right, and marked as used last."""
        draft = self._drafts.pop(sequence.number, None)
        if draft is None:
            # Log probabilities of proposals are nobody's business, and cost a pass over the vocabulary.
            draft = _Draft(replace(sequence.request.sampling, logprobs=None))
        self._drafts[sequence.number] = draft
        right = draft.known
        for token, drawn in zip(draft.fed, sequence.tokens[draft.known :], strict=False):
            if token != drawn:
                break
            right += 1
        if draft.fed:
            draft.computed, draft.fed = min(draft.computed, right), []
        # After a step that failed nothing is new: the last token is computed again for its logits.
        draft.computed = min(draft.computed, len(sequence.tokens) - 1)
        return draft

    def _grow(self, draft: _Draft, tokens: int, busy: set[int]) -> bool:
        """Pages for so many tokens, from others that are not in this step if need be."""
        missing = -(-tokens // self._page_tokens) - len(draft.pages)
        while missing > len(self._free):
            unused = next((number for number in self._drafts if number not in busy), None)
            if unused is None:
                return False
            self.forget(unused)
        if missing > 0:
            draft.pages += self._free[-missing:]
            del self._free[-missing:]
        return True
