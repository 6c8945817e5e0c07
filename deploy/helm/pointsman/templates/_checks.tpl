{{/* Values that cannot work together end the command with a sentence that says what to change. */}}
{{- define "pointsman.checks" -}}
{{- include "pointsman.checks.secrets" . -}}
{{- include "pointsman.checks.policies" . -}}
{{- include "pointsman.checks.replicas" . -}}
{{- include "pointsman.checks.admin" . -}}
{{- include "pointsman.checks.monitoring" . -}}
{{- include "pointsman.checks.picker" . -}}
{{- include "pointsman.checks.egress" . -}}
{{- include "pointsman.checks.metadata" . -}}
{{- end -}}

{{/* A key that the chart sets, too, would be there twice. */}}
{{- define "pointsman.checks.metadata" -}}
{{- $annotations := ternary (dict "checksum/config" "") dict .Values.restartOnConfigChange -}}
{{- $all := dict
  "podLabels" (list .Values.podLabels (include "pointsman.selectorLabels" . | fromYaml))
  "podAnnotations" (list .Values.podAnnotations $annotations)
  "monitoring.labels" (list .Values.monitoring.labels (include "pointsman.labels" . | fromYaml)) -}}
{{- range $name, $both := $all -}}
{{- range $key, $_ := first $both | default dict -}}
{{- if hasKey (last $both) $key -}}
{{- fail (printf "%s has %q, which the chart sets: remove it" $name $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The configuration is a ConfigMap, which more people may read than Secrets. */}}
{{- define "pointsman.checks.secrets" -}}
{{- $config := include "pointsman.configTable" . | fromJson -}}
{{- $prefix := include "pointsman.configPrefix" . -}}
{{- $server := get $config "server" | default dict -}}
{{- if and .Values.monitoring.enabled (get $server "admin_token") -}}
{{- fail (printf "%sserver.admin_token and monitoring.enabled give the gateway two tokens, which it refuses: put the token in the Secret of monitoring.adminTokenSecret, and remove the key" $prefix) -}}
{{- end -}}
{{- $secrets := dict
  "server.admin_token" (get $server "admin_token")
  "routing.hash_salt" (get (get $config "routing" | default dict) "hash_salt")
  "decisions.log_salt" (get (get $config "decisions" | default dict) "log_salt") -}}
{{- range $at, $worker := get $config "workers" | default list -}}
{{- $_ := set $secrets (printf "workers[%d].api_key" $at) (get $worker "api_key") -}}
{{- end -}}
{{- range $path, $value := $secrets -}}
{{- if include "pointsman.isPlain" $value -}}
{{- fail (printf "%s%s is a secret, and the configuration is a ConfigMap: put it in a Secret and name it in `env`, and write {env: NAME} here" $prefix $path) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Not empty for a secret as it is, or a list with one. `{env: …}` and `{file: …}` say where it is. */}}
{{- define "pointsman.isPlain" -}}
{{- if kindIs "slice" . -}}
{{- range . -}}{{- include "pointsman.isPlain" . -}}{{- end -}}
{{- else if and . (not (kindIs "map" .)) -}}yes
{{- end -}}
{{- end -}}

{{- define "pointsman.checks.policies" -}}
{{- $policies := .Values.policies -}}
{{- if eq $policies.source "image" -}}
{{- if not $policies.image.reference -}}
{{- fail "policies.source is image, and policies.image.reference is empty: name the image that has the policy files" -}}
{{- end -}}
{{- if semverCompare "<1.31.0-0" .Capabilities.KubeVersion.Version -}}
{{- fail (printf "policies.source is image, and Kubernetes %s has no image volumes: use 1.31 or newer, or another source" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- else if and (eq $policies.source "registry") (not $policies.registry.artifacts) -}}
{{- fail "policies.source is registry, and policies.registry.artifacts is empty: name at least one {file, reference}" -}}
{{- else if eq $policies.source "registry" -}}
{{- $files := dict -}}
{{- range $policies.registry.artifacts -}}
{{- $container := include "pointsman.pullContainer" . -}}
{{- if hasKey $files $container -}}
{{- fail (printf "policies.registry.artifacts: the files %s and %s give the init containers one name, %s: rename one" (get $files $container) .file $container) -}}
{{- end -}}
{{- $_ := set $files $container .file -}}
{{- end -}}
{{- else if and (eq $policies.source "persistentVolumeClaim") (not $policies.persistentVolumeClaim.claimName) -}}
{{- fail "policies.source is persistentVolumeClaim, and policies.persistentVolumeClaim.claimName is empty: name the claim" -}}
{{- end -}}
{{- end -}}

{{- define "pointsman.checks.replicas" -}}
{{- $replicas := get (.Values.config | default dict) "replicas" | default dict -}}
{{- $most := ternary (int .Values.autoscaling.maxReplicas) (int .Values.replicaCount) .Values.autoscaling.enabled -}}
{{- if not .Values.configToml -}}
{{- $slots := get (get (.Values.config | default dict) "policies" | default dict) "slots" | default dict -}}
{{- range $slot, $keys := $slots -}}
{{- if and (get $keys "shared_state") (not (get $replicas "servers")) -}}
{{- fail (printf "config.policies.slots.%s.shared_state needs config.replicas.servers: %d gateways would count alone. Name the NATS servers, or remove shared_state" $slot $most) -}}
{{- end -}}
{{- end -}}
{{- if and (get $replicas "name") (gt $most 1) -}}
{{- fail (printf "config.replicas.name gives %d gateways one name: remove it, and each pod uses its own" $most) -}}
{{- end -}}
{{- end -}}
{{- if .Values.autoscaling.enabled -}}
{{- if gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas) -}}
{{- fail (printf "autoscaling.minReplicas %d is above autoscaling.maxReplicas %d: exchange them" (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas)) -}}
{{- end -}}
{{- if not (or .Values.autoscaling.targetCPUUtilizationPercentage .Values.autoscaling.targetInflightRequests) -}}
{{- fail "autoscaling has no target: set autoscaling.targetCPUUtilizationPercentage or autoscaling.targetInflightRequests" -}}
{{- end -}}
{{- if and .Values.autoscaling.targetInflightRequests (not .Values.monitoring.enabled) -}}
{{- fail "autoscaling.targetInflightRequests needs monitoring.enabled, which Prometheus and its adapter read: enable it, or set the target to 0" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "pointsman.checks.admin" -}}
{{- $server := get (include "pointsman.configTable" . | fromJson) "server" | default dict -}}
{{- if get $server "admin_tls" -}}
{{- $path := printf "%sserver.admin_tls" (include "pointsman.configPrefix" .) -}}
{{- $asks_tls := false -}}
{{- range .Values.env -}}
{{- if and (eq .name "POINTSMAN_ADMIN_URL") (hasPrefix "https://" (get . "value" | default "https://")) -}}
{{- $asks_tls = true -}}
{{- end -}}
{{- end -}}
{{- if not $asks_tls -}}
{{- fail (printf "%s: the probes ask http://127.0.0.1:9090, which speaks TLS then, and Kubernetes restarts every pod. Set POINTSMAN_ADMIN_URL (https://NAME:9090) and POINTSMAN_ADMIN_TLS_CA in `env`, or remove the key" $path) -}}
{{- end -}}
{{- with .Values.monitoring -}}
{{- if and .enabled (or .serviceMonitor.enabled .podMonitor.enabled) -}}
{{- fail (printf "%s: monitoring.serviceMonitor and monitoring.podMonitor scrape over HTTP. Disable both and add a monitor of your own, or remove the key" $path) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "pointsman.checks.monitoring" -}}
{{- with .Values.monitoring -}}
{{- if .enabled -}}
{{- if and .serviceMonitor.enabled .podMonitor.enabled -}}
{{- fail "monitoring.serviceMonitor and monitoring.podMonitor are both enabled, so each gateway would be scraped twice: disable one" -}}
{{- end -}}
{{- $wanted := or .serviceMonitor.enabled .podMonitor.enabled .prometheusRule.enabled -}}
{{- if and $wanted (not ($.Capabilities.APIVersions.Has "monitoring.coreos.com/v1")) -}}
{{- fail "monitoring needs the custom resources of the Prometheus Operator (monitoring.coreos.com/v1), which the cluster does not have: install the operator, or disable serviceMonitor, podMonitor and prometheusRule of monitoring. `helm template` knows no cluster: add --api-versions monitoring.coreos.com/v1" -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "pointsman.checks.picker" -}}
{{- $pool := .Values.endpointPicker.inferencePool -}}
{{- if and .Values.endpointPicker.enabled $pool.create -}}
{{- if not (.Capabilities.APIVersions.Has "inference.networking.k8s.io/v1") -}}
{{- fail "endpointPicker.inferencePool needs the custom resources of the Gateway API Inference Extension (inference.networking.k8s.io/v1), which the cluster does not have: install them, or set endpointPicker.inferencePool.create=false. `helm template` knows no cluster: add --api-versions inference.networking.k8s.io/v1" -}}
{{- end -}}
{{- $discovery := .Values.engines.discovery -}}
{{- if $discovery.enabled -}}
{{- range $port := splitList "," (nospace (toString $discovery.port)) -}}
{{- $numbers := list -}}
{{- range $pool.targetPorts -}}{{- $numbers = append $numbers (toString (int .)) -}}{{- end -}}
{{- if and (regexMatch "^[0-9]+$" $port) (not (has $port $numbers)) -}}
{{- fail (printf "endpointPicker.inferencePool.targetPorts and engines.discovery.port name different ports: the pool has %s, and the gateways choose port %s. Name each port in both" (join ", " $numbers) $port) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $discovery.enabled (eq $discovery.resource "pods") -}}
{{- range $one := splitList "," $discovery.selector -}}
{{- $pair := regexSplit "==?" (nospace $one) 2 -}}
{{- $key := first $pair -}}
{{- $found := get (include "pointsman.poolLabels" $ | fromYaml) $key -}}
{{- if and (regexMatch "^[A-Za-z0-9][A-Za-z0-9._/-]*(==?[A-Za-z0-9._-]+)?$" (nospace $one)) (or (not $found) (and (eq (len $pair) 2) (ne (last $pair) $found))) -}}
{{- fail (printf "endpointPicker.inferencePool.matchLabels and engines.discovery.selector select different pods: the pool says nothing of %q. Envoy offers the pods of the pool, and the gateways choose among those of the selector" $one) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* The network policy allows engines, and the ports 53, 443 and 6443 of everything else. */}}
{{- define "pointsman.checks.egress" -}}
{{- /* Engines by namespace or address may include these servers. */ -}}
{{- $wide := false -}}
{{- range .Values.networkPolicy.engines -}}
{{- if or (hasKey . "namespaceSelector") (hasKey . "ipBlock") -}}
{{- $wide = true -}}
{{- end -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled (not $wide) (not .Values.networkPolicy.extraEgress) -}}
{{- $discovery := .Values.engines.discovery -}}
{{- $default := list (dict "podSelector" (dict "matchExpressions" (list (dict "key" "pointsman.dev/engine" "operator" "Exists")))) -}}
{{- if and $discovery.enabled (eq $discovery.resource "pods") (eq (toJson .Values.networkPolicy.engines) (toJson $default)) -}}
{{- $allowed := false -}}
{{- range $one := splitList "," $discovery.selector -}}
{{- if regexMatch "^pointsman\\.dev/engine($|=|in\\()" (nospace $one) -}}
{{- $allowed = true -}}
{{- end -}}
{{- end -}}
{{- if not $allowed -}}
{{- fail (printf "networkPolicy.enabled cuts the gateways off from the engines: networkPolicy.engines has the pods with the label pointsman.dev/engine, and engines.discovery.selector (%s) finds others. Name the engines in networkPolicy.engines" $discovery.selector) -}}
{{- end -}}
{{- end -}}
{{- $config := include "pointsman.configTable" . | fromJson -}}
{{- $prefix := include "pointsman.configPrefix" . -}}
{{- $jwt := get (get $config "auth" | default dict) "jwt" | default dict -}}
{{- $urls := dict
  (printf "%sreplicas.servers" $prefix) (get (get $config "replicas" | default dict) "servers" | default list)
  (printf "%straces.endpoint" $prefix) (list (get (get $config "traces" | default dict) "endpoint"))
  (printf "%sauth.jwt.jwks_url" $prefix) (list (get $jwt "jwks_url")) -}}
{{- range $at, $source := get (get $config "discovery" | default dict) "etcd" | default list -}}
{{- $_ := set $urls (printf "%sdiscovery.etcd[%d].endpoints" $prefix $at) (get $source "endpoints" | default list) -}}
{{- end -}}
{{- range $at, $source := get (get $config "discovery" | default dict) "dns" | default list -}}
{{- $_ := set $urls (printf "%sdiscovery.dns[%d].servers" $prefix $at) (get $source "servers" | default list) -}}
{{- end -}}
{{- /* A name may be that of a Service, whose pods are engines. */ -}}
{{- range $at, $worker := get $config "workers" | default list -}}
{{- $url := get $worker "url" | default "" -}}
{{- if regexMatch "^https?://([0-9.]+|\\[[^]]*\\])(:|/|$)" $url -}}
{{- $_ := set $urls (printf "%sworkers[%d].url" $prefix $at) (list $url) -}}
{{- end -}}
{{- end -}}
{{- if eq .Values.policies.source "registry" -}}
{{- range $at, $artifact := .Values.policies.registry.artifacts -}}
{{- $_ := set $urls (printf "policies.registry.artifacts[%d].reference" $at) (list (printf "https://%s" $artifact.reference)) -}}
{{- end -}}
{{- end -}}
{{- range $path, $list := $urls -}}
{{- range $url := compact $list -}}
{{- $host := regexReplaceAll "^([a-z]+://)?([^/@]*@)?(\\[[^]]*\\]|[^/:]*)(:[0-9]+)?.*$" $url "${1}${3}${4}" -}}
{{- if not (regexMatch "(?i)^https://(\\[[^]]*\\]|[^:]*)$|:(53|443|6443)$|^([a-z]+://)?(localhost|127(\\.[0-9]+){3}|\\[::1\\])(:[0-9]+)?$" $host) -}}
{{- fail (printf "networkPolicy.enabled cuts the gateways off from %s (%s): name it in networkPolicy.extraEgress, which is empty" $path $host) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
