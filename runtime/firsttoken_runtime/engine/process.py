"""The engine process: loads the model, then does commands → step → events until the API process goes.

Started by the API process with one end of a socket pair; see `firsttoken_runtime.ipc`. It ends when told to,
when the API process ends (end of file on the socket; on Linux also by signal, for the time in which it loads
and does not read), and with one clear line when it cannot go on.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from firsttoken_api.quantity import QuantityError, parse_bytes
from firsttoken_api.switches import SwitchMessage, parse_message
from firsttoken_runtime import ipc, memory
from firsttoken_runtime.engine.pulse import Pulse
from firsttoken_runtime.engine.requests import AdmissionError, Request, TokenEvent
from firsttoken_runtime.switches import answered

if TYPE_CHECKING:
    from firsttoken_runtime.engine.grammar import Constraint, Grammars
    from firsttoken_runtime.model.config import ModelConfig
    from firsttoken_runtime.model.runner import ModelRunner

_log = logging.getLogger(__name__)
HEARTBEAT_SECONDS = 1.0
# How often an idle loop looks whether a grammar is ready.
_COMPILING_SECONDS = 0.002
# How long a loop waits between two steps that compute nothing although requests are there.
_STALLED_SECONDS = 0.05
EXIT_USER_ERROR = 2
EXIT_INTERNAL = 1
_WARM_UP_TOKENS = 64
_PR_SET_PDEATHSIG = 1


class EngineLike(Protocol):
    """What the loop needs of `engine.Engine`."""

    def add(self, request: Request, constraint: Constraint | None = None) -> None: ...
    def abort(self, request_id: str) -> bool: ...
    def set_switches(self, message: SwitchMessage) -> bool: ...
    def step(self) -> list[TokenEvent]: ...
    def has_work(self) -> bool: ...
    def switch_states(self) -> list[dict[str, Any]]: ...
    def pages(self) -> dict[str, int]: ...
    def kv(self) -> dict[str, Any]: ...
    def integrity(self) -> dict[str, Any]: ...
    def requests(self) -> list[dict[str, Any]]: ...
    def stats(self) -> dict[str, Any]: ...
    def flush_prefix_cache(self) -> None: ...
    def expected_step_seconds(self) -> float | None: ...
    def stalled(self) -> str | None: ...


class UserError(Exception):
    """Something the person who started the server can put right; the text says what."""


class EngineLoop:
    """Commands between steps, one step at a time, a heartbeat every second that a step does not fill.

    Beside it a thread says how long the step has been running (`pulse`). Where requests wait and no step
    takes any of them, which is a fault, it says so in the log and goes on slowly.

    A switch message is taken between two steps, so its reply is sent when it is in force.
    """

    def __init__(
        self,
        channel: ipc.Channel,
        engine: EngineLike,
        message: SwitchMessage,
        clock: Callable[[], float] = time.monotonic,
        grammars: Grammars | None = None,
        memory_used: Callable[[], dict[str, int]] = dict,
    ) -> None:
        """grammars: None where answers cannot be constrained. memory_used: bytes by purpose."""
        self._channel = channel
        self._grammars = grammars
        self._memory_used = memory_used
        self._engine = engine
        self._message = message
        self._clock = clock
        self._heartbeat_due = 0.0
        self._busy_since: float | None = None
        self._stalled: str | None = None
        self._steps = self._steps_checked = 0
        self._integrity_problems = 0

    def state(self) -> dict[str, Any]:
        """Generation, switches, pages, KV and memory as in the state JSON."""
        return {
            "generation": self._message.generation,
            "switches": answered(self._engine.switch_states(), self._message),
            "pages": self._engine.pages(),
            "kv": self._engine.kv(),
            "memory": self._memory_used(),
        }

    def run(self) -> None:
        """Until Shutdown. Raises ipc.ChannelClosed when the API process has ended."""
        with Pulse(self._channel, self._pulse):
            self._run()

    def _run(self) -> None:
        while True:
            idle_seconds = 0.0 if self._engine.has_work() else max(self._heartbeat_due - self._clock(), 0.0)
            grammars = self._grammars
            if grammars is not None and grammars.pending:
                idle_seconds = min(idle_seconds, _COMPILING_SECONDS)
            if self._stalled is not None:
                idle_seconds = _STALLED_SECONDS
            self._busy_since = None
            commands = self._channel.receive(idle_seconds)
            self._busy_since = self._clock()
            for command in commands:
                if isinstance(command, ipc.Shutdown):
                    return
                self._do(command)
            if grammars is not None and grammars.pending:
                self._add_compiled(grammars)
            if self._engine.has_work():
                self._steps += 1
                tokens = [_token(event) for event in self._engine.step()]
                if tokens:
                    self._channel.send(ipc.Tokens(tokens))
                self._look_for_a_stall()
            if self._clock() >= self._heartbeat_due:
                self._channel.send(self._heartbeat())
                self._heartbeat_due = self._clock() + HEARTBEAT_SECONDS

    def _pulse(self) -> ipc.Pulse:
        since = self._busy_since
        if since is None:
            return ipc.Pulse()
        return ipc.Pulse(max(self._clock() - since, 0.0), self._engine.expected_step_seconds())

    def _look_for_a_stall(self) -> None:
        before, self._stalled = self._stalled, self._engine.stalled()
        if (before is None) == (self._stalled is None):
            return
        _log.error("the engine is stuck: %s", self._stalled or "no more, requests are computed again")
        self._heartbeat_due = 0.0  # the API process should know now

    def _heartbeat(self) -> ipc.Heartbeat:
        """State and statistics; every page is recounted when the engine is idle after it has worked."""
        if self._steps != self._steps_checked and not self._engine.has_work():
            self._steps_checked = self._steps
            problems = self._engine.integrity()["problems"]
            self._integrity_problems = len(problems)
            for problem in problems:
                _log.error("page accounting: %s", problem)
        stats = {**self._engine.stats(), "integrity_problems": self._integrity_problems}
        return ipc.Heartbeat(self.state(), stats)

    def _do(self, command: ipc.Command) -> None:
        match command:
            case ipc.Add(request):
                self._add(request)
            case ipc.Vocabulary(tokens):
                if self._grammars is not None:
                    self._grammars.set_vocabulary(tokens)
            case ipc.Abort(request_id):
                if self._grammars is None or not self._grammars.cancel(request_id):
                    self._engine.abort(request_id)
            case ipc.SetSwitches(id, body):
                message = parse_message(body, ignore_unknown=True)
                taken = self._engine.set_switches(message)
                if taken:
                    self._message = message
                    log_unknown(message)
                self._channel.send(ipc.Reply(id, {"taken": taken, **self.state()}))
            case ipc.GetState(id):
                self._channel.send(ipc.Reply(id, {**self.state(), "stats": self._engine.stats()}))
            case ipc.GetRequests(id):
                self._channel.send(ipc.Reply(id, {"requests": self._engine.requests()}))
            case ipc.GetIntegrity(id):
                self._channel.send(ipc.Reply(id, self._engine.integrity()))
            case ipc.FlushPrefixCache(id):
                self._engine.flush_prefix_cache()
                self._channel.send(ipc.Reply(id, {"pages": self._engine.pages()}))

    def _add(self, request: Request) -> None:
        try:
            if request.sampling.grammar is None:
                self._engine.add(request)
            elif self._grammars is None:
                raise AdmissionError("invalid_grammar", "this engine cannot keep to an output format", 400)
            else:
                self._grammars.begin(request)  # it joins the queue in `_add_compiled`
        except AdmissionError as error:
            self._refuse(request, error)

    def _add_compiled(self, grammars: Grammars) -> None:
        for request, outcome in grammars.finished():
            try:
                if isinstance(outcome, AdmissionError):
                    raise outcome
                self._engine.add(request, outcome)
            except AdmissionError as error:
                self._refuse(request, error)

    def _refuse(self, request: Request, error: AdmissionError) -> None:
        self._channel.send(
            ipc.Refused(request.id, error.code, str(error), error.status, error.retry_after_seconds)
        )


def log_unknown(message: SwitchMessage) -> None:
    """Say once per message what a newer sender asked for and nobody here knows."""
    if names := message.not_in_this_build():
        _log.warning("switches: generation %d: not in this build: %s", message.generation, ", ".join(names))


def _token(event: TokenEvent) -> ipc.Token:
    return ipc.Token(
        request_id=event.request_id,
        token=event.token,
        index=event.index,
        finish=event.finish,
        logprob=event.logprob,
        top=event.top,
        prefill_start_ns=event.prefill_start_ns or 0,
        prefill_end_ns=event.prefill_end_ns or 0,
        sampled_ns=event.sampled_ns or 0,
        cached_tokens=event.cached_tokens or 0,
        prompt=event.prompt,
        queued_ns=event.queued_ns or 0,
        admitted_ns=event.admitted_ns or 0,
        computing_ns=event.computing_ns,
        chunks=event.chunks,
        preemptions=event.preemptions,
    )


@dataclass(frozen=True)
class Loaded:
    """An engine that can take requests, and what it says of itself."""

    engine: EngineLike
    grammars: Grammars
    max_model_len: int
    pool: memory.Pool
    device: str
    dtype: str
    architecture: str
    memory_used: Callable[[], dict[str, int]]
    window: int = 0


def load(start: ipc.Start, message: SwitchMessage, phase: Callable[[str], None]) -> Loaded:
    """Load the model and build the engine.

    phase: called at the end of each part of the work with its description.
    Raises UserError, ModelError, PoolError, QuantityError: each with one line to show.
    """
    from firsttoken_runtime.model.config import read_config

    config = read_config(start.model)
    max_model_len = _max_model_len(start.max_model_len, config)

    import torch

    threads = start.threads or memory.cpu_count()
    torch.set_num_threads(threads)
    torch.manual_seed(start.seed)
    phase(f"torch {torch.__version__.partition('+')[0]}, {threads} CPU threads")

    from firsttoken_runtime.engine.engine import Engine, EngineSettings
    from firsttoken_runtime.engine.grammar import Grammars
    from firsttoken_runtime.engine.page_needs import PageNeeds
    from firsttoken_runtime.engine.weights import LoadedWeights, asks_for_int8
    from firsttoken_runtime.kernels.dispatch import FusedKernelsUnavailable
    from firsttoken_runtime.model.footprint import weight_bytes
    from firsttoken_runtime.model.gguf import close_files
    from firsttoken_runtime.model.int8 import int8_obstacle
    from firsttoken_runtime.model.load import kv_bytes_per_token, load_model, resolve_device, resolve_dtype
    from firsttoken_runtime.model.runner import ModelRunner
    from firsttoken_runtime.model.windows import layer_windows, widest

    device = resolve_device(start.device)
    dtype = resolve_dtype(start.dtype, device)
    token_bytes = kv_bytes_per_token(config, dtype)
    draft_config = None
    if start.draft_model:
        from firsttoken_runtime.engine.draft_load import check_draft, load_draft

        draft_config = check_draft(start.draft_model, start.model)
    # A size that was given is checked before gigabytes are read; `auto` depends on what the weights leave.
    given = None if start.kv_memory == "auto" else parse_bytes(start.kv_memory)
    if given is not None:
        memory.pool(given, start.page_tokens, token_bytes)
        _must_be_there(device.type, given)
    obstacle = int8_obstacle(device, dtype)
    int8 = obstacle is None and asks_for_int8(message.switches["weightQuantization"])
    on_cpu = device.type == "cpu"
    resident = memory.resident_bytes if on_cpu else torch.cuda.memory_reserved
    libraries_bytes = resident()
    model = load_model(start.model, device, dtype, int8)
    dtype_name = str(dtype).removeprefix("torch.")
    held = "int8, computed in " if int8 else ""
    phase(f"weights: {config.architecture}, {config.layers} layers, {held}{dtype_name} on {device}")

    kv_bytes = given or _auto_kv_bytes(device.type, token_bytes, max_model_len)
    pool = memory.pool(kv_bytes, start.page_tokens, token_bytes)
    _must_be_there(device.type, pool.bytes)
    runner = ModelRunner(model, pool.pages, pool.page_tokens)
    fused = message.switches["fusedKernels"]
    if fused.enabled and fused.parameters["required"]:
        try:
            runner.require_fused_kernels()
        except FusedKernelsUnavailable as error:
            raise UserError(str(error)) from None
    window = widest(layer_windows(config.layer_windows))
    fits = PageNeeds.of(pool.page_tokens, pool.pages, window).longest >= max_model_len
    less = "" if fits else f", less than one sequence of {max_model_len:,}"
    phase(pool.describe() + less)
    draft, draft_bytes = None, 0
    if start.draft_model and draft_config:
        before = resident()
        draft, line = load_draft(start.draft_model, draft_config, config, device, dtype, pool)
        draft_bytes = max(resident() - before, 0)
        phase(line)

    close_files()
    memory.give_back_freed()
    settings = EngineSettings(
        total_pages=pool.pages,
        page_tokens=pool.page_tokens,
        max_model_len=max_model_len,
        eos_token_ids=config.eos_token_ids,
        max_queued=start.max_queued,
        vocab_size=config.vocab_size,
        page_bytes=pool.page_tokens * token_bytes,
        model=start.model,
        seed=start.seed,
        prefill_tokens_per_second=_warm_up(runner, pool),
        kv=runner.kv,
        weights=LoadedWeights(int8, obstacle),
        layer_windows=config.layer_windows,
    )
    engine = Engine(runner, settings, message, draft=draft)
    phase(f"warm-up: prefill {settings.prefill_tokens_per_second:,.0f} tokens/s")
    grammars = Grammars(config.vocab_size, config.eos_token_ids)
    accounting = memory.Accounting(libraries_bytes, weight_bytes(model), pool.bytes, draft_bytes)
    return Loaded(
        engine,
        grammars,
        max_model_len,
        pool,
        str(device),
        dtype_name,
        config.architecture,
        lambda: accounting.to_json(resident()),
        window.tokens if window is not None else 0,
    )


def _max_model_len(asked: int | None, config: ModelConfig) -> int:
    if asked is not None and asked > config.max_length:
        raise UserError(
            f"--max-model-len {asked} is more than the {config.max_length} tokens the model was made for; "
            f"give {config.max_length} or less"
        )
    return asked or config.max_length


def _must_be_there(device_type: str, kv_bytes: int) -> None:
    """Raises PoolError. On CUDA the allocator itself refuses what is not there."""
    if device_type == "cpu":
        memory.must_be_there(kv_bytes, memory.available_bytes())


def _auto_kv_bytes(device_type: str, token_bytes: int, max_model_len: int) -> int:
    if device_type == "cpu":
        return memory.cpu_pool_bytes(memory.available_bytes(), token_bytes, max_model_len)
    import torch

    return memory.cuda_pool_bytes(torch.cuda.mem_get_info()[0])


def _warm_up(runner: ModelRunner, pool: memory.Pool) -> float:
    """Prefill and decode on free pages, so that the first request does not pay for first calls.

    Returns the prompt tokens per second of a prefill that is warm.
    """
    from firsttoken_runtime.model.runner import Chunk

    length = min(_WARM_UP_TOKENS, pool.tokens - 1)
    pages = list(range(-(-(length + 1) // pool.page_tokens)))
    prefill = [Chunk(token_ids=[0] * length, start=0, pages=pages, logits=1)]
    runner.run(prefill)
    runner.run([Chunk(token_ids=[0], start=length, pages=pages, logits=1)])
    begin = time.monotonic()
    # Reading a number waits for the device.
    runner.run(prefill)[0, 0].item()
    return length / (time.monotonic() - begin)


def die_with_parent() -> None:
    """Ask Linux to end this process with its parent, also after `kill -9`; elsewhere the socket tells."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main(arguments: list[str] | None = None) -> int:
    """Run the engine process; returns the exit status."""
    parser = argparse.ArgumentParser(description="The engine process; `firsttoken serve` starts it.")
    parser.add_argument("--fd", type=int, required=True, help="the inherited end of the socket pair")
    parser.add_argument("--started-ns", type=int, help="monotonic clock when this process was started")
    parser.add_argument("--parent", type=int, required=True, help="process id of the API process")
    options = parser.parse_args(arguments)
    faulthandler.enable()
    die_with_parent()
    if os.getppid() != options.parent:
        return EXIT_INTERNAL  # it ended before we could ask
    channel = ipc.Channel(socket.socket(fileno=options.fd))
    try:
        return _serve(channel, options.started_ns)
    except ipc.ChannelClosed:
        return EXIT_INTERNAL


def _serve(channel: ipc.Channel, started_ns: int | None) -> int:
    from firsttoken_runtime.model.errors import ModelError

    try:
        start = _first_command(channel)
        message = parse_message(start.switches, ignore_unknown=True)
        log_unknown(message)
        mark = started_ns / 1e9 if started_ns is not None else time.monotonic()

        def phase(text: str) -> None:
            nonlocal mark
            now = time.monotonic()
            channel.send(ipc.Phase(text, now - mark))
            mark = now

        loaded = load(start, message, phase)
        loop = EngineLoop(
            channel, loaded.engine, message, grammars=loaded.grammars, memory_used=loaded.memory_used
        )
        channel.send(_ready(loaded, loop.state()))
        # The model and the libraries live as long as the process: no collection need look at them.
        gc.collect()
        gc.freeze()
        loop.run()
    except (UserError, ModelError, QuantityError, memory.PoolError) as error:
        return _fail(channel, str(error), user_error=True)
    except MemoryError:
        return _fail(channel, "out of memory; give the process more, or a smaller model or pool", True)
    except ipc.ChannelClosed:
        raise
    except Exception as error:
        traceback.print_exc()
        out_of_memory = type(error).__name__ == "OutOfMemoryError"
        line = " ".join(f"{type(error).__name__}: {error}".split())
        return _fail(channel, f"the engine failed: {line}"[:500], user_error=out_of_memory)
    return 0


def _first_command(channel: ipc.Channel) -> ipc.Start:
    while True:
        for command in channel.receive(60.0):
            if isinstance(command, ipc.Start):
                return command
            raise RuntimeError(f"expected Start first, not {type(command).__name__}")


def _ready(loaded: Loaded, state: dict[str, Any]) -> ipc.Ready:
    return ipc.Ready(
        max_model_len=loaded.max_model_len,
        page_tokens=loaded.pool.page_tokens,
        total_pages=loaded.pool.pages,
        kv_bytes=loaded.pool.bytes,
        device=loaded.device,
        dtype=loaded.dtype,
        architecture=loaded.architecture,
        state=state,
        stats=loaded.engine.stats(),
        window=loaded.window,
    )


def _fail(channel: ipc.Channel, line: str, user_error: bool) -> int:
    channel.send(ipc.Failed(line, user_error))
    channel.drain(5.0)
    return EXIT_USER_ERROR if user_error else EXIT_INTERNAL


if __name__ == "__main__":
    sys.exit(main())
