"""The ConfigMap that carries a service's switches into its pods."""

from __future__ import annotations

import json

from firsttoken_api.resources import InferenceService
from firsttoken_api.switches import MOST_GENERATION, SwitchError, SwitchMessage, parse_message
from firsttoken_operator.cluster import CONFIG_MAP, Body
from firsttoken_operator.desired.names import manifest, switches_name

SWITCHES_KEY = "switches.json"


def switches_text(message: SwitchMessage) -> str:
    """The file as the pods read it; indented, because people read it too."""
    return json.dumps(message.to_json(), indent=2) + "\n"


def switches_config_map(owner: InferenceService, message: SwitchMessage) -> Body:
    name = switches_name(owner.metadata.name)
    return manifest(owner, CONFIG_MAP, name, {"data": {SWITCHES_KEY: switches_text(message)}})


def read_switches(config_map: Body | None) -> SwitchMessage | None:
    """The message in the ConfigMap; None when there is none, or when somebody made it unreadable."""
    text = ((config_map or {}).get("data") or {}).get(SWITCHES_KEY)
    try:
        return parse_message(json.loads(text)) if text else None
    except (ValueError, SwitchError):
        return None


def written_generation(config_map: Body | None) -> int:
    """The generation in the ConfigMap, even where the rest of it cannot be read; 0 when there is none."""
    text = ((config_map or {}).get("data") or {}).get(SWITCHES_KEY)
    try:
        generation = json.loads(text)["generation"] if text else 0
    except (ValueError, KeyError, TypeError):
        return 0
    return generation if isinstance(generation, int) and 0 <= generation < MOST_GENERATION else 0
