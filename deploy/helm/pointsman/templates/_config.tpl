{{/* The text of pointsman.toml. */}}
{{- define "pointsman.config" -}}
{{- if .Values.configToml -}}
{{- .Values.configToml -}}
{{- else -}}
{{- $config := deepCopy (.Values.config | default dict) -}}
{{- $own := dict
  "server" (dict "listen" "0.0.0.0:8080" "admin_listen" "127.0.0.1:9090")
  "policies" (dict "dir" "/etc/pointsman/policies.d" "compile_cache" "/var/cache/pointsman")
  "timeouts" (dict "drain" (printf "%ds" (int .Values.drainSeconds))) -}}
{{- range $section, $keys := $own -}}
{{- range $key, $value := $keys -}}
{{- if hasKey (get $config $section | default dict) $key -}}
{{- fail (printf "config.%s.%s is written by the chart (%s): remove it from the values" $section $key $value) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $config = mergeOverwrite $config $own -}}
{{- with .Values.engines.discovery -}}
{{- if .enabled -}}
{{- $source := dict "name" "engines" "namespace" $.Release.Namespace "selector" .selector "port" (toString .port) -}}
{{- if ne .resource "pods" -}}{{- $_ := set $source "resource" .resource -}}{{- end -}}
{{- if ne .scheme "http" -}}{{- $_ := set $source "scheme" .scheme -}}{{- end -}}
{{- if .defaults -}}{{- $_ := set $source "defaults" .defaults -}}{{- end -}}
{{- $discovery := get $config "discovery" | default dict -}}
{{- $_ := set $discovery "kubernetes" (prepend (get $discovery "kubernetes" | default list) $source) -}}
{{- $_ := set $config "discovery" $discovery -}}
{{- end -}}
{{- end -}}
# Written by the Helm chart. A change of this ConfigMap reaches the running gateways without a restart, apart from the
# keys that docs/configuration.md#reload names. A file with a problem changes nothing.
{{ include "pointsman.toml.table" (dict "path" "" "table" $config) | trim }}
{{- end -}}
{{- end -}}

{{/*
A table of TOML: first its values, then its tables, each with its whole path. Helm's own toToml writes whole numbers of a
values file as floats, which the gateway refuses.
*/}}
{{- define "pointsman.toml.table" -}}
{{- $path := .path -}}
{{- range $key, $value := .table -}}
{{- if not (or (kindIs "map" $value) (kindIs "invalid" $value) (include "pointsman.toml.isTables" $value)) }}
{{ include "pointsman.toml.key" $key }} = {{ include "pointsman.toml.value" $value }}
{{- end -}}
{{- end -}}
{{- range $key, $value := .table -}}
{{- $name := include "pointsman.toml.key" $key -}}
{{- if $path }}{{ $name = printf "%s.%s" $path $name }}{{ end -}}
{{- if kindIs "map" $value }}
{{- if or (not $value) (include "pointsman.toml.hasValues" $value) }}

[{{ $name }}]
{{- end }}
{{- include "pointsman.toml.table" (dict "path" $name "table" $value) -}}
{{- else if include "pointsman.toml.isTables" $value -}}
{{- range $value }}

[[{{ $name }}]]
{{- include "pointsman.toml.table" (dict "path" $name "table" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Not empty for a table that has not only tables. */}}
{{- define "pointsman.toml.hasValues" -}}
{{- range . -}}
{{- if not (or (kindIs "map" .) (kindIs "invalid" .) (include "pointsman.toml.isTables" .)) -}}yes{{- end -}}
{{- end -}}
{{- end -}}

{{/* Not empty for a list of tables. */}}
{{- define "pointsman.toml.isTables" -}}
{{- if and (kindIs "slice" .) . -}}
{{- $tables := true -}}
{{- range . -}}{{- if not (kindIs "map" .) -}}{{- $tables = false -}}{{- end -}}{{- end -}}
{{- if $tables -}}yes{{- end -}}
{{- end -}}
{{- end -}}

{{- define "pointsman.toml.key" -}}
{{- if regexMatch "^[A-Za-z0-9_-]+$" . -}}{{- . -}}{{- else -}}{{- toRawJson . -}}{{- end -}}
{{- end -}}

{{/* Strings of JSON are strings of TOML. */}}
{{- define "pointsman.toml.value" -}}
{{- if kindIs "map" . -}}
{{- $pairs := list -}}
{{- range $key, $value := . -}}
{{- $pairs = append $pairs (printf "%s = %s" (include "pointsman.toml.key" $key) (include "pointsman.toml.value" $value)) -}}
{{- end -}}
{ {{ join ", " $pairs }} }
{{- else if kindIs "slice" . -}}
{{- $items := list -}}
{{- range . -}}{{- $items = append $items (include "pointsman.toml.value" .) -}}{{- end -}}
[{{ join ", " $items }}]
{{- else if and (kindIs "float64" .) (eq . (floor .)) -}}
{{- if or (ge . 9007199254740992.0) (le . -9007199254740992.0) -}}
{{- fail (printf "config: Helm has rounded a whole number to %.0f, for example the id of a worker: use numbers below 9007199254740992, or write the configuration as configToml" .) -}}
{{- end -}}
{{- printf "%.0f" . -}}
{{- else -}}
{{- toRawJson . -}}
{{- end -}}
{{- end -}}
