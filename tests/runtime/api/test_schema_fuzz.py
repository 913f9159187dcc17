"""Whatever the OpenAPI schema lets a caller send, to either port: an answer in words, and never a 5xx."""

from __future__ import annotations

import asyncio
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

EXAMPLES = 25
ADMIN_TOKEN = "open-sesame"
# Says itself that it is not in this build.
NOT_BUILT = {("POST", "/admin/v1/profile"): 501}


def fuzz(schema: dict[str, Any], url: str, headers: dict[str, str]) -> list[str]:
    """Calls every operation; returns what went wrong."""
    problems: list[str] = []
    for result in schemathesis.openapi.from_dict(schema).get_all_operations():
        operation = result.ok()

        @seed(20260101)
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            verbosity=Verbosity.quiet,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def check(case: schemathesis.Case) -> None:
            if isinstance(case.body, dict):
                case.body.pop("model", None)  # any other name is 404 before the rest is looked at
            response = case.call(base_url=url, headers=headers, timeout=10)
            name = (case.operation.method.upper(), case.operation.path)
            if response.status_code >= 500 and NOT_BUILT.get(name) != response.status_code:
                problems.append(
                    f"{name}: {response.status_code} {response.text[:300]} for {case.body!r:.500}"
                )
            elif response.status_code >= 400:
                error = response.json()["error"]
                if not error["message"] or set(error) != {"message", "type", "param", "code"}:
                    problems.append(f"{name}: {error} is no error in the OpenAI shape")

        check()
    return problems


async def test_no_request_that_the_schema_allows_makes_an_error_of_ours(server):
    url = str(server.http.base_url)
    schema = (await server.http.get("/openapi.json")).json()
    described = schema["components"]["schemas"]
    assert {"ChatRequest", "CompletionRequest", "TokenizeRequest", "DetokenizeRequest"} <= set(described)
    assert await asyncio.to_thread(fuzz, schema, url, {}) == []
    assert (await server.http.get("/health")).status_code == 200


async def test_the_admin_port_too(server):
    url = str(server.admin.base_url)
    schema = (await server.admin.get("/openapi.json")).json()
    assert len(schema["paths"]) >= 6
    assert await asyncio.to_thread(fuzz, schema, url, {"authorization": f"Bearer {ADMIN_TOKEN}"}) == []
    assert (await server.http.get("/health")).status_code == 200
