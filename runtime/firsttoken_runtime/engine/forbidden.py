"""Which tokens may not come next: outside a grammar, or a stop before min_tokens."""

from __future__ import annotations

import torch

from firsttoken_runtime.engine.sequence import Sequence


def forbidden(sequence: Sequence, ahead: int) -> torch.Tensor | None:
    """What cannot come `ahead` tokens after the next: a mask [vocab], token ids, or None for nothing."""
    early = sequence.output_len + ahead < sequence.request.sampling.min_tokens and bool(sequence.stop_ids)
    constraint = sequence.constraint
    if constraint is None:
        return torch.tensor(sorted(sequence.stop_ids)) if early else None
    outside = constraint.forbidden()
    if not early:
        return outside
    later = outside.index_fill(0, torch.tensor(sorted(sequence.stop_ids)), True)
    # A grammar that is at its end goes before min_tokens.
    return outside if bool(later.all()) else later
