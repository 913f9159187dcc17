"""Runs steps of a decoder over a paged KV pool."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from firsttoken_runtime.kernels.dispatch import Decision, Obstacle, Operator
from firsttoken_runtime.model.decoder import Decoder
from firsttoken_runtime.model.kv_pool import KvBudget, KvShape, KvTable
from firsttoken_runtime.model.rope import rotation_table
from firsttoken_runtime.model.step import Chunk, PlanSettings, plan_step
from firsttoken_runtime.model.windows import LayerWindows, layer_windows

__all__ = ["Chunk", "ModelRunner"]


class ModelRunner:
    """Owns the KV pool: `pools`, one per layer, views of one buffer (model/kv_pool.py).

    Which page belongs to whom is the engine's business; the runner reads and writes what page tables say.
    total_pages: of the pool as it is laid out now; at first all layers are at the model's precision.
    """

    def __init__(self, model: Decoder, total_pages: int, page_tokens: int) -> None:
        if total_pages < 1 or page_tokens < 1:
            raise ValueError(f"a pool of {total_pages} pages of {page_tokens} tokens holds nothing")
        config = model.config
        self.model = model
        self.total_pages = total_pages
        self.page_tokens = page_tokens
        shape = KvShape(config.layers, config.kv_heads, config.head_dim, model.dtype, page_tokens)
        self.kv = KvBudget(shape, total_pages)
        self.kv_table = self.kv.model_table
        # Zeros, not uninitialised memory: gathers may touch slots that nothing was written to, and a mask
        # does not hide NaN. The memory is touched here, so that a pool that does not fit fails at start.
        # (Half a second per GiB on CPU, all of it page faults; touching it later would cost the same then.)
        self._buffer = self.kv.allocate(model.device)
        self.pools = self.kv.lay_out(self._buffer, self.kv_table)
        self._pages_written = 0
        # Where every layer has a window, a sequence may be longer than the pool: pages behind it come back.
        bounded = None not in config.layer_windows
        longest = config.max_length if bounded else min(config.max_length, total_pages * page_tokens)
        self._rotations = rotation_table(config, longest, model.device)
        self.set_windows(layer_windows(config.layer_windows))

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Compute the chunks in one step; chunks of one call must belong to different sequences.

        Returns float32 logits [sum of the chunks' logits, vocab] in chunk order. Raises ValueError for an
        empty chunk, a page table that is too short, or a position beyond the model's length or the pool.
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
            last = max(max(chunk.pages[chunk.start // self.page_tokens :]) for chunk in chunks)
            self._pages_written = max(self._pages_written, last + 1)
            return self.model.forward(plan, self._rotations[plan.positions], self.pools)

    def _settings(self) -> PlanSettings:
        fused = self.model.kernels.obstacle(Operator.PAGED_DECODE) is None
        return PlanSettings(self.page_tokens, self.windows, self.model.dtype, self.model.device, fused)

    def capabilities(self) -> dict[str, str | None]:
        """Optimization name -> None when this model and machine can do it, else the reason why not."""
        impossible = self.model.kernels.impossible
        cuda = self.model.device.type == "cuda"
        return {
            "fusedKernels": impossible.value if impossible else None,
            "kvQuantization": None,
            "slidingWindow": None,
            "cudaGraphs": "not in this build" if cuda else Obstacle.NO_CUDA.value,
        }

    def set_kv_table(self, table: KvTable) -> int:
        """Store KV in these precisions from the next step on; returns the pages that the pool has now.

        Everything in the pool is lost. Costs what zeroing the pages written so far costs, and no memory.
        """
        if table != self.kv_table:
            # What is left would be other numbers under the new table, NaN among them.
            for pool in self.pools:
                pool.zero(self._pages_written)
            self._pages_written = 0
            self.kv_table = table
            self.pools = self.kv.lay_out(self._buffer, table)
            self.total_pages = self.kv.pages_at(table)
            self.model.kernels.set_kv_quantized(table != self.kv.model_table)
        return self.total_pages

    def set_windows(self, windows: LayerWindows) -> None:
        """What each layer sees from the next step on. KV computed before is that of other windows."""
        self.windows = windows
        self.model.kernels.set_windowed(any(window is not None for window in windows))

    def set_fused_kernels(self, allowed: bool, because: Obstacle = Obstacle.SWITCHED_OFF) -> None:
        """Allow fused kernels or take them back, from the next step on."""
        self.model.kernels.set_allowed(allowed, because)

    def require_fused_kernels(self) -> None:
        """Raises FusedKernelsUnavailable when any operator would run unfused on this machine."""
        self.model.kernels.require_fused()

    def kernel_decisions(self) -> list[Decision]:
        """Per operator: fused or why not, and launches so far."""
        return self.model.kernels.decisions()
