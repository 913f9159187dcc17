"""What `firsttoken bench` was asked to do, checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from firsttoken_runtime.measure.client import BenchError
from firsttoken_runtime.measure.lengths import parse_lengths
from firsttoken_runtime.measure.plan import Cache, Load
from firsttoken_runtime.measure.scenarios import SCENARIOS
from firsttoken_runtime.measure.summary import Slo
from firsttoken_runtime.measure.target import Address
from firsttoken_runtime.measure.traces import read_trace


@dataclass(frozen=True)
class BenchOptions:
    """The command line. Without `rates`, `trace` and `concurrencies` the scenarios run: those named, or all.

    admin_url, admin_token_file: firsttoken's admin port, to record the switches and compare with one on and
    off. prompt_tokens, output_tokens: distributions (see `lengths`). lengths: a file to draw both from
    instead. pid: the server's process, else it is found by its port. compare: two reports, and nothing is
    measured.
    """

    url: str = "http://127.0.0.1:8000"
    model: str | None = None
    chat: bool = False
    api_key_file: Path | None = None
    api_key_env: str | None = None
    admin_url: str | None = None
    admin_token_file: Path | None = None
    scenarios: tuple[str, ...] = ()
    rates: tuple[float, ...] = ()
    concurrencies: tuple[int, ...] = ()
    trace: Path | None = None
    rate_scale: float = 1.0
    requests: int = 50
    duration_seconds: float | None = None
    rounds: int = 5
    warm_up: int = 3
    prompt_tokens: str = "512"
    output_tokens: str = "64"
    lengths: Path | None = None
    cache: str = "cold"
    prefixes: int = 1
    prefix_tokens: int = 256
    ignore_eos: bool = True
    seed: int = 0
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    slo_e2e_ms: float | None = None
    timeout_seconds: float = 600.0
    pid: int | None = None
    json: bool = False
    output: Path | None = None
    compare: tuple[Path, Path] | None = None

    @property
    def slo(self) -> Slo:
        return Slo(self.slo_ttft_ms, self.slo_tpot_ms, self.slo_e2e_ms)

    @property
    def address(self) -> Address:
        return Address(
            self.url,
            self.model,
            self.chat,
            self.ignore_eos,
            self.api_key_file,
            self.api_key_env,
            self.timeout_seconds,
        )

    def loads(self) -> dict[str, Load]:
        """The loads by name, none when scenarios are to run. Raises BenchError when options contradict."""
        kinds = [bool(self.rates), bool(self.concurrencies), self.trace is not None]
        if sum(kinds) > 1:
            raise BenchError(
                "--rate, --trace (open loop) and --concurrency (closed loop) are different loads: run one "
                "after the other"
            )
        if self.scenarios and any(kinds):
            raise BenchError("use --scenario without --rate, --trace and --concurrency")
        if self.rate_scale != 1.0 and self.trace is None:
            raise BenchError("--rate-scale needs --trace")
        if not any(kinds):
            return {}
        found: dict[str, Load] = {}
        for rate in self.rates:
            found[f"Poisson {rate:g}/s"] = self._load(rate=rate)
        for callers in self.concurrencies:
            found[f"closed loop {callers}"] = self._load(concurrency=callers)
        if self.trace is not None:
            name = f"trace {self.trace.stem} x{self.rate_scale:g}"
            found[name] = self._load(trace=self.trace, rate_scale=self.rate_scale)
        return found

    def _load(
        self,
        rate: float | None = None,
        concurrency: int | None = None,
        trace: Path | None = None,
        rate_scale: float = 1.0,
    ) -> Load:
        return Load(
            rate=rate,
            trace=() if trace is None else tuple(read_trace(trace)),
            rate_scale=rate_scale,
            concurrency=concurrency,
            requests=self.requests,
            duration_seconds=self.duration_seconds,
            prompt_tokens=parse_lengths(self.prompt_tokens),
            output_tokens=parse_lengths(self.output_tokens),
            rows=() if self.lengths is None else tuple(read_trace(self.lengths)),
            cache=Cache(self.cache),
            prefixes=self.prefixes,
            prefix_tokens=self.prefix_tokens,
        )

    def scenario_names(self) -> tuple[str, ...]:
        """Raises BenchError when one is not known."""
        unknown = sorted(set(self.scenarios) - set(SCENARIOS))
        if unknown:
            raise BenchError(f"unknown scenario {', '.join(unknown)}; use {', '.join(SCENARIOS)}")
        return self.scenarios or tuple(SCENARIOS)

    def admin_token(self) -> str | None:
        """Raises BenchError when the admin port is named and its token cannot be read."""
        if self.admin_url is None:
            return None
        if self.admin_token_file is None:
            raise BenchError("--admin-url needs --admin-token-file")
        try:
            return self.admin_token_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise BenchError(f"the token file {self.admin_token_file} cannot be read: {error}") from None
