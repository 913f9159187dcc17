"""`firsttoken serve`: what can be checked at once is checked here, then the engine process starts, then HTTP.

Imports little: the engine process is on its way before the web framework is loaded.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from urllib.parse import unquote, urlsplit

from firsttoken_api.switches import SwitchError, SwitchMessage
from firsttoken_runtime import memory
from firsttoken_runtime.ipc import Start
from firsttoken_runtime.switches import default_message, parse_text

EXIT_USER_ERROR = 2
EXIT_INTERNAL = 1
TERMINATION_LOG_VARIABLE = "FIRSTTOKEN_TERMINATION_LOG"
_TERMINATION_LOG = "/dev/termination-log"
log = logging.getLogger("firsttoken")


@dataclass(frozen=True)
class ServeOptions:
    """The command line of `firsttoken serve`; see its --help for the meaning and the units."""

    model: str
    served_name: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    chat_template: Path | None = None
    seed: int = 0
    threads: int | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    admin_host: str | None = None
    admin_port: int = 8001
    admin_token_file: Path | None = None
    switches: Path | None = None
    drain_timeout_seconds: float = 30.0
    kv_memory: str = "auto"
    page_tokens: int = 16
    max_queued: int = 1024
    draft_model: str | None = None
    max_body_bytes: int = 8 << 20
    otlp_endpoint: str | None = None


class ServeError(Exception):
    """The server cannot start, or go on; the text is the one line to show."""

    def __init__(self, line: str, status: int = EXIT_USER_ERROR) -> None:
        super().__init__(line)
        self.status = status


@dataclass(frozen=True)
class Plan:
    """The options with everything looked up that can be before anything starts."""

    options: ServeOptions
    model: str
    served_name: str
    chat_template: str | None
    message: SwitchMessage
    threads: int
    admin_token_file: Path
    version: str
    draft_model: str | None = None

    def start(self) -> Start:
        """The engine's first command."""
        options = self.options
        return Start(
            model=self.model,
            device=options.device,
            dtype=options.dtype,
            kv_memory=options.kv_memory,
            page_tokens=options.page_tokens,
            switches=self.message.to_json(),
            max_model_len=options.max_model_len,
            threads=self.threads,
            seed=options.seed,
            max_queued=options.max_queued,
            draft_model=self.draft_model,
        )


def run(options: ServeOptions) -> int:
    """Serve until told to stop. Returns 0 after a drain, 2 for what the user can put right, or 1."""
    started_at = time.monotonic()
    _log_to_stderr()
    # Until the server listens to signals itself: as process 1 of a container SIGTERM would do nothing.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    with contextlib.ExitStack() as stack:
        try:
            token_file = options.admin_token_file
            if token_file is None:
                private = stack.enter_context(tempfile.TemporaryDirectory(prefix="firsttoken-"))
                token_file = new_token_file(Path(private))
            plan = make_plan(options, token_file)
            admin_host = options.admin_host or options.host
            with bind(options.host, options.port) as port, bind(admin_host, options.admin_port) as admin_port:
                return _serve(plan, port, admin_port, started_at)
        except ServeError as error:
            _last_words(f"error: {error}")
            return error.status


def make_plan(options: ServeOptions, admin_token_file: Path) -> Plan:
    """Check the options against the machine. Raises ServeError."""
    if not _read(admin_token_file, "--admin-token-file").strip():
        raise ServeError(f"--admin-token-file {admin_token_file}: the file is empty; write a token into it")
    model = model_path(options.model)
    name = Path(model).name
    return Plan(
        options=options,
        model=model,
        served_name=options.served_name or name.removesuffix(".gguf"),
        chat_template=_read(options.chat_template, "--chat-template") if options.chat_template else None,
        message=_first_message(options.switches),
        threads=options.threads or memory.cpu_count(),
        admin_token_file=admin_token_file,
        version=version("firsttoken"),
        draft_model=model_path(options.draft_model, "--draft-model") if options.draft_model else None,
    )


def model_path(uri: str, option: str = "--model") -> str:
    """The absolute path a model argument stands for: a path, or file://. Raises ServeError."""
    parts = urlsplit(uri) if "://" in uri else urlsplit("")
    if parts.scheme not in ("", "file"):
        raise ServeError(
            f"{option} {uri}: {parts.scheme}:// is not in this build; give a folder or a .gguf file"
        )
    if parts.netloc:
        raise ServeError(f"{option} {uri}: write three slashes before the path, as in file:///models/name")
    path = Path(unquote(parts.path) if parts.scheme else uri).expanduser()
    if not path.exists():
        raise ServeError(f"{option} {path}: no such file or folder")
    return str(path.resolve())


def _first_message(path: Path | None) -> SwitchMessage:
    """The switches to come up with. A file that cannot be read is an error: defaults might switch on what was
    taken back."""
    if path is None:
        return default_message()
    try:
        return parse_text(_read(path, "--switches"))
    except SwitchError as error:
        raise ServeError(f"--switches {path}: {error}") from None


def _read(path: Path, option: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ServeError(f"{option} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ServeError(f"{option} {path}: not UTF-8 text") from None


def new_token_file(directory: Path) -> Path:
    """A file with a random token that only its owner can read."""
    path = directory / "admin-token"
    path.touch(mode=0o600)
    path.write_text(secrets.token_urlsafe(32) + "\n")
    return path


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not yet listening. Raises ServeError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ServeError(f"--host {host}: {error.strerror}") from None
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Inherited by every connection. Without it the first chunk waits for the acknowledgement of the headers,
    # which the other side delays by 40 ms.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        sock.bind(address)
        # Bound twice with SO_REUSEADDR would only fail when listening, after the model is loaded.
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise ServeError(
            f"cannot listen on {host} port {port}: {(error.strerror or '').lower()}; "
            "choose others with --host, --port and --admin-port"
        ) from None
    return sock


def _serve(plan: Plan, port: socket.socket, admin_port: socket.socket, started_at: float) -> int:
    log.info("firsttoken %s: %s as %r", plan.version, plan.model, plan.served_name)
    ours, theirs = socket.socketpair()
    with ours:
        process = spawn_engine(theirs, plan.threads)
        theirs.close()
        try:
            import asyncio

            import uvloop

            from firsttoken_runtime.api.server import Server

            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                server = Server(plan, ours, port, admin_port, process, started_at)
                return runner.run(server.run())
        finally:
            end_process(process, 2.0)


# Activations stay in the heap between operators instead of being mapped, cleared page by page and unmapped
# by each: 9,700 page faults per prefill of 512 tokens became none. And the heap, which holds the weights,
# lies in huge pages where the kernel grants them on request: reading memory became 1.6 times as fast, and a
# decode step in float32 takes 0.8 of the time. Another C library pays no attention.
_GLIBC_TUNABLES = ":".join(
    f"glibc.malloc.{name}={value}"
    for name, value in {
        "hugetlb": 1,
        "mmap_threshold": 32 << 20,
        "trim_threshold": 4 << 30,
        "top_pad": 64 << 20,
    }.items()
)


def spawn_engine(sock: socket.socket, threads: int) -> subprocess.Popen[bytes]:
    """Start the engine process on its end of the socket pair, in a session of its own: Ctrl-C is ours."""
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # Threads that spin at every barrier are fine alone on a machine. Beside anyone else, the API process
        # included, they spin while the thread they wait for has no core: prefill was five times slower so.
        "OMP_WAIT_POLICY": "PASSIVE",
        "GLIBC_TUNABLES": _GLIBC_TUNABLES,
    }
    module = "firsttoken_runtime.engine.process"
    command = [sys.executable, "-m", module, "--fd", str(sock.fileno()), "--parent", str(os.getpid())]
    command += ["--started-ns", str(time.monotonic_ns())]
    return subprocess.Popen(
        command,
        pass_fds=[sock.fileno()],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        env={**environment, **os.environ, "TOKENIZERS_PARALLELISM": "false"},
    )


def end_process(process: subprocess.Popen[bytes], timeout_seconds: float) -> int:
    """Wait for the process, kill it after the timeout; returns its exit status."""
    try:
        return process.wait(timeout_seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def ended_line(status: int) -> str:
    """How a process ended that said nothing itself."""
    if status >= 0:
        return f"the engine process ended with status {status}"
    name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
    hint = "; perhaps the machine or the container is out of memory" if -status == signal.SIGKILL else ""
    return f"the engine process was ended by {name}{hint}"


def _last_words(line: str) -> None:
    """One line to stderr and to where Kubernetes reads why a container ended."""
    print(line, file=sys.stderr, flush=True)
    path = os.environ.get(TERMINATION_LOG_VARIABLE) or _TERMINATION_LOG
    if TERMINATION_LOG_VARIABLE not in os.environ and not os.access(path, os.W_OK):
        return
    try:
        Path(path).write_text(line + "\n")
    except OSError as error:
        log.warning("%s cannot be written: %s", path, error.strerror)


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s.%(msecs)03d %(message)s", datefmt="%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    log.setLevel(logging.INFO)
