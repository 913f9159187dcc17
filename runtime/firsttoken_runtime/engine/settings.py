"""What an engine is built with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from firsttoken_runtime.engine.weights import LoadedWeights
from firsttoken_runtime.model.kv_pool import KvBudget, KvTable
from firsttoken_runtime.model.runner import Chunk
from firsttoken_runtime.model.windows import LayerWindows


class Runner(Protocol):
    """What the engine needs of `model.runner.ModelRunner`."""

    def run(self, chunks: Sequence[Chunk]) -> torch.Tensor: ...
    def capabilities(self) -> dict[str, str | None]: ...
    def set_fused_kernels(self, allowed: bool) -> None: ...
    def set_kv_table(self, table: KvTable) -> int: ...
    def set_windows(self, windows: LayerWindows) -> None: ...


@dataclass(frozen=True)
class EngineSettings:
    """Fixed for the life of the engine.

    max_queued: requests that may wait beyond those with a place in the batch; more are refused (429).
    vocab_size: prompt tokens beyond it are refused; None does not check. page_bytes: bytes of one page over
    all layers, for prefix cache caps in bytes. model: what cached pages depend on besides tokens (name,
    revision). seed: of the seeds drawn for requests without one; None draws them from the system.
    prefill_tokens_per_second: measured at warm-up, so that the first steps have a good size already.
    kv: the runner's, for kvQuantization; None cannot quantize. total_pages and page_bytes are those at the
    model's precision, the fewest that the pool ever has. weights: what they were loaded in; None where that
    cannot be chosen. layer_windows: of the model, as in ModelConfig; none listed are not known, and then
    slidingWindow is not possible.
    """

    total_pages: int
    page_tokens: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    max_queued: int = 1024
    vocab_size: int | None = None
    page_bytes: int | None = None
    model: str = ""
    seed: int | None = None
    prefill_tokens_per_second: float | None = None
    kv: KvBudget | None = None
    weights: LoadedWeights | None = None
    layer_windows: tuple[int | None, ...] = ()
