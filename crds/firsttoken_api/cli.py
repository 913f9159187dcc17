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

import typer

from firsttoken_api import cli_bench_options as measure
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
    draft_model: option.DraftModel = None,
    switches: option.SwitchesFile = None,
    drain_timeout: option.DrainTimeout = 30.0,
    otlp_endpoint: option.OtlpEndpoint = None,
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
        draft_model=draft_model,
        otlp_endpoint=otlp_endpoint,
    )
    raise typer.Exit(implementation.run(options) or 0)


_BENCH_EXAMPLES = """**Examples**

    firsttoken bench                                                the scenarios, against 127.0.0.1:8000
    firsttoken bench --rate 1 --rate 2 --rate 4 --slo-ttft-ms 500   open loop, a sweep, goodput
    firsttoken bench --trace conversation.csv --rate-scale 0.5 --requests 200 --output before.json
    firsttoken bench --concurrency 8 --cache warm --prefix-tokens 1000 --prompt-tokens 1200
    firsttoken bench --compare before.json after.json

What every figure means is in docs/bench.md. Ctrl-C prints the figures until then.
"""


@app.command(epilog=_BENCH_EXAMPLES, rich_help_panel="Serve and measure")
def bench(
    url: measure.Url = "http://127.0.0.1:8000",
    model: measure.ModelName = None,
    endpoint: measure.EndpointOption = measure.Endpoint.COMPLETIONS,
    api_key_file: measure.ApiKeyFile = None,
    api_key_env: measure.ApiKeyEnv = None,
    admin_url: measure.AdminUrl = None,
    admin_token_file: measure.AdminTokenFile = None,
    pid: measure.Pid = None,
    timeout: measure.RequestTimeout = 600.0,
    scenario: measure.Scenario = None,
    rate: measure.Rate = None,
    trace: measure.Trace = None,
    rate_scale: measure.RateScale = 1.0,
    concurrency: measure.Concurrency = None,
    requests: measure.Requests = 50,
    duration: measure.Duration = None,
    rounds: measure.Rounds = 5,
    warm_up: measure.WarmUp = 3,
    seed: measure.BenchSeed = 0,
    prompt_tokens: measure.PromptTokens = "512",
    output_tokens: measure.OutputTokens = "64",
    lengths: measure.LengthsFile = None,
    cache: measure.CacheOption = measure.CacheState.COLD,
    prefixes: measure.Prefixes = 1,
    prefix_tokens: measure.PrefixTokens = 256,
    ignore_eos: measure.IgnoreEos = True,
    slo_ttft_ms: measure.SloTtft = None,
    slo_tpot_ms: measure.SloTpot = None,
    slo_e2e_ms: measure.SloE2e = None,
    json: measure.AsJson = False,
    output: measure.Output = None,
    compare: measure.Compare = None,
) -> None:
    """Measure a running server, this one or another, or compare two measurements.

    TTFT, time per output token, throughput and goodput under a load: open loop (`--rate`, `--trace`) or
    closed loop (`--concurrency`). Without one, the scenarios: TTFT by prompt length, with a cached prefix, of
    short requests behind a long one, and closed loops.
    """
    implementation = _implementation("firsttoken_runtime.measure.bench", "runtime")
    options = implementation.BenchOptions(
        url=url,
        model=model,
        chat=endpoint is measure.Endpoint.CHAT,
        api_key_file=api_key_file,
        api_key_env=api_key_env,
        admin_url=admin_url,
        admin_token_file=admin_token_file,
        pid=pid,
        timeout_seconds=timeout,
        scenarios=tuple(scenario or ()),
        rates=tuple(rate or ()),
        trace=trace,
        rate_scale=rate_scale,
        concurrencies=tuple(concurrency or ()),
        requests=requests,
        duration_seconds=duration,
        rounds=rounds,
        warm_up=warm_up,
        seed=seed,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        lengths=lengths,
        cache=cache.value,
        prefixes=prefixes,
        prefix_tokens=prefix_tokens,
        ignore_eos=ignore_eos,
        slo_ttft_ms=slo_ttft_ms,
        slo_tpot_ms=slo_tpot_ms,
        slo_e2e_ms=slo_e2e_ms,
        json=json,
        output=output,
        compare=compare,
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
