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

{{/* preStop, timeouts.drain_delay, timeouts.drain, and the last exports of logs and traces. */}}
{{- define "pointsman.gracePeriod" -}}
{{- $timeouts := get (include "pointsman.configTable" . | fromJson) "timeouts" | default dict -}}
{{- $prefix := printf "%stimeouts." (include "pointsman.configPrefix" .) -}}
{{- $seconds := dict -}}
{{- range $key, $default := dict "drain_delay" "0s" "drain" (ternary "30s" (printf "%ds" (int .Values.drainSeconds)) (not (empty .Values.configToml))) -}}
{{- $text := get $timeouts $key | default $default -}}
{{- $_ := set $seconds $key (include "pointsman.seconds" (dict "path" (printf "%s%s" $prefix $key) "text" $text) | int) -}}
{{- end -}}
{{- add .Values.preStopSeconds $seconds.drain_delay $seconds.drain 15 -}}
{{- end -}}

{{/* Seconds of a duration of the configuration. */}}
{{- define "pointsman.seconds" -}}
{{- $text := nospace (toString .text) -}}
{{- range $unit, $names := dict "h" "hours?|hrs?" "m" "minutes?|mins?" "s" "seconds?|secs?" -}}
{{- $text = regexReplaceAll $names $text $unit -}}
{{- end -}}
{{- if not (regexMatch "^([0-9]+(h|m|s|ms))+$" $text) -}}
{{- fail (printf "%s is %q: write it as in 1h, 2m30s or 500ms, from which the chart computes how long a pod may take to end" .path .text) -}}
{{- end -}}
{{- $begin := mustToDate "2006-01-02" "2000-01-01" -}}
{{- sub (mustDateModify $text $begin | unixEpoch | int64) (unixEpoch $begin | int64) -}}
{{- end -}}

{{/* The configuration as JSON: `config`, or what `configToml` says. */}}
{{- define "pointsman.configTable" -}}
{{- if .Values.configToml -}}
{{- $table := fromToml .Values.configToml -}}
{{- if hasKey $table "Error" -}}
{{- fail (printf "configToml cannot be read: %s" $table.Error) -}}
{{- end -}}
{{- toJson $table -}}
{{- else -}}
{{- .Values.config | default dict | toJson -}}
{{- end -}}
{{- end -}}

{{/* What a message writes before the path of a key of the configuration. */}}
{{- define "pointsman.configPrefix" -}}
{{- ternary "configToml: " "config." (not (empty .Values.configToml)) -}}
{{- end -}}

{{/* How Prometheus scrapes a gateway. */}}
{{- define "pointsman.scrape" -}}
port: admin
path: /metrics
interval: {{ .Values.monitoring.interval }}
{{- if get (get (include "pointsman.configTable" . | fromJson) "server" | default dict) "admin_token_reads" }}
authorization:
  credentials: { name: {{ include "pointsman.adminSecret" . | quote }}, key: token }
{{- end }}
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
