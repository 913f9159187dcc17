"""The catalogue: one entry per optimization, and everything else derived from it.

CRD fields, runtime switches, the kill switch, metric labels, tuning steps and the docs table are read
from `CATALOGUE`. Adding an optimization is one entry here plus its implementation in the runtime.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from firsttoken_api.fields import Auto, Memory


class Segment(StrEnum):
    """The part of time to first token that an optimization works on."""

    QUEUE = "queue"
    PREFILL = "prefill"
    DECODE = "decode"
    TRANSPORT = "transport"


class Settings(BaseModel):
    """What can be written under `spec.optimizations.<name>`: `enabled` and the parameters.

    A field left out (None) means the catalogue's default, so that a default can improve with a release.
    Strict: `"yes"` is no boolean and `"512"` no number, as in the API server.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, alias_generator=to_camel, populate_by_name=True
    )

    enabled: bool | None = Field(default=None, description="Whether the optimization is asked for.")


class ContinuousBatching(Settings):
    max_sequences: Annotated[int, Field(ge=1, le=1024)] | Auto | None = Field(
        default=None, description="Most sequences in one step. `auto` follows the KV pool."
    )
    max_batch_tokens: Annotated[int, Field(ge=16, le=131072)] | Auto | None = Field(
        default=None,
        description="Most tokens computed in one step. `auto` starts from mean prompt length x "
        "expected concurrency x 0.7 and never exceeds what the pool can hold.",
    )
    max_queued: Annotated[int, Field(ge=0, le=1_000_000)] | Auto | None = Field(
        default=None,
        description="Most requests that wait beyond those with a place in the batch; more are answered 429. "
        "`auto` is what the server was started with (`--max-queued`). Holds with the optimization off, too.",
    )
    max_ttft_seconds: Annotated[float, Field(ge=0, le=3600)] | None = Field(
        default=None,
        description="A request whose predicted time to first token is longer is answered 429, unless nothing "
        "is ahead of it. 0 is no limit. Holds with the optimization off, too.",
    )


class PrefixCache(Settings):
    max_memory: Memory | None = Field(
        default=None,
        description="Memory cap of the prefix cache: bytes (`256Mi`) or per cent of the KV pool (`50%`). "
        "Least recently used entries are evicted beyond it.",
    )


class FusedKernels(Settings):
    required: bool | None = Field(
        default=None,
        description="Make a fallback to the unfused path a start-up error instead of a reason in status.",
    )


class CudaGraphs(Settings):
    pass


class KvPrecision(StrEnum):
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"


class KvLayer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    layer: int = Field(ge=0, le=1023, description="Layer number, from 0.")
    precision: Literal["model", "fp8", "int8", "int4"] = Field(
        description="KV precision of this layer; `model` leaves it unquantized."
    )


class KvQuantization(Settings):
    precision: Annotated[KvPrecision, Field(strict=False)] | None = Field(
        default=None,
        description="KV precision of every layer. int8 or fp8 for production; int4 only past a full quality "
        "evaluation.",
    )
    layers: Annotated[list[KvLayer], Field(max_length=256)] | None = Field(
        default=None,
        description="Exceptions for single layers.",
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["layer"]},
    )


class ChunkedPrefill(Settings):
    chunk_size: Annotated[int, Field(ge=16, le=16384)] | None = Field(
        default=None,
        description="Most prompt tokens of one request computed in one step. Too large and short "
        "requests wait behind a long prompt, too small and the weights are read again too often.",
    )


class PriorityScheduling(Settings):
    ageing_tokens_per_second: Annotated[float, Field(ge=0, le=1_000_000)] | None = Field(
        default=None,
        description="How many uncached prompt tokens one second of waiting makes up for. "
        "0 is strictly shortest first.",
    )
    max_wait_seconds: Annotated[float, Field(gt=0, le=3600)] | None = Field(
        default=None, description="A request that has waited this long goes first whatever its length."
    )


class PromptCompression(Settings):
    pass


class SlidingWindow(Settings):
    window: Annotated[int, Field(ge=16, le=1_048_576)] | None = Field(
        default=None, description="Tokens a query sees, itself included."
    )
    sink_tokens: Annotated[int, Field(ge=0, le=1024)] | None = Field(
        default=None, description="First tokens that every query sees."
    )


class SpeculativeDecoding(Settings):
    method: Literal["ngram", "draft"] | None = Field(
        default=None,
        description="`ngram` looks the continuation up in the prompt, `draft` asks a smaller model.",
    )
    tokens: Annotated[int, Field(ge=1, le=16)] | None = Field(
        default=None, description="Tokens proposed per step."
    )


class WeightQuantization(Settings):
    precision: Literal["int8", "fp8"] | None = Field(default=None, description="Weight precision.")


class TensorParallel(Settings):
    degree: Annotated[int, Field(ge=1, le=64)] | None = Field(
        default=None, description="GPUs that one replica's layers are split over."
    )


@dataclass(frozen=True)
class Optimization:
    """One entry of the catalogue.

    name: as in the CRD, in metrics labels and on the command line.
    order: place in the tuning order; ties are tuned in catalogue order.
    default: whether it is on when nobody says anything.
    live: takes effect at the next step; otherwise a change needs a restart and says RestartRequired.
    changes_outputs: can change what is generated, so the quality gate applies.
    essential: left on by `rollback.all` and by a kill switch that does not name it.
    """

    name: str
    summary: str
    segment: Segment
    settings: type[Settings]
    defaults: dict[str, object]
    order: int
    default: bool
    live: bool = True
    changes_outputs: bool = False
    essential: bool = False


CATALOGUE: tuple[Optimization, ...] = (
    Optimization(
        name="continuousBatching",
        summary="Forms the batch anew at every step, so that nobody waits for a whole batch to finish.",
        segment=Segment.QUEUE,
        settings=ContinuousBatching,
        defaults={
            "maxSequences": "auto",
            "maxBatchTokens": "auto",
            "maxQueued": "auto",
            "maxTtftSeconds": 0.0,
        },
        order=1,
        default=True,
        essential=True,
    ),
    Optimization(
        name="prefixCache",
        summary="Reuses the KV of prompt prefixes that were computed before (system prompts, documents).",
        segment=Segment.PREFILL,
        settings=PrefixCache,
        defaults={"maxMemory": "50%"},
        order=2,
        default=True,
    ),
    Optimization(
        name="fusedKernels",
        summary="Runs attention, norm, rotary and activation as fused Triton kernels.",
        segment=Segment.PREFILL,
        settings=FusedKernels,
        defaults={"required": False},
        order=3,
        default=True,
    ),
    Optimization(
        name="cudaGraphs",
        summary="Replays decode steps as one recorded GPU graph.",
        segment=Segment.DECODE,
        settings=CudaGraphs,
        defaults={},
        order=3,
        default=True,
    ),
    Optimization(
        name="kvQuantization",
        summary="Stores the KV cache in fewer bits, so that more requests fit.",
        segment=Segment.QUEUE,
        settings=KvQuantization,
        defaults={"precision": "fp8", "layers": []},
        order=4,
        default=False,
        changes_outputs=True,
    ),
    Optimization(
        name="chunkedPrefill",
        summary="Cuts long prompts in chunks with decode steps and short requests between them.",
        segment=Segment.QUEUE,
        settings=ChunkedPrefill,
        defaults={"chunkSize": 512},
        order=5,
        default=True,
    ),
    Optimization(
        name="priorityScheduling",
        summary="Lets short prompts go first, with ageing so that long ones finish in bounded time.",
        segment=Segment.QUEUE,
        settings=PriorityScheduling,
        defaults={"ageingTokensPerSecond": 100.0, "maxWaitSeconds": 10.0},
        order=6,
        default=True,
    ),
    Optimization(
        name="promptCompression",
        summary="Shortens history and retrieved passages before prefill.",
        segment=Segment.PREFILL,
        settings=PromptCompression,
        defaults={},
        order=7,
        default=False,
        changes_outputs=True,
    ),
    Optimization(
        name="slidingWindow",
        summary="Limits attention to a window and a few first tokens on models not trained for it.",
        segment=Segment.PREFILL,
        settings=SlidingWindow,
        defaults={"window": 4096, "sinkTokens": 4},
        order=7,
        default=False,
        changes_outputs=True,
    ),
    Optimization(
        name="speculativeDecoding",
        summary="Proposes several tokens at once and keeps those the model agrees with.",
        segment=Segment.DECODE,
        settings=SpeculativeDecoding,
        defaults={"method": "ngram", "tokens": 4},
        order=8,
        default=False,
    ),
    Optimization(
        name="weightQuantization",
        summary="Holds the weights in fewer bits.",
        segment=Segment.PREFILL,
        settings=WeightQuantization,
        defaults={"precision": "int8"},
        order=9,
        default=False,
        live=False,
        changes_outputs=True,
    ),
    Optimization(
        name="tensorParallel",
        summary="Splits every layer over several GPUs.",
        segment=Segment.PREFILL,
        settings=TensorParallel,
        defaults={"degree": 1},
        order=9,
        default=False,
        live=False,
    ),
)

BY_NAME: dict[str, Optimization] = {entry.name: entry for entry in CATALOGUE}
NAMES: tuple[str, ...] = tuple(BY_NAME)
