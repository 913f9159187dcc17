"""Runs steps of a decoder over a paged KV pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from firsttoken_runtime.kernels.dispatch import Decision, Obstacle, Operator
from firsttoken_runtime.model.decoder import Decoder
from firsttoken_runtime.model.rope import rotation_table
from firsttoken_runtime.model.step import Chunk, PlanSettings, plan_step

__all__ = ["Chunk", "ModelRunner"]


class ModelRunner:
    """Owns the KV pool: per layer one tensor [total_pages, page_tokens, 2, kv_heads, head_dim].

    Which page belongs to whom is the engine's business; the runner reads and writes what page tables say.
    """

    def __init__(self, model: Decoder, total_pages: int, page_tokens: int) -> None:
        if total_pages < 1 or page_tokens < 1:
            raise ValueError(f"a pool of {total_pages} pages of {page_tokens} tokens holds nothing")
        config = model.config
        self.model = model
        self.total_pages = total_pages
        self.page_tokens = page_tokens
        shape = (total_pages, page_tokens, 2, config.kv_heads, config.head_dim)
        # Zeros, not uninitialised memory: gathers may touch slots that nothing was written to, and a mask
        # does not hide NaN. The memory is touched here, so that a pool that does not fit fails at start.
        self.pools = [
            torch.zeros(shape, dtype=model.dtype, device=model.device) for _ in range(config.layers)
        ]
        self._rotations = rotation_table(
            config, min(config.max_length, total_pages * page_tokens), model.device
        )
        self._windows = tuple(dict.fromkeys(config.layer_windows))

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute the chunks in one step; chunks of one call must belong to different sequences.

        Returns float32 logits [chunks with sample=True, vocab] in chunk order. Raises ValueError for an empty
        chunk, a page table that is too short, or a position beyond the model's length or the pool.
        """
        longest = max((chunk.end for chunk in chunks), default=0)
        if longest > len(self._rotations):
            raise ValueError(
                f"position {longest - 1} is beyond the longest sequence of {len(self._rotations)}"
            )
        if not chunks:
            return torch.empty(0, self.model.config.vocab_size, device=self.model.device)
        with torch.inference_mode():
            plan = plan_step(chunks, self._settings())
            return self.model.forward(plan, self._rotations[plan.positions], self.pools)

    def _settings(self) -> PlanSettings:
        fused = self.model.kernels.obstacle(Operator.PAGED_DECODE) is None
        return PlanSettings(self.page_tokens, self._windows, self.model.dtype, self.model.device, fused)

    def capabilities(self) -> dict[str, str | None]:
        """Optimization name -> None when this model and machine can do it, else the reason why not."""
        impossible = self.model.kernels.impossible
        cuda = self.model.device.type == "cuda"
        return {
            "fusedKernels": impossible.value if impossible else None,
            "cudaGraphs": "not in this build" if cuda else Obstacle.NO_CUDA.value,
        }

    def set_fused_kernels(self, allowed: bool, because: Obstacle = Obstacle.SWITCHED_OFF) -> None:
        """Allow fused kernels or take them back, from the next step on."""
        self.model.kernels.set_allowed(allowed, because)

    def require_fused_kernels(self) -> None:
        """Raises FusedKernelsUnavailable when any operator would run unfused on this machine."""
        self.model.kernels.require_fused()

    def kernel_decisions(self) -> list[Decision]:
        """Per operator: fused or why not, and launches so far."""
        return self.model.kernels.decisions()
