"""InferenceService: one model, served; what a user asks for.

Descriptions are what `kubectl explain` prints, and rules are what the API server answers to a bad input: both
are written for the person at the terminal.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from firsttoken_api.fields import DURATION_PATTERN, Bytes, Duration, Rule, rules
from firsttoken_api.optimizations import NAMES
from firsttoken_api.resources.base import ApiModel, Metadata, ObjectName
from firsttoken_api.resources.inference_service_status import InferenceServiceStatus
from firsttoken_api.resources.optimizations_spec import Optimizations, rollback_schema
from firsttoken_api.resources.pod_template import PodTemplate


class KeyRef(ApiModel):
    """One key of a Secret or ConfigMap in the same namespace."""

    name: ObjectName = Field(description="Name of the object, in the namespace of the InferenceService.")
    key: Annotated[str, Field(min_length=1, max_length=253)] = Field(description="Key inside the object.")


class TokenSecretRef(KeyRef):
    key: Annotated[str, Field(min_length=1, max_length=253)] = Field(
        default="token", description="Key inside the Secret. Default: token."
    )


class Model(ApiModel):
    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "!has(self.revision) || self.uri.startsWith('hf://') || self.uri.startsWith('oci://')",
                "revision goes with hf:// and oci://; for file:// and pvc:// put the version in the path",
                field=".revision",
            ),
            Rule(
                "!has(self.tokenSecretRef) || self.uri.startsWith('hf://') || self.uri.startsWith('oci://')",
                "tokenSecretRef goes with hf:// and oci://; file:// and pvc:// need no token",
                field=".tokenSecretRef",
            ),
        )
    )

    uri: str = Field(
        min_length=1,
        max_length=1024,
        description="Where the weights are: file:///path/in/the/runtime/image, pvc://claim/path (mounted "
        "read-only), hf://org/name (Hugging Face Hub) or oci://registry/image. A GGUF file or a folder in "
        "Hugging Face layout (config.json, *.safetensors, tokenizer.json).",
        json_schema_extra=rules(
            Rule(
                "self.matches('^(hf|pvc|oci|file)://.')",
                "write where the model is: file:///path/in/image, pvc://claim/path, hf://org/name or "
                "oci://registry/image",
            ),
            Rule(
                "!self.startsWith('file://') || self.startsWith('file:///')",
                "a file:// uri needs an absolute path, with three slashes: file:///models/name",
            ),
            Rule(
                "!self.startsWith('pvc://') || self.matches('^pvc://[a-z0-9][-a-z0-9.]*(/.*)?$')",
                "write pvc://CLAIM/path, with the name of a PersistentVolumeClaim in the same namespace",
            ),
            Rule(
                "!self.startsWith('hf://') || self.matches('^hf://[^/]+/[^/]+$')",
                "write hf://ORG/NAME; the revision goes into spec.model.revision",
            ),
            Rule(
                "!self.matches('(^|/)[.][.](/|$)')",
                "write the path without '..'",
            ),
        ),
    )
    revision: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        default=None, description="Branch, tag, commit (hf://) or digest (oci://). Default: the newest."
    )
    token_secret_ref: TokenSecretRef | None = Field(
        default=None, description="Secret with the access token of a gated or private model."
    )
    served_name: Annotated[str, Field(min_length=1, max_length=253)] | None = Field(
        default=None,
        description="The name clients ask for (`model` in a request). Default: the last part of the uri "
        "without its file ending.",
    )
    max_length: Annotated[int, Field(ge=16, le=10_485_760)] | None = Field(
        default=None,
        description="Most tokens of prompt and answer together. Default: what the model was trained for. "
        "Less means smaller KV cache per request. A change restarts the pods.",
    )
    chat_template_ref: KeyRef | None = Field(
        default=None,
        description="ConfigMap key with a Jinja chat template, where the model brings none or a wrong one. A "
        "change restarts the pods.",
    )


class Accelerator(ApiModel):
    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "self.type != 'cpu' || self.count == 1",
                "leave count out with type cpu; set spec.template.resources for more cores",
                field=".count",
            )
        )
    )

    type: Annotated[str, Field(min_length=1, max_length=63)] = Field(
        description="GPU type from the operator's catalogue (Helm value `accelerators`), such as "
        "nvidia-h100-80gb, or cpu.",
        json_schema_extra=rules(
            Rule(
                "self.matches('^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$')",
                "write a type from the operator's catalogue in lower case, such as nvidia-h100-80gb, or cpu",
            )
        ),
    )
    count: Annotated[int, Field(ge=1, le=64)] = Field(
        default=1, description="GPUs of one replica. Default: 1."
    )


class Autoscaling(ApiModel):
    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "self.minReplicas <= self.maxReplicas",
                "minReplicas is above maxReplicas: lower the one or raise the other",
                field=".minReplicas",
            )
        )
    )

    min_replicas: Annotated[int, Field(ge=1, le=1000)] = Field(
        default=1, description="Fewest replicas. Default: 1."
    )
    max_replicas: Annotated[int, Field(ge=1, le=1000)] = Field(description="Most replicas.")
    target_waiting_requests: Annotated[int, Field(ge=1, le=10_000)] = Field(
        default=4, description="Waiting requests per replica that scaling aims at. Default: 4."
    )


def _in_order(lower: str, upper: str) -> Rule:
    """`lower` is at most `upper`; silent while one of them is no duration, which has a rule of its own."""
    readable = " && ".join(f"self.{name}.matches('{DURATION_PATTERN}')" for name in (lower, upper))
    return Rule(
        f"!(has(self.{lower}) && has(self.{upper})) || !({readable}) || "
        f"duration(self.{lower}) <= duration(self.{upper})",
        f"{lower} is above {upper}",
        message_expression=f"'{lower} ' + self.{lower} + ' is above {upper} ' + self.{upper} + "
        f"': {lower} can be at most {upper}'",
        field=f".{lower}",
    )


class TtftTargets(ApiModel):
    model_config = ConfigDict(
        json_schema_extra=rules(_in_order("p50", "p95"), _in_order("p95", "p99"), _in_order("p50", "p99"))
    )

    p50: Duration | None = Field(default=None, description="Half of the requests, such as 500ms.")
    p95: Duration | None = Field(default=None, description="95 of 100 requests, such as 1.5s.")
    p99: Duration | None = Field(default=None, description="99 of 100 requests, such as 2s.")


class Slo(ApiModel):
    ttft: TtftTargets | None = Field(
        default=None,
        description="Targets for time to first token, from the server receiving the request to the caller "
        "receiving the first token. Usual for chat: p50 300-800ms, p95 1-2s, p99 2-3s.",
    )


class KvCache(ApiModel):
    memory: Bytes | None = Field(
        default=None,
        description="Memory for the KV cache of one replica, such as 8Gi. Default: 85% of "
        "what the weights leave on a GPU; on CPU 30%, and no more than four sequences of full length need. A "
        "change restarts the pods.",
    )


class Rollout(ApiModel):
    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "self.strategy == 'Recreate' || self.maxSurge + self.maxUnavailable > 0",
                "maxSurge and maxUnavailable are both 0, so no pod could ever be replaced: set one of them "
                "to 1",
                field=".maxUnavailable",
            )
        )
    )

    strategy: Literal["RollingUpdate", "Recreate"] = Field(
        default="RollingUpdate",
        description="RollingUpdate replaces pods one after the other, Recreate stops all of them first. "
        "Default: RollingUpdate.",
    )
    max_surge: Annotated[int, Field(ge=0, le=1000)] = Field(
        default=0,
        description="Pods above the wanted number during a RollingUpdate. Default: 0, because the new pod "
        "would wait for a GPU that the old one holds; 1 where a GPU is spare.",
    )
    max_unavailable: Annotated[int, Field(ge=0, le=1000)] = Field(
        default=1, description="Pods that may be missing during a RollingUpdate. Default: 1."
    )
    drain_timeout_seconds: Annotated[int, Field(ge=0, le=3600)] = Field(
        default=60,
        description="How long a pod that is asked to stop may finish the answers it is giving. Default: 60.",
    )


class InferenceServiceSpec(ApiModel):
    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "!has(self.autoscaling) || self.replicas == 1",
                "replicas and autoscaling are both set: remove spec.replicas, or remove spec.autoscaling",
                field=".replicas",
            ),
            Rule(
                "!(has(self.optimizations) && has(self.optimizations.tensorParallel) && "
                "has(self.optimizations.tensorParallel.enabled) && "
                "self.optimizations.tensorParallel.enabled) || self.accelerator.type != 'cpu'",
                "tensorParallel needs GPUs: set accelerator.type to a GPU type, or "
                "optimizations.tensorParallel.enabled: false",
                field=".optimizations",
            ),
            Rule(
                "!(has(self.optimizations) && has(self.optimizations.tensorParallel) && "
                "has(self.optimizations.tensorParallel.enabled) && self.optimizations.tensorParallel.enabled "
                "&& has(self.optimizations.tensorParallel.degree)) || self.accelerator.type == 'cpu' || "
                "self.optimizations.tensorParallel.degree <= self.accelerator.count",
                "tensorParallel.degree is above accelerator.count, the GPUs of one replica: raise "
                "accelerator.count or lower the degree",
                field=".optimizations",
            ),
        )
    )

    model: Model = Field(description="The model to serve. A change rolls out new pods.")
    accelerator: Accelerator = Field(description="What it runs on. A change rolls out new pods.")
    replicas: Annotated[int, Field(ge=0, le=1000)] = Field(
        default=1,
        description="Pods that serve the model; 0 stops serving. `kubectl scale` sets it. Default: 1.",
    )
    autoscaling: Autoscaling | None = Field(
        default=None,
        description="Bounds between which the number of replicas follows the load; then leave replicas out. "
        "Until the operator has an autoscaler, its status says so and minReplicas are run.",
    )
    slo: Slo | None = Field(default=None, description="Service targets, shown against what is measured.")
    kv_cache: KvCache | None = Field(default=None, description="The KV cache of each replica.")
    optimizations: Optimizations | None = Field(
        None,
        description="Configuration of each optimization; what is left out follows the defaults. This is what "
        "belongs in Git. To take one back in production patch spec.rollback, which wins over this.",
    )
    rollback: dict[str, bool] = Field(
        default_factory=dict,
        description="Takes optimizations back, live, without touching their configuration: NAME: true for "
        "one, all: true for all but the essential ones. Effective at the next step; no pod restarts except "
        "where the optimization itself needs one. false or removing the flag gives it back. Flags: all, "
        f"{', '.join(NAMES)}.",
        json_schema_extra=rollback_schema(),
    )
    rollout: Rollout = Field(
        default_factory=Rollout,
        description="How pods are replaced when a change needs new ones.",
        json_schema_extra={"default": Rollout().to_json()},
    )
    startup_timeout_seconds: Annotated[int, Field(ge=10, le=86_400)] = Field(
        default=1800,
        description="How long a pod may take to load the model before it is given up as ProbeTimeout. "
        "Default: 1800.",
    )
    template: PodTemplate | None = Field(
        default=None,
        description="What the pods need beyond what the operator decides. A change rolls out new pods.",
    )

    def written_optimizations(self) -> dict[str, dict[str, Any]]:
        """`spec.optimizations` as written, camelCase: what `switches.resolve` takes."""
        return self.optimizations.to_json() if self.optimizations is not None else {}


class InferenceService(ApiModel):
    """A model served with a low time to first token, every optimization revocable live."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
                "the name becomes the name of a Service: write lower-case letters, digits and '-', beginning "
                "with a letter",
            )
        )
    )

    api_version: str = "firsttoken.dev/v1alpha1"
    kind: str = "InferenceService"
    metadata: Metadata
    spec: InferenceServiceSpec = Field(description="What is asked for.")
    status: InferenceServiceStatus = Field(
        default_factory=InferenceServiceStatus, description="What the operator sees. Written by the operator."
    )
