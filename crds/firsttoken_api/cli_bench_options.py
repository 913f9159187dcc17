"""The options of `firsttoken bench`: names, bounds, help, panel."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

_SERVER, _LOAD, _PROMPTS, _FIGURES = "Server", "Load", "Prompts and answers", "Figures and output"


class Endpoint(StrEnum):
    COMPLETIONS = "completions"
    CHAT = "chat"


class CacheState(StrEnum):
    COLD = "cold"
    WARM = "warm"


# The server

Url = Annotated[
    str, typer.Option(metavar="URL", help="An OpenAI-compatible server.", rich_help_panel=_SERVER)
]
ModelName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Model to ask for. Default: the first it serves.", rich_help_panel=_SERVER
    ),
]
EndpointOption = Annotated[
    Endpoint, typer.Option(help="/v1/completions or /v1/chat/completions.", rich_help_panel=_SERVER)
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        exists=True,
        dir_okay=False,
        readable=True,
        help="File with the API key.",
        rich_help_panel=_SERVER,
    ),
]
ApiKeyEnv = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="Environment variable that holds the API key.", rich_help_panel=_SERVER
    ),
]
AdminUrl = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="firsttoken's admin port: records the switches; short-behind-long runs with chunkedPrefill on "
        "and off.",
        rich_help_panel=_SERVER,
    ),
]
AdminTokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        exists=True,
        dir_okay=False,
        readable=True,
        help="File with the admin port's token.",
        rich_help_panel=_SERVER,
    ),
]
Pid = Annotated[
    int | None,
    typer.Option(
        metavar="PID",
        min=1,
        help="The server's process, for its CPU and memory. Default: whoever listens on the port of a local "
        "--url.",
        rich_help_panel=_SERVER,
    ),
]
RequestTimeout = Annotated[
    float,
    typer.Option(
        "--timeout",
        metavar="SECONDS",
        min=0.1,
        max=86_400,
        help="Longest time for one answer; beyond it the request has failed.",
        rich_help_panel=_SERVER,
    ),
]

# The load

Scenario = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="single, cached, short-behind-long or closed-loop; may be repeated. Default: all.",
        rich_help_panel=_LOAD,
    ),
]
Rate = Annotated[
    list[float] | None,
    typer.Option(
        metavar="PER_SECOND",
        min=0.001,
        max=100_000,
        help="Open loop: requests a second, Poisson. Repeat it for a sweep.",
        rich_help_panel=_LOAD,
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        exists=True,
        dir_okay=False,
        readable=True,
        help="Open loop: arrivals and lengths of a trace, CSV (Azure, BurstGPT) or JSONL (Mooncake).",
        rich_help_panel=_LOAD,
    ),
]
RateScale = Annotated[
    float,
    typer.Option(
        metavar="X",
        min=0.0001,
        max=10_000,
        help="Replays the trace X times as fast.",
        rich_help_panel=_LOAD,
    ),
]
Concurrency = Annotated[
    list[int] | None,
    typer.Option(
        metavar="N",
        min=1,
        max=10_000,
        help="Closed loop: N callers, each sending its next request when the last one ended. Repeat it for a "
        "sweep.",
        rich_help_panel=_LOAD,
    ),
]
Requests = Annotated[
    int,
    typer.Option(metavar="N", min=1, max=1_000_000, help="Most requests per round.", rich_help_panel=_LOAD),
]
Duration = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        min=0.1,
        max=86_400,
        help="A round sends nothing after this time. Default: no limit but --requests.",
        rich_help_panel=_LOAD,
    ),
]
Rounds = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=1,
        max=100,
        help="Repetitions; every figure is the median of them. 4 or more let --compare tell, 6 or more give "
        "95 % intervals.",
        rich_help_panel=_LOAD,
    ),
]
WarmUp = Annotated[
    int,
    typer.Option(
        metavar="N", min=0, max=10_000, help="Requests before the first round.", rich_help_panel=_LOAD
    ),
]
BenchSeed = Annotated[
    int,
    typer.Option(metavar="N", min=0, help="Seed of arrivals, lengths and words.", rich_help_panel=_LOAD),
]

# Prompts and answers

_DISTRIBUTIONS = "N, uniform:LOW:HIGH, normal:MEAN:SD, lognormal:MEAN:SD or exponential:MEAN"
PromptTokens = Annotated[
    str,
    typer.Option(metavar="LENGTHS", help=f"Tokens of a prompt: {_DISTRIBUTIONS}.", rich_help_panel=_PROMPTS),
]
OutputTokens = Annotated[
    str,
    typer.Option(metavar="LENGTHS", help="Tokens of an answer, likewise.", rich_help_panel=_PROMPTS),
]
LengthsFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        exists=True,
        dir_okay=False,
        readable=True,
        help="Draws both lengths from the rows of a trace file instead.",
        rich_help_panel=_PROMPTS,
    ),
]
CacheOption = Annotated[
    CacheState,
    typer.Option(
        help="Prefix cache: cold, no two prompts begin alike; warm, they share prefixes sent before.",
        rich_help_panel=_PROMPTS,
    ),
]
Prefixes = Annotated[
    int,
    typer.Option(
        metavar="N", min=1, max=100_000, help="Different prefixes of a warm cache.", rich_help_panel=_PROMPTS
    ),
]
PrefixTokens = Annotated[
    int,
    typer.Option(
        metavar="N", min=1, max=1_000_000, help="Tokens of such a prefix.", rich_help_panel=_PROMPTS
    ),
]
IgnoreEos = Annotated[
    bool,
    typer.Option(
        help="Answers have the length asked for, whatever the model says.", rich_help_panel=_PROMPTS
    ),
]

# Figures and output

SloTtft = Annotated[
    float | None,
    typer.Option(
        metavar="MS", min=0, help="Goodput counts requests with at most this TTFT.", rich_help_panel=_FIGURES
    ),
]
SloTpot = Annotated[
    float | None,
    typer.Option(
        metavar="MS", min=0, help="… and at most this time per output token.", rich_help_panel=_FIGURES
    ),
]
SloE2e = Annotated[
    float | None,
    typer.Option(metavar="MS", min=0, help="… and at most this time in all.", rich_help_panel=_FIGURES),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="JSON on stdout and nothing else.", rich_help_panel=_FIGURES)
]
Output = Annotated[
    Path | None,
    typer.Option(metavar="FILE", dir_okay=False, help="Also write the JSON there.", rich_help_panel=_FIGURES),
]
Compare = Annotated[
    tuple[Path, Path] | None,
    typer.Option(
        metavar="A.json B.json",
        help="Measures nothing: says for every figure whether B is better, worse or within noise.",
        rich_help_panel=_FIGURES,
    ),
]
