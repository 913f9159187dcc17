"""The command line: what it says, and what it hands to the implementation."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

from firsttoken_api import cli
from firsttoken_api.optimizations import NAMES

runner = CliRunner()


@dataclass
class Recorder:
    """Stands in for a command's implementation: keeps the options it was given."""

    code: int = 0
    given: list[dict[str, Any]] = field(default_factory=list)

    def module(self, options: str) -> ModuleType:
        made = ModuleType("implementation")
        setattr(made, options, lambda **given: given)
        made.run = lambda given=None: (self.given.append(given or {}), self.code)[1]  # type: ignore[attr-defined]
        return made


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    for name, options in (
        ("firsttoken_runtime.serve", "ServeOptions"),
        ("firsttoken_runtime.measure.bench", "BenchOptions"),
        ("firsttoken_operator.kill", "KillOptions"),
        ("firsttoken_operator.main", "Nothing"),
    ):
        monkeypatch.setitem(sys.modules, name, recorder.module(options))
    return recorder


def plain(text: str) -> str:
    """Without colours, frames and line breaks."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m|[│╭╮╰╯─]", " ", text).split())


def invoke(*arguments: str) -> Any:
    return runner.invoke(cli.app, list(arguments), env={"COLUMNS": "200", "NO_COLOR": "1"})


def test_serve_listens_on_loopback_unless_told_otherwise(recorder: Recorder) -> None:
    answer = invoke("serve", "--model", "m.gguf")
    assert answer.exit_code == 0, answer.output
    assert recorder.given == [
        {
            "model": "m.gguf",
            "served_name": None,
            "device": "auto",
            "dtype": "auto",
            "max_model_len": None,
            "chat_template": None,
            "seed": 0,
            "threads": None,
            "host": "127.0.0.1",
            "port": 8000,
            "admin_host": None,
            "admin_port": 8001,
            "admin_token_file": None,
            "switches": None,
            "drain_timeout_seconds": 30.0,
            "kv_memory": "auto",
            "page_tokens": 16,
            "max_queued": 1024,
            "otlp_endpoint": None,
            "draft_model": None,
        }
    ]


def test_serve_hands_its_exit_code_on(recorder: Recorder) -> None:
    recorder.code = 2
    assert invoke("serve", "--model", "missing").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "Missing option '--model'"),
        (("--model", "m", "--kv-memory", "0"), "write more than 0, such as 512Mi or 2Gi, or auto"),
        (("--model", "m", "--kv-memory", "lots"), "write a number such as 512Mi"),
        (("--model", "m", "--port", "70000"), "Invalid value for '--port'"),
        (("--model", "m", "--device", "tpu"), "'auto', 'cpu', 'cuda'"),
        (("--model", "m", "--dtype", "int3"), "'float32'"),
        (("--model", "m", "--page-tokens", "0"), "Invalid value for '--page-tokens'"),
        (("--model", "m", "--max-model-len", "-1"), "Invalid value for '--max-model-len'"),
        (("--model", "m", "--chat-template", "/does/not/exist"), "does not exist"),
        (("--model", "m", "--admin-token-file", "/does/not/exist"), "does not exist"),
        (("--modle", "m"), "--model"),
    ],
)
def test_serve_says_what_is_wrong(recorder: Recorder, arguments: tuple[str, ...], words: str) -> None:
    answer = invoke("serve", *arguments)
    assert answer.exit_code == 2
    assert words in plain(answer.output)
    assert recorder.given == []


def test_help_of_serve_groups_options_and_gives_examples() -> None:
    text = plain(invoke("serve", "--help").output)
    for expected in (
        "KV cache and queue",
        "Switches and shutdown",
        "[default: 127.0.0.1]",
        "firsttoken serve --model ./smollm2-135m-instruct-q4_1.gguf",
        "queue, prefill, decode, transport",
    ):
        assert expected in text


@pytest.mark.parametrize("command", ["serve", "bench", "operator", "kill", "release", "version"])
def test_every_option_of_every_command_is_described(command: str) -> None:
    import typer.main

    found = typer.main.get_command(cli.app)
    for parameter in found.commands[command].params:  # type: ignore[attr-defined]
        assert parameter.help, f"{command} {parameter.name}"


def test_kill_hands_over_what_and_where(recorder: Recorder, tmp_path: Path) -> None:
    config = tmp_path / "kubeconfig"
    config.touch()
    what = ("-o", "prefixCache", "-o", "chunkedPrefill", "-n", "a", "-l", "tier=test", "-r", "why")
    where = ("--kubeconfig", str(config), "--context", "c", "--timeout", "3", "--json")
    answer = invoke("kill", *what, *where)
    assert answer.exit_code == 0, answer.output
    assert recorder.given == [
        {
            "engaged": True,
            "optimizations": ("prefixCache", "chunkedPrefill"),
            "namespaces": ("a",),
            "selector": "tier=test",
            "reason": "why",
            "kubeconfig": config,
            "context": "c",
            "timeout_seconds": 3.0,
            "json": True,
        }
    ]


def test_two_kills_in_one_process_do_not_share_their_lists(recorder: Recorder) -> None:
    invoke("kill", "-o", "prefixCache")
    invoke("kill")
    assert recorder.given[1]["optimizations"] == ()


def test_kill_refuses_an_optimization_that_does_not_exist(recorder: Recorder) -> None:
    answer = invoke("kill", "-o", "chunkedPrefil")
    assert answer.exit_code == 2
    assert "unknown optimization chunkedPrefil; use one of " + ", ".join(NAMES) in plain(answer.output)
    assert recorder.given == []


def test_release_releases(recorder: Recorder) -> None:
    assert invoke("release").exit_code == 0
    assert recorder.given[0]["engaged"] is False


def test_a_pod_that_did_not_confirm_is_an_exit_code(recorder: Recorder) -> None:
    recorder.code = 1
    assert invoke("kill").exit_code == 1


def test_bench_hands_over_its_scenarios_and_its_loads(recorder: Recorder) -> None:
    invoke("bench")
    invoke("bench", "--scenario", "cached", "--json")
    invoke("bench", "--rate", "1", "--rate", "2.5", "--endpoint", "chat", "--no-ignore-eos")
    assert [given["scenarios"] for given in recorder.given] == [(), ("cached",), ()]
    assert [given["json"] for given in recorder.given] == [False, True, False]
    assert [given["rates"] for given in recorder.given] == [(), (), (1.0, 2.5)]
    assert [(given["chat"], given["ignore_eos"]) for given in recorder.given[1:]] == [
        (False, True),
        (True, False),
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rate", "0"), "Invalid value for '--rate'"),
        (("--concurrency", "0"), "Invalid value for '--concurrency'"),
        (("--rounds", "0"), "Invalid value for '--rounds'"),
        (("--cache", "lukewarm"), "'cold', 'warm'"),
        (("--trace", "/does/not/exist"), "does not exist"),
        (("--compare", "one.json"), "requires 2 arguments"),
    ],
)
def test_bench_says_what_is_wrong(recorder: Recorder, arguments: tuple[str, ...], words: str) -> None:
    answer = invoke("bench", *arguments)
    assert answer.exit_code == 2
    assert words in plain(answer.output)


def test_operator_runs(recorder: Recorder) -> None:
    assert invoke("operator").exit_code == 0
    assert recorder.given == [{}]


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [
        (("serve", "--model", "m"), "torch", "firsttoken[runtime]"),
        (("bench",), "prometheus_client", "firsttoken[runtime]"),
        (("operator",), "kopf", "firsttoken[operator]"),
        (("kill",), "kubernetes", "firsttoken[operator]"),
    ],
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...], package: str, extra: str
) -> None:
    def missing(module: str) -> ModuleType:
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)

    monkeypatch.setattr(cli.importlib, "import_module", missing)
    monkeypatch.setattr(sys, "argv", ["firsttoken", *command])
    answer = invoke(*command)
    assert answer.exit_code == 2
    assert f"`firsttoken {command[0]}` needs the Python package {package!r}" in answer.output
    assert f"pip install '{extra}'" in answer.output


def test_help_imports_no_extra() -> None:
    script = (
        "import sys\nfrom firsttoken_api import cli\n"
        "sys.argv = ['firsttoken', 'serve', '--help']\n"
        "try:\n    cli.main()\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'kopf', 'kubernetes', 'fastapi', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_as_a_kubectl_plugin_it_calls_itself_so() -> None:
    script = (
        "import sys\nfrom firsttoken_api import cli\n"
        "sys.argv = ['/bin/kubectl-firsttoken', 'kill', '--help']\ncli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "kubectl firsttoken kill" in done.stdout


def test_version() -> None:
    assert re.fullmatch(r"firsttoken \d+\.\d+\.\d+\S*\n", invoke("version").output)
