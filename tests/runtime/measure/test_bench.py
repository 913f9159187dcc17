"""`firsttoken bench` as a whole: what it prints, what it refuses, how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from firsttoken_runtime.measure import scenarios
from firsttoken_runtime.measure.bench import INTERRUPTED, run
from firsttoken_runtime.measure.options import BenchOptions

SMALL = {"rounds": 2, "requests": 4, "prompt_tokens": "20", "output_tokens": "3", "warm_up": 1}


def bench(server: Any, capsys: pytest.CaptureFixture[str], **options: Any) -> dict[str, Any]:
    """The JSON on stdout, which must be all there is."""
    assert run(BenchOptions(url=server.url, json=True, **{**SMALL, **options})) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def figure(report: dict[str, Any], name: str) -> Any:
    return next(entry for entry in report["rows"] if entry["figure"] == name)


def test_a_closed_loop_reports_a_value_per_round(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server.behaviour.cached_tokens = 0
    server.behaviour.first_seconds = 0.02
    report = bench(server, capsys, concurrencies=(2,), slo_ttft_ms=5000.0)
    ttft = figure(report, "TTFT P50")
    assert len(ttft["values"]) == ttft["rounds"] == 2
    assert ttft["interval"] == {"low": min(ttft["values"]), "high": max(ttft["values"]), "coverage": 0.5}
    assert ttft["median"] >= 20
    assert figure(report, "prompt, mean")["median"] == 20
    assert figure(report, "requests within the SLO")["median"] == 100
    assert figure(report, "failed requests")["median"] == 0
    assert report["load"]["cache"].startswith("cold")
    assert report["load"]["kinds"] == ["closed loop 2"]
    assert server.behaviour.most_running == 2
    assert f"(pid {os.getpid()})" in report["server"]["processes"][0]
    assert figure(report, "server memory, peak resident")["median"] > 1


def test_a_sweep_of_rates_runs_interleaved_and_never_sends_a_prompt_twice(
    server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    report = bench(server, capsys, rates=(50.0, 100.0))
    assert [entry["scenario"] for entry in report["rows"] if entry["figure"] == "TTFT P99"] == [
        "Poisson 50/s",
        "Poisson 100/s",
    ]
    assert figure(report, "client lateness P99")["unit"] == "ms"
    measured = [body["prompt"] for body in server.behaviour.bodies if body["max_tokens"] == 3]
    assert len(measured) == len({prompt[:30] for prompt in measured}) == 16


def test_a_warm_cache_shares_what_was_sent_before(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    report = bench(server, capsys, concurrencies=(1,), cache="warm", prefix_tokens=12, rounds=1)
    prime, *measured = [body["prompt"].split() for body in server.behaviour.bodies[-5:]]
    assert {tuple(words[:12]) for words in measured} == {tuple(prime[:12])}
    assert len({tuple(words[12:]) for words in measured}) == 4
    assert report["load"]["cache"].startswith("warm: every prompt begins with one of 1 prefixes of 12 tokens")


def test_a_trace_is_sent_at_its_times(
    server: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_seconds,prompt_tokens,output_tokens\n0,30,1\n1,40,2\n2,9000,2\n")
    report = bench(server, capsys, trace=trace, rate_scale=10.0, rounds=1, warm_up=0)
    arrivals = server.behaviour.arrivals[-3:]
    assert [arrival - arrivals[0] for arrival in arrivals] == pytest.approx([0, 0.1, 0.2], abs=0.05)
    assert figure(report, "prompt, longest")["median"] == 4096 - 2
    assert any("1 requests were cut" in warning for warning in report["warnings"])


def test_an_api_key_is_read_from_a_file_or_the_environment(
    server: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.behaviour.key = "secret"
    key = tmp_path / "key"
    key.write_text("secret\n")
    monkeypatch.setenv("MY_KEY", "secret")
    for where in ({"api_key_file": key}, {"api_key_env": "MY_KEY"}):
        report = bench(server, capsys, concurrencies=(1,), rounds=1, **where)
        assert "secret" not in json.dumps(report)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "gpt-9", "rates": (1.0,)}, "does not serve 'gpt-9'; it serves words-1"),
        ({"rates": (1.0,), "concurrencies": (2,)}, "different loads"),
        ({"scenarios": ("cached",), "rates": (1.0,)}, "use --scenario without"),
        ({"scenarios": ("nosuch",)}, "unknown scenario nosuch; use single, cached"),
        ({"rate_scale": 2.0}, "--rate-scale needs --trace"),
        ({"rates": (1.0,), "prompt_tokens": "long"}, "'long' is no length"),
        ({"admin_url": "http://127.0.0.1:1"}, "--admin-url needs --admin-token-file"),
        ({"api_key_env": "NOT_SET_ANYWHERE"}, "no API key in environment variable NOT_SET_ANYWHERE"),
        ({"api_key_env": "A", "api_key_file": Path("b")}, "use one of --api-key-file and --api-key-env"),
        ({"url": "127.0.0.1:8000"}, "write it with http:// or https://"),
        ({"url": "http://127.0.0.1:9"}, "cannot reach http://127.0.0.1:9"),
        ({"pid": 4_194_304}, "no process 4194304"),
    ],
)
def test_what_cannot_be_measured_is_one_line_that_says_why(
    server: Any, capsys: pytest.CaptureFixture[str], options: dict[str, Any], words: str
) -> None:
    assert run(BenchOptions(**{"url": server.url, **SMALL, **options})) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert words in shown.err
    assert shown.err.startswith("error: ")
    assert shown.err.count("\n") == 1


def test_a_server_that_wants_a_key_says_so(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server.behaviour.key = "secret"
    assert run(BenchOptions(url=server.url)) == 1
    assert "wants an API key (HTTP 401): use --api-key-file" in capsys.readouterr().err


def test_a_round_without_a_single_success_ends_the_run(
    server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    server.behaviour.fail_after = 4
    code = run(
        BenchOptions(url=server.url, json=True, concurrencies=(1,), **{**SMALL, "rounds": 50, "warm_up": 0})
    )
    shown = capsys.readouterr()
    assert code == 1
    assert "no request of round 2 succeeded; the first: HTTP 503: " in shown.err
    assert json.loads(shown.out)["errors"] == {"HTTP 503": 5}


def test_failed_requests_are_counted_by_kind(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server.behaviour.fail_every = 3
    report = bench(server, capsys, concurrencies=(1,), requests=6, rounds=1, warm_up=0)
    assert report["errors"] == {"HTTP 503": 2}
    assert figure(report, "failed requests")["median"] == 2
    assert report["failure"] is None


def test_a_table_is_printed_and_the_report_written(
    server: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    output = tmp_path / "report.json"
    assert run(BenchOptions(url=server.url, concurrencies=(1,), output=output, **SMALL)) == 0
    shown = capsys.readouterr().out
    for words in (
        "TTFT P95",
        "goodput",
        "server model: words-1",
        "load cache: cold",
        "median over the rounds",
    ):
        assert (words in shown) is (words != "goodput")
    assert json.loads(output.read_text())["kind"] == "firsttoken-bench"
    assert run(BenchOptions(compare=(output, output))) == 0
    assert "within noise" in capsys.readouterr().out
    assert run(BenchOptions(compare=(output, output), json=True)) == 0
    assert json.loads(capsys.readouterr().out)["differences"] == []
    assert run(BenchOptions(compare=(output, tmp_path / "none.json"))) == 1


def test_a_report_that_cannot_be_written_is_an_error(server: Any, capsys: pytest.CaptureFixture[str]) -> None:
    unwritable = Path("/proc/nowhere/report.json")
    assert run(BenchOptions(url=server.url, concurrencies=(1,), output=unwritable, **SMALL)) == 1
    assert "cannot write /proc/nowhere/report.json" in capsys.readouterr().err


def test_all_scenarios_run_and_each_says_what_it_is_for(
    server: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scenarios, "CLOSED_LOOPS", ((2, 4),))
    report = bench(server, capsys, rounds=1)
    names = {(entry["scenario"], entry["figure"]) for entry in report["rows"]}
    assert names >= {
        ("single", "cold TTFT, 1,024 tokens"),
        ("single", "per output token"),
        ("cached", "TTFT, first 1,000 tokens repeated"),
        ("short behind long", "short TTFT P99"),
        ("short behind long", "long TTFT / alone"),
        ("closed loop 2", "output"),
    }
    lengths = [len(prompt.split()) for prompt in server.behaviour.prompts]
    assert {32, 128, 512, 1024, 1500, 40} <= set(lengths)
    shared = [prompt.split() for prompt in server.behaviour.prompts if len(prompt.split()) == 1024][1:]
    assert shared[0][:1000] == shared[1][:1000]
    assert shared[0][1000:] != shared[1][1000:]


@pytest.mark.parametrize("scenario", ["single", "cached", "short-behind-long", "closed-loop"])
def test_a_request_of_a_scenario_that_fails_ends_the_run_in_words(
    server: Any, capsys: pytest.CaptureFixture[str], scenario: str
) -> None:
    server.behaviour.fail_after = 2
    assert run(BenchOptions(url=server.url, scenarios=(scenario,), rounds=1, warm_up=0)) == 1
    assert capsys.readouterr().err.endswith('error: HTTP 503: {"error": {"message": "every now and then"}}\n')


def test_a_scenario_that_does_not_fit_the_model_says_so(
    server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    server.behaviour.max_model_len = 512
    options = {"url": server.url, "rounds": 1, "json": True}
    assert run(BenchOptions(**options, scenarios=("cached",))) == 1
    assert "needs a context of 1,028 tokens, words-1 has 512" in capsys.readouterr().err
    assert run(BenchOptions(**options, scenarios=("single",))) == 0
    assert "cold TTFT, 512 tokens" not in capsys.readouterr().out


@pytest.mark.parametrize("load", [("--concurrency", "2"), ("--rate", "20"), ("--scenario", "single")])
def test_ctrl_c_prints_what_there_is(server: Any, load: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", "from firsttoken_api.cli import main; main()", "bench"]
    command += ["--url", server.url, "--json", "--rounds", "50", "--warm-up", "0", *load]
    server.behaviour.first_seconds = 0.05
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 30
        while len(server.behaviour.bodies) < 12 and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert process.returncode == INTERRUPTED, err
    report = json.loads(out)
    assert report["interrupted"] is True
    assert report["rows"]
    assert "ending with what there is" in err


def test_a_server_that_dies_ends_the_run_with_the_figures_until_then(
    server: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def die() -> None:
        while len(server.behaviour.bodies) < 20:
            time.sleep(0.005)
        server.shutdown()
        server.socket.close()
        server.behaviour.break_after = 0  # connections that are kept alive outlive the listener

    thread = threading.Thread(target=die)
    thread.start()
    options = {**SMALL, "requests": 400, "rounds": 50, "timeout_seconds": 5.0}
    code = run(BenchOptions(url=server.url, json=True, rates=(200.0,), **options))
    thread.join()
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert code == 1
    assert report["errors"]
    assert "stopped accepting connections" in shown.err


def test_a_port_where_something_else_listens_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()

        def answer() -> None:
            connection, _ = silent.accept()
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nhi")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        assert run(BenchOptions(url=f"http://127.0.0.1:{silent.getsockname()[1]}")) == 1
        thread.join()
    assert "is this an OpenAI-compatible server?" in capsys.readouterr().err
