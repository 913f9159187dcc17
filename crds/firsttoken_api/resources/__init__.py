"""The custom resources of group firsttoken.dev as pydantic models, and their CRDs.

inference_service.py  what a user asks for      inference_service_status.py  what the operator answers
kill_switch.py        the global kill switch    crd.py  structural schema and CRD manifests from the models
"""

from firsttoken_api.resources.base import GROUP, VERSION, Condition, Metadata
from firsttoken_api.resources.inference_service import InferenceService
from firsttoken_api.resources.inference_service_status import InferenceServiceStatus
from firsttoken_api.resources.kill_switch import KillSwitch, KillSwitchStatus

__all__ = [
    "GROUP",
    "VERSION",
    "Condition",
    "InferenceService",
    "InferenceServiceStatus",
    "KillSwitch",
    "KillSwitchStatus",
    "Metadata",
]
