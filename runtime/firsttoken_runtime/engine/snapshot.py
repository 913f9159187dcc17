"""A switch message as a step obeys it: read once, immutable, with the state of every switch.

A later optimization of the engine adds its name to `_ENGINE`, its parameters to `Snapshot`, and where KV
depends on it a field to `prefix.Namespace`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from firsttoken_api.optimizations import CATALOGUE
from firsttoken_api.quantity import parse_memory_cap
from firsttoken_api.switches import Setting, State, SwitchMessage
from firsttoken_runtime.engine.kv_table import KvTableError, read_table
from firsttoken_runtime.engine.page_needs import PageNeeds, least_pages
from firsttoken_runtime.engine.scheduler import ScheduleSettings
from firsttoken_runtime.engine.speculation import Method, SpeculationSettings
from firsttoken_runtime.engine.switch_state import NOT_IN_BUILD, switch_state
from firsttoken_runtime.engine.weights import STAY, LoadedWeights
from firsttoken_runtime.model.kv_pool import KvBudget, KvPrecision, KvTable, describe
from firsttoken_runtime.model.windows import Window, layer_windows, widest

_NEEDS_CONTINUOUS = "static batches take whole prompts, first come first served; switch continuousBatching on"
# Implemented by the engine itself; the others are possible when the runner says so.
_ENGINE = frozenset(
    {"continuousBatching", "prefixCache", "chunkedPrefill", "priorityScheduling", "speculativeDecoding"}
)

MOST_SEQUENCES = 256
_PAGES_PER_SEQUENCE = 4
# The automatic step budget.
STEP_SECONDS = 0.25
_LEAST_TOKENS = 128
_WHOLE_TOKENS = 2048
_CONCURRENCY_FACTOR = 0.7


@dataclass(frozen=True, slots=True)
class Load:
    """What the automatic limits follow; None where nothing was measured yet.

    prompt_tokens: mean of recent prompts. sequences: mean number running and waiting when a request comes.
    prefill_tokens_per_second: of recent steps.
    """

    prompt_tokens: float | None = None
    sequences: float | None = None
    prefill_tokens_per_second: float | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything a step reads of the switches.

    cache_pages: cap of the prefix cache. max_batch_tokens and chunk_size as in ScheduleSettings.
    max_queued: None is the start-up option's. max_ttft_seconds: None is no limit. Both hold with every
    optimization off, too: they protect the server, and make nothing faster.
    states: one entry per optimization, in catalogue order. kv_table: None where it cannot be changed.
    total_pages: of the pool with this table. speculation: None when it is off. window: of slidingWindow; None
    when it is off.
    """

    message: SwitchMessage
    total_pages: int
    page_tokens: int
    continuous: bool
    max_sequences: int
    max_batch_tokens: int | None
    cache_enabled: bool
    cache_pages: int
    chunk_size: int | None
    by_priority: bool
    ageing_tokens_per_second: float
    max_wait_ns: int
    max_queued: int | None
    max_ttft_seconds: float | None
    states: tuple[dict[str, Any], ...]
    kv_table: KvTable | None = None
    speculation: SpeculationSettings | None = None
    window: Window | None = None

    @property
    def kv_precision(self) -> str:
        """In words; different for different tables."""
        return describe(self.kv_table) if self.kv_table is not None else KvPrecision.MODEL.value

    def for_step(self, load: Load) -> ScheduleSettings:
        """The schedule settings of one step under the measured load."""
        return ScheduleSettings(
            continuous=self.continuous,
            max_sequences=self.max_sequences,
            max_batch_tokens=self.max_batch_tokens,
            prefill_tokens=automatic_prefill_tokens(
                self.chunk_size if self.continuous else None, load, self.total_pages * self.page_tokens
            ),
            chunk_size=self.chunk_size,
            by_priority=self.by_priority,
            ageing_tokens_per_second=self.ageing_tokens_per_second,
            max_wait_ns=self.max_wait_ns,
            share_prefixes=self.cache_enabled and self.continuous,
        )


def automatic_max_sequences(total_pages: int) -> int:
    """`maxSequences: auto`: one sequence per four pages of the pool, from 1 to 256."""
    return max(1, min(MOST_SEQUENCES, total_pages // _PAGES_PER_SEQUENCE))


def automatic_prefill_tokens(chunk_size: int | None, load: Load, pool_tokens: int) -> int:
    """`maxBatchTokens: auto`: prompt tokens of one step, beside one token for each sequence that decodes.

    Starts from mean prompt length x sequences x 0.7, and is one chunk at least. A new prompt waits for the
    step under way, so with chunks it shrinks to what the measured prefill speed does in a quarter of a
    second, but not below 128 tokens (or a smaller chunk), where reading the weights again for each step would
    dominate. Without chunks it is 2048 at least. Never more than the pool holds.
    """
    expected = (load.prompt_tokens or 0) * (load.sequences or 0) * _CONCURRENCY_FACTOR
    if chunk_size is None:
        tokens = max(_WHOLE_TOKENS, expected)
    else:
        tokens = max(chunk_size, expected)
        if load.prefill_tokens_per_second is not None:
            quick = load.prefill_tokens_per_second * STEP_SECONDS
            tokens = min(tokens, max(quick, min(chunk_size, _LEAST_TOKENS)))
    return max(1, min(int(tokens), pool_tokens))


def read_snapshot(
    message: SwitchMessage,
    total_pages: int,
    page_tokens: int,
    page_bytes: int | None,
    capabilities: Mapping[str, str | None],
    kv: KvBudget | None = None,
    draft_obstacle: str | None = None,
    weights: LoadedWeights | None = None,
    windows: Sequence[int | None] = (),
) -> Snapshot:
    """Read a switch message for a pool of `total_pages` pages, more where it quantizes KV.

    page_bytes: of one page over all layers; None when unknown, then a prefix cache capped in bytes is
    inactive. capabilities: of the runner, optimization name to None or the reason it is not possible. kv:
    None cannot be quantized. draft_obstacle: why no draft model can propose, or None. weights: what
    the weights are held in, None when weightQuantization is not possible. windows: of the
    model's layers. Never fails on what is not possible: it is reported inactive.
    """
    settings = message.switches
    hindrance = capabilities.get("kvQuantization")
    kv_table, hindrance = _kv_table(settings["kvQuantization"], kv, hindrance)
    window = _window(settings["slidingWindow"])
    weights = weights or LoadedWeights()
    capabilities = {
        **capabilities,
        "kvQuantization": hindrance,
        "weightQuantization": weights.hindrance(settings["weightQuantization"]),
        "slidingWindow": capabilities.get("slidingWindow")
        or _window_hindrance(window, windows, total_pages, page_tokens),
    }
    if kv is not None and kv_table is not None:
        total_pages, page_bytes = kv.pages_at(kv_table), kv.shape.page_bytes(kv_table)
    continuous = settings["continuousBatching"].enabled
    states = tuple(
        switch_state(
            entry.name,
            settings[entry.name],
            _hindrance(entry.name, settings, page_bytes, capabilities, draft_obstacle),
            in_use=STAY
            if entry.name == "weightQuantization" and weights.outlives(settings[entry.name])
            else None,
        )
        for entry in CATALOGUE
    )
    on = {state["name"] for state in states if state["state"] == State.ON}
    batching = settings["continuousBatching"].parameters
    priority = settings["priorityScheduling"].parameters
    max_sequences = batching["maxSequences"]
    max_batch_tokens = batching["maxBatchTokens"]
    max_queued = batching["maxQueued"]
    cap = settings["prefixCache"].parameters["maxMemory"]
    speculation = settings["speculativeDecoding"].parameters
    return Snapshot(
        message=message,
        total_pages=total_pages,
        page_tokens=page_tokens,
        continuous=continuous,
        max_sequences=automatic_max_sequences(total_pages) if max_sequences == "auto" else int(max_sequences),
        max_batch_tokens=None if max_batch_tokens == "auto" else int(max_batch_tokens),
        cache_enabled="prefixCache" in on,
        cache_pages=_cache_pages(cap, total_pages, page_bytes) if "prefixCache" in on else 0,
        chunk_size=int(settings["chunkedPrefill"].parameters["chunkSize"])
        if "chunkedPrefill" in on
        else None,
        by_priority="priorityScheduling" in on,
        ageing_tokens_per_second=float(priority["ageingTokensPerSecond"]),
        max_wait_ns=int(float(priority["maxWaitSeconds"]) * 1e9),
        max_queued=None if max_queued == "auto" else int(max_queued),
        max_ttft_seconds=float(batching["maxTtftSeconds"]) or None,
        speculation=SpeculationSettings(Method(speculation["method"]), int(speculation["tokens"]))
        if "speculativeDecoding" in on
        else None,
        states=states,
        kv_table=kv_table,
        window=window if "slidingWindow" in on else None,
    )


def _hindrance(
    name: str,
    settings: Mapping[str, Setting],
    page_bytes: int | None,
    capabilities: Mapping[str, str | None],
    draft_obstacle: str | None,
) -> str | None:
    """Why a switch cannot be on, or None."""
    if name not in _ENGINE:
        return capabilities.get(name, NOT_IN_BUILD)
    if name in ("chunkedPrefill", "priorityScheduling") and not settings["continuousBatching"].enabled:
        return _NEEDS_CONTINUOUS
    if name == "speculativeDecoding" and settings[name].parameters["method"] == Method.DRAFT:
        return draft_obstacle
    if name == "prefixCache" and page_bytes is None:
        cap = settings[name].parameters["maxMemory"]
        if not str(cap).endswith("%"):
            return f"maxMemory {cap}: this engine does not know the size of its pages; write a per cent"
    return None


def _window(setting: Setting) -> Window:
    return Window(int(setting.parameters["window"]), int(setting.parameters["sinkTokens"]))


def _window_hindrance(
    window: Window, own: Sequence[int | None], total_pages: int, page_tokens: int
) -> str | None:
    """Why the layers cannot see so much and no more, or None. total_pages: the fewest the pool ever has."""
    if not own:
        return NOT_IN_BUILD
    before = layer_windows(own)
    if layer_windows(own, window) == before:
        most = max(tokens for tokens in own if tokens is not None)
        return f"window {window.tokens}: this model's own windows are of {most} tokens at most"
    # A model with windows of its own is let take prompts that are longer than the pool.
    needed = least_pages(page_tokens, window)
    if PageNeeds.of(page_tokens, total_pages, widest(before)).bounded and needed > total_pages:
        return (
            f"window {window.tokens} with sinkTokens {window.sinks} needs {needed} KV pages, the pool has "
            f"{total_pages}"
        )
    return None


def _kv_table(
    setting: Setting, kv: KvBudget | None, hindrance: str | None
) -> tuple[KvTable | None, str | None]:
    """How KV is stored under this switch, None where it cannot be changed; and why not as asked for."""
    if kv is None:
        return None, NOT_IN_BUILD
    if not setting.enabled or hindrance is not None:
        return kv.model_table, hindrance
    try:
        return read_table(setting.parameters, kv), None
    except KvTableError as error:
        return kv.model_table, str(error)


def _cache_pages(cap: str | int, total_pages: int, page_bytes: int | None) -> int:
    size = page_bytes or 1
    return parse_memory_cap(cap, total_pages * size) // size
