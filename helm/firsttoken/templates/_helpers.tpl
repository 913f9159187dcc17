{{- define "firsttoken.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "firsttoken.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" }}
{{- else if contains (include "firsttoken.name" .) .Release.Name }}
{{- .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "firsttoken.name" .) | trunc 50 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "firsttoken.selectorLabels" -}}
app.kubernetes.io/name: {{ include "firsttoken.name" . }}-operator
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "firsttoken.labels" -}}
{{ include "firsttoken.selectorLabels" . }}
app.kubernetes.io/component: operator
app.kubernetes.io/part-of: firsttoken
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "firsttoken.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "firsttoken.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- required "serviceAccount.name: name the ServiceAccount to use, or set serviceAccount.create=true" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "firsttoken.image" -}}
{{- if .Values.image.digest }}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest }}
{{- else }}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end }}
{{- end }}

{{- define "firsttoken.runtimeImage" -}}
{{- default (printf "firsttoken-runtime:%s" .Chart.AppVersion) .Values.runtime.image }}
{{- end }}

{{- /* What the operator does with the objects of a namespace; nothing else. */}}
{{- define "firsttoken.namespacedRules" -}}
- apiGroups: [firsttoken.dev]
  resources: [inferenceservices]
  verbs: [get, list, watch]
- apiGroups: [firsttoken.dev]
  resources: [inferenceservices/status]
  verbs: [update]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch]
- apiGroups: [apps]
  resources: [replicasets]
  verbs: [list]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [services, serviceaccounts]
  verbs: [get, create, patch]
# The admin tokens of the pods: no list and no watch, so that no other Secret is ever read in bulk.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create, patch]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, create, patch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, create, patch, delete]
{{- end }}
