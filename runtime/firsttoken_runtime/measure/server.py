"""What a server says of itself: its models, its longest context, its token counts, its admin port."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx

from firsttoken_runtime.measure.client import BenchError


@dataclass(frozen=True)
class ServedModel:
    """name: what requests ask for. max_tokens: of prompt and answer together, None where it is not said."""

    name: str
    max_tokens: int | None = None


async def served_model(client: httpx.AsyncClient, wanted: str | None = None) -> ServedModel:
    """The model to ask for: `wanted`, or the first that is served.

    Raises BenchError when the server does not answer, wants a key, or does not serve `wanted`.
    """
    url = client.base_url
    try:
        response = await client.get("/v1/models")
    except httpx.TimeoutException:
        raise BenchError(f"no answer from {url} in time: is a server listening there? (--url)") from None
    except httpx.HTTPError as error:
        why = str(error) or type(error).__name__
        raise BenchError(f"cannot reach {url}: {why}; start the server or set --url") from None
    if response.status_code in (401, 403):
        raise BenchError(
            f"{url} wants an API key (HTTP {response.status_code}): use --api-key-file or --api-key-env"
        )
    try:
        entries = response.raise_for_status().json()["data"]
        models = {str(entry["id"]): ServedModel(str(entry["id"]), _limit(entry)) for entry in entries}
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        if wanted is not None:  # not every server lists its models; the first request will tell
            return ServedModel(wanted)
        raise BenchError(
            f"{url}/v1/models does not list models (HTTP {response.status_code}): is this an OpenAI-"
            "compatible server? If it is, name the model with --model"
        ) from None
    if wanted is None:
        if not models:
            raise BenchError(f"{url} serves no model yet; wait until it is ready, or set --model")
        return next(iter(models.values()))
    if wanted not in models:
        raise BenchError(
            f"{url} does not serve {wanted!r}; it serves {', '.join(sorted(models)) or 'nothing'}"
        )
    return models[wanted]


def _limit(entry: dict[str, Any]) -> int | None:
    """The context length as firsttoken and vLLM say it, or as llama.cpp does."""
    meta = entry.get("meta") or {}
    found = entry.get("max_model_len") or meta.get("n_ctx") or meta.get("n_ctx_train")
    return found if isinstance(found, int) else None


class TokenCounter:
    """Counts tokens with the server's own tokenizer, where it offers one (`POST /tokenize`)."""

    def __init__(self, client: httpx.AsyncClient, model: str) -> None:
        self._client = client
        self._model = model
        self._works: bool | None = None

    async def count(self, text: str) -> int | None:
        """Tokens of `text`, special ones included; None when the server has no such route."""
        if self._works is False:
            return None
        # `prompt` is what firsttoken and vLLM read, `content` what llama.cpp does.
        asked = {"model": self._model, "prompt": text, "content": text, "add_special": True}
        found: int | None = None
        for body in (asked, {"model": self._model, "prompt": text}):
            try:
                response = await self._client.post("/tokenize", json=body)
                answer = response.raise_for_status().json()
                found = int(answer["count"]) if "count" in answer else len(answer["tokens"])
                break
            except (httpx.HTTPError, ValueError, KeyError, TypeError):
                continue
        self._works = found is not None
        return found


class Admin:
    """firsttoken's admin port, as far as a benchmark needs it."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def state(self) -> dict[str, Any]:
        response = await self._client.get("/admin/v1/state")
        response.raise_for_status()
        state: dict[str, Any] = response.json()
        return state

    async def set(self, changes: dict[str, dict[str, Any]]) -> None:
        """Set the switches in `changes`; all others stay as they are now."""
        state = await self.state()
        switches = {
            entry["name"]: {
                "enabled": entry["state"] in ("on", "inactive"),
                **({"cause": entry["state"]} if entry["state"] in ("rolledBack", "killed") else {}),
                **entry["parameters"],
            }
            for entry in state["switches"]
        }
        for name, change in changes.items():
            switches[name] = {**switches[name], **change}
            switches[name].pop("cause", None)
        await self.put(state["generation"] + 1, switches)

    async def put(self, generation: int, switches: dict[str, Any]) -> None:
        body = {"generation": generation, "switches": switches}
        response = await self._client.put("/admin/v1/switches", json=body)
        response.raise_for_status()
