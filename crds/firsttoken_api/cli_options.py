"""The options of the command line that take more than a line: names, bounds, help, panel."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from firsttoken_api.optimizations import CATALOGUE, NAMES
from firsttoken_api.quantity import QuantityError, parse_bytes

_MODEL, _NETWORK, _MEMORY, _SWITCHES = "Model", "Network", "KV cache and queue", "Switches and shutdown"
_SCOPE, _CLUSTER, _OUTPUT = "What and where", "Cluster", "Output"


class Device(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Dtype(StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


def _check_kv_memory(value: str) -> str:
    if value != "auto":
        try:
            parse_bytes(value)
        except QuantityError as error:
            raise typer.BadParameter(f"{error}, or auto") from None
    return value


def _check_optimizations(values: list[str]) -> list[str]:
    unknown = [value for value in values if value not in NAMES]
    if unknown:
        raise typer.BadParameter(f"unknown optimization {', '.join(unknown)}; use one of {', '.join(NAMES)}")
    return values


# firsttoken serve

Model = Annotated[
    str,
    typer.Option(
        metavar="PATH",
        help="GGUF file, or folder in Hugging Face layout (config.json, *.safetensors, tokenizer.json).",
        rich_help_panel=_MODEL,
        show_default=False,
    ),
]
ServedName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Name that clients ask for. Default: the file's or folder's own, without its ending.",
        rich_help_panel=_MODEL,
    ),
]
DeviceOption = Annotated[
    Device,
    typer.Option(help="Where to compute; auto takes a GPU when there is one.", rich_help_panel=_MODEL),
]
DtypeOption = Annotated[
    Dtype,
    typer.Option(
        help="Number format of weights and KV; auto is float32 on CPU, bfloat16 on a GPU.",
        rich_help_panel=_MODEL,
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="Smaller model of the same vocabulary, for speculativeDecoding with method draft.",
        rich_help_panel=_MODEL,
        show_default=False,
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        min=16,
        help="Most tokens of prompt and answer together. Default: what the model was trained for.",
        rich_help_panel=_MODEL,
    ),
]
ChatTemplate = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        exists=True,
        dir_okay=False,
        readable=True,
        help="Jinja chat template to use instead of the model's own.",
        rich_help_panel=_MODEL,
    ),
]
Seed = Annotated[
    int,
    typer.Option(metavar="N", min=0, help="Seed of requests that bring none.", rich_help_panel=_MODEL),
]
Threads = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        max=1024,
        help="CPU threads of the model. Default: the cores there are.",
        rich_help_panel=_MODEL,
    ),
]
Host = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS",
        help="Address to listen on. 0.0.0.0 opens it to the network.",
        rich_help_panel=_NETWORK,
    ),
]
Port = Annotated[
    int,
    typer.Option(
        metavar="PORT",
        min=0,
        max=65535,
        help="OpenAI-compatible API and /metrics; 0 takes a free one.",
        rich_help_panel=_NETWORK,
    ),
]
AdminHost = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Address of the admin port. Default: the same as --host.",
        rich_help_panel=_NETWORK,
    ),
]
AdminPort = Annotated[
    int,
    typer.Option(
        metavar="PORT",
        min=0,
        max=65535,
        help="State and switches; every call needs the token.",
        rich_help_panel=_NETWORK,
    ),
]
AdminTokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        exists=True,
        dir_okay=False,
        readable=True,
        help="File with the admin port's bearer token. Default: a new token, in a private file that the log "
        "names.",
        rich_help_panel=_NETWORK,
    ),
]
KvMemory = Annotated[
    str,
    typer.Option(
        metavar="QUANTITY|auto",
        callback=_check_kv_memory,
        help="Memory of the KV cache, such as 512Mi or 8Gi; auto takes 85% of what the weights leave on GPU, "
        "on CPU 30% and no more than four sequences of full length need.",
        rich_help_panel=_MEMORY,
    ),
]
PageTokens = Annotated[
    int, typer.Option(metavar="N", min=1, max=256, help="Tokens of one KV page.", rich_help_panel=_MEMORY)
]
MaxQueued = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=1,
        max=100_000,
        help="Waiting requests beyond which new ones get 429 with Retry-After.",
        rich_help_panel=_MEMORY,
    ),
]
SwitchesFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="JSON file of switches, watched while serving. Default: the catalogue's defaults.",
        rich_help_panel=_SWITCHES,
    ),
]
DrainTimeout = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        min=0,
        max=3600,
        help="On SIGTERM: how long running answers may finish.",
        rich_help_panel=_SWITCHES,
    ),
]
OtlpEndpoint = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Send a trace of every request to this OTLP/HTTP receiver, as in http://127.0.0.1:4318. "
        "Default: $OTEL_EXPORTER_OTLP_ENDPOINT; without either nothing is sent.",
        rich_help_panel=_SWITCHES,
    ),
]

# firsttoken kill, firsttoken release

Optimizations = Annotated[
    list[str],
    typer.Option(
        "--optimization",
        "-o",
        metavar="NAME",
        callback=_check_optimizations,
        help="What to take back; may be repeated. Default: all but the essential ones "
        f"({', '.join(entry.name for entry in CATALOGUE if entry.essential)}).",
        rich_help_panel=_SCOPE,
    ),
]
Namespaces = Annotated[
    list[str],
    typer.Option(
        "--namespace",
        "-n",
        metavar="NAMESPACE",
        help="Only services there; may be repeated. Default: everywhere.",
        rich_help_panel=_SCOPE,
    ),
]
Selector = Annotated[
    str | None,
    typer.Option(
        "--selector",
        "-l",
        metavar="KEY=VALUE,…",
        help="Only services with these labels.",
        rich_help_panel=_SCOPE,
    ),
]
Reason = Annotated[
    str | None,
    typer.Option(
        "--reason", "-r", metavar="TEXT", help="Why, for whoever looks next.", rich_help_panel=_SCOPE
    ),
]
Kubeconfig = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="Default: $KUBECONFIG, ~/.kube/config, or the pod's own account.",
        rich_help_panel=_CLUSTER,
    ),
]
Context = Annotated[
    str | None,
    typer.Option(help="Context in the kubeconfig. Default: the current one.", rich_help_panel=_CLUSTER),
]
Timeout = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        min=0.1,
        max=600,
        help="How long pods may take to confirm.",
        rich_help_panel=_CLUSTER,
    ),
]
AsJson = Annotated[
    bool, typer.Option("--json", help="JSON on stdout and nothing else.", rich_help_panel=_OUTPUT)
]
