"""Field types of the contract whose rules are said in words by the API server as well as by pydantic.

The API server reports a broken `pattern` as a regular expression. These types carry a CEL rule instead, whose
message says what to write; the pydantic side checks the same with the parsers of `quantity.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, WithJsonSchema

from firsttoken_api.quantity import check_bytes, check_duration, check_memory_cap


@dataclass(frozen=True)
class Rule:
    """One CEL rule (`x-kubernetes-validations`).

    message_expression, when given, is a CEL expression for the text; `message` is shown when it fails.
    field: the field the error is reported at, relative to the object that carries the rule (`.chunkSize`).
    """

    rule: str
    message: str
    message_expression: str | None = None
    field: str | None = None

    def to_json(self) -> dict[str, str]:
        found = {
            "rule": self.rule,
            "message": self.message,
            "messageExpression": self.message_expression,
            "fieldPath": self.field,
        }
        return {key: value for key, value in found.items() if value is not None}


def rules(*given: Rule) -> dict[str, Any]:
    """The JSON schema extension that carries the rules, for `json_schema_extra` or WithJsonSchema."""
    return {"x-kubernetes-validations": [rule.to_json() for rule in given]}


INT_OR_STRING: dict[str, Any] = {
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    "x-kubernetes-int-or-string": True,
}
DURATION_PATTERN = r"^[0-9]{1,6}([.][0-9]{1,3})?(ms|s|m)$"
_POSITIVE_QUANTITY = "(isQuantity(self) && quantity(self).isGreaterThan(quantity('0')))"

Auto = Literal["auto"]

# Bytes, as a Kubernetes quantity.
Bytes = Annotated[
    int | str,
    AfterValidator(check_bytes),
    WithJsonSchema(
        {
            **INT_OR_STRING,
            "maxLength": 24,
            **rules(
                Rule(
                    f"type(self) == int ? self > 0 : {_POSITIVE_QUANTITY}",
                    "write a size above zero, such as 512Mi or 2Gi",
                )
            ),
        }
    ),
]

# Bytes, or a per cent of the KV pool.
Memory = Annotated[
    int | str,
    AfterValidator(check_memory_cap),
    WithJsonSchema(
        {
            **INT_OR_STRING,
            "maxLength": 24,
            **rules(
                Rule(
                    "type(self) == int ? self > 0 : (self.endsWith('%') ? "
                    f"self.matches('^(100|[1-9][0-9]?)%$') : {_POSITIVE_QUANTITY})",
                    "write a size above zero such as 256Mi, or a per cent of the KV pool from 1% to 100%; "
                    "to have none, set enabled: false",
                )
            ),
        }
    ),
]

# A time above zero.
Duration = Annotated[
    str,
    AfterValidator(check_duration),
    WithJsonSchema(
        {
            "type": "string",
            "maxLength": 16,
            **rules(
                Rule(
                    f"self.matches('{DURATION_PATTERN}') && duration(self) > duration('0s')",
                    "write a duration above zero, such as 500ms or 2s",
                )
            ),
        }
    ),
]

# Any Kubernetes quantity (resources of a container).
ResourceQuantity = Annotated[int | str, WithJsonSchema({**INT_OR_STRING, "maxLength": 32})]
