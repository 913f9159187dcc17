"""The `firsttoken` command line, which is also `kubectl firsttoken`.

Only signatures and help live here. Every command imports its implementation when it runs, so that `--help` is
instant and a machine with only one extra installed has only that extra's commands to lose.
"""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import version as installed_version
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from firsttoken_api import cli_options as option

USER_ERROR = 2

app = typer.Typer(
    name="firsttoken",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Serves language models with a low time to first token, shows where that time goes, and takes any "
    "optimization back live.",
)


def _implementation(module: str, extra: str) -> ModuleType:
    """Import a command's module; when a package is missing, end with a line that names the extra."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("firsttoken"):
            raise
        command = " ".join(sys.argv[1:2]) or "this command"
        typer.echo(
            f"error: `firsttoken {command}` needs the Python package {error.name!r}, which is not installed; "
            f"run: pip install 'firsttoken[{extra}]'",
            err=True,
        )
        raise typer.Exit(USER_ERROR) from None


_SERVE_EXAMPLES = """**Examples**

    firsttoken serve --model ./smollm2-135m-instruct-q4_1.gguf
    firsttoken serve --model ./Qwen3-8B --device cuda --kv-memory 8Gi --max-model-len 8192
    curl -N http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
         -d '{"model": "NAME", "prompt": "Hello", "stream": true}'

The answer's Server-Timing header and its last event say where the time to first token went: queue, prefill,
decode, transport. Metrics are on /metrics. Ends with code 2 and one line when the model cannot be loaded.
"""


@app.command(epilog=_SERVE_EXAMPLES, rich_help_panel="Serve and measure")
def serve(
    model: option.Model,
    served_name: option.ServedName = None,
    device: option.DeviceOption = option.Device.AUTO,
    dtype: option.DtypeOption = option.Dtype.AUTO,
    max_model_len: option.MaxModelLen = None,
    chat_template: option.ChatTemplate = None,
    seed: option.Seed = 0,
    threads: option.Threads = None,
    host: option.Host = "127.0.0.1",
    port: option.Port = 8000,
    admin_host: option.AdminHost = None,
    admin_port: option.AdminPort = 8001,
    admin_token_file: option.AdminTokenFile = None,
    kv_memory: option.KvMemory = "auto",
    page_tokens: option.PageTokens = 16,
    max_queued: option.MaxQueued = 1024,
    switches: option.SwitchesFile = None,
    drain_timeout: option.DrainTimeout = 30.0,
) -> None:
    """Serve one model over the OpenAI API.

    Prompts are computed in chunks, prefixes are reused, the batch is formed anew at every step; each of these
    can be switched while it serves, through the admin port or the switches file.
    """
    implementation = _implementation("firsttoken_runtime.serve", "runtime")
    options = implementation.ServeOptions(
        model=model,
        served_name=served_name,
        device=device.value,
        dtype=dtype.value,
        max_model_len=max_model_len,
        chat_template=chat_template,
        seed=seed,
        threads=threads,
        host=host,
        port=port,
        admin_host=admin_host,
        admin_port=admin_port,
        admin_token_file=admin_token_file,
        switches=switches,
        drain_timeout_seconds=drain_timeout,
        kv_memory=kv_memory,
        page_tokens=page_tokens,
        max_queued=max_queued,
    )
    raise typer.Exit(implementation.run(options) or 0)


@app.command(rich_help_panel="Serve and measure")
def bench(
    url: Annotated[str, typer.Option(metavar="URL", help="Server to measure.")] = "http://127.0.0.1:8000",
    admin_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Its admin port, to compare with switches on and off.")
    ] = None,
    admin_token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", exists=True, dir_okay=False, readable=True, help="File with its token."),
    ] = None,
    scenario: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Scenario to run; may be repeated. Default: all of them."),
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="Rounds per figure.")] = 5,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of the prompts.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="JSON on stdout and nothing else.")] = False,
) -> None:
    """Measure a running server: TTFT by prompt length, with and without cached prefix, and under load."""
    implementation = _implementation("firsttoken_runtime.measure.bench", "runtime")
    options = implementation.BenchOptions(
        url=url,
        admin_url=admin_url,
        admin_token_file=admin_token_file,
        scenarios=tuple(scenario) if scenario else implementation.SCENARIOS,
        rounds=rounds,
        seed=seed,
        json=json,
    )
    raise typer.Exit(implementation.run(options))


@app.command(rich_help_panel="Operate")
def operator() -> None:
    """Run the Kubernetes operator. Configured by its environment; the Helm chart does that."""
    _implementation("firsttoken_operator.main", "operator").run()


@app.command(rich_help_panel="Operate")
def kill(
    optimization: option.Optimizations = [],  # noqa: B006  (typer copies it)
    namespace: option.Namespaces = [],  # noqa: B006
    selector: option.Selector = None,
    reason: option.Reason = None,
    kubeconfig: option.Kubeconfig = None,
    context: option.Context = None,
    timeout: option.Timeout = 10.0,
    json: option.AsJson = False,
) -> None:
    """Take optimizations back everywhere, live, now. Works with the operator down.

    Engages the KillSwitch `global`, writes every service's switches and tells every pod itself; prints which
    pods confirmed, and ends with code 1 when one did not.
    """
    implementation = _implementation("firsttoken_operator.kill", "operator")
    options = implementation.KillOptions(
        engaged=True,
        optimizations=tuple(optimization),
        namespaces=tuple(namespace),
        selector=selector,
        reason=reason,
        kubeconfig=kubeconfig,
        context=context,
        timeout_seconds=timeout,
        json=json,
    )
    raise typer.Exit(implementation.run(options))


@app.command(rich_help_panel="Operate")
def release(
    kubeconfig: option.Kubeconfig = None,
    context: option.Context = None,
    timeout: option.Timeout = 10.0,
    json: option.AsJson = False,
) -> None:
    """Release the kill switch: every service goes back to its own roll-backs and configuration."""
    implementation = _implementation("firsttoken_operator.kill", "operator")
    options = implementation.KillOptions(
        engaged=False,
        kubeconfig=kubeconfig,
        context=context,
        timeout_seconds=timeout,
        json=json,
    )
    raise typer.Exit(implementation.run(options))


@app.command(rich_help_panel="Operate")
def version() -> None:
    """Print the version."""
    typer.echo(f"firsttoken {installed_version('firsttoken')}")


def main() -> None:
    """Entry point of `firsttoken` and of the kubectl plugin, which kubectl starts as `kubectl-firsttoken`."""
    plugin = Path(sys.argv[0]).name.startswith("kubectl-")
    app(prog_name="kubectl firsttoken" if plugin else "firsttoken")
