{{- define "pointsman.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" (.Release.Name | trunc 40 | trimSuffix "-") .Chart.Name -}}
{{- end -}}
{{- end -}}

{{/* The name label is constant: alert rules and dashboards expect job="pointsman". */}}
{{- define "pointsman.selectorLabels" -}}
app.kubernetes.io/name: pointsman
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end -}}

{{- define "pointsman.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{ include "pointsman.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "pointsman.serviceAccountName" -}}
{{- $default := ternary (include "pointsman.fullname" .) "default" .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default $default -}}
{{- end -}}

{{- define "pointsman.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- define "pointsman.adminSecret" -}}
{{- .Values.monitoring.adminTokenSecret | default (printf "%s-admin" (include "pointsman.fullname" .)) -}}
{{- end -}}

{{- define "pointsman.pickerSecret" -}}
{{- .Values.endpointPicker.tlsSecret | default (printf "%s-picker" (include "pointsman.fullname" .)) -}}
{{- end -}}

{{- define "pointsman.policiesConfigMap" -}}
{{- .Values.policies.configMap.name | default (printf "%s-policies" (include "pointsman.fullname" .)) -}}
{{- end -}}

{{- define "pointsman.registrySecret" -}}
{{- .Values.policies.registry.dockerConfigSecret | default (printf "%s-registry" (include "pointsman.fullname" .)) -}}
{{- end -}}

{{/* Name of the init container that pulls an artifact. */}}
{{- define "pointsman.pullContainer" -}}
{{- printf "pull-%s" (trimSuffix ".wasm" .file | lower | replace "." "-" | replace "_" "-") | trunc 63 -}}
{{- end -}}

{{/* `engines` for the release `pointsman`, as in the Kustomize files. Each release has a pool of its own. */}}
{{- define "pointsman.poolName" -}}
{{- $name := include "pointsman.fullname" . -}}
{{- .Values.endpointPicker.inferencePool.name | default (ternary "engines" (printf "%s-engines" $name) (eq $name "pointsman")) -}}
{{- end -}}

{{- define "pointsman.poolLabels" -}}
{{- .Values.endpointPicker.inferencePool.matchLabels | default (dict "pointsman.dev/engine" "vllm") | toYaml -}}
{{- end -}}

{{/* preStop, timeouts.drain and the last exports of logs and traces. */}}
{{- define "pointsman.gracePeriod" -}}
{{- add .Values.preStopSeconds .Values.drainSeconds 15 -}}
{{- end -}}

{{- define "pointsman.policiesVolume" -}}
{{- $policies := .Values.policies -}}
{{- if eq $policies.source "configMap" -}}
# Built-in policies serve while it does not exist.
configMap:
  name: {{ include "pointsman.policiesConfigMap" . }}
  optional: true
  {{- with $policies.configMap.items }}
  items: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- else if eq $policies.source "image" -}}
image: { reference: {{ quote $policies.image.reference }}, pullPolicy: {{ $policies.image.pullPolicy }} }
{{- else if eq $policies.source "registry" -}}
emptyDir: { sizeLimit: {{ $policies.registry.sizeLimit }} }
{{- else -}}
persistentVolumeClaim: { claimName: {{ $policies.persistentVolumeClaim.claimName }}, readOnly: true }
{{- end -}}
{{- end -}}
