{{/* Values that cannot work together end the command with a sentence that says what to change. */}}
{{- define "pointsman.checks" -}}
{{- include "pointsman.checks.secrets" . -}}
{{- include "pointsman.checks.policies" . -}}
{{- include "pointsman.checks.replicas" . -}}
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
{{- $config := .Values.config | default dict -}}
{{- $prefix := "config." -}}
{{- if .Values.configToml -}}
{{- $config = fromToml .Values.configToml -}}
{{- $prefix = "configToml: " -}}
{{- end -}}
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
{{- $config := .Values.config | default dict -}}
{{- $prefix := "config." -}}
{{- if .Values.configToml -}}
{{- $config = fromToml .Values.configToml -}}
{{- $prefix = "configToml: " -}}
{{- end -}}
{{- $jwt := get (get $config "auth" | default dict) "jwt" | default dict -}}
{{- $urls := dict
  "replicas.servers" (get (get $config "replicas" | default dict) "servers" | default list)
  "traces.endpoint" (list (get (get $config "traces" | default dict) "endpoint"))
  "auth.jwt.jwks_url" (list (get $jwt "jwks_url")) -}}
{{- range $at, $source := get (get $config "discovery" | default dict) "etcd" | default list -}}
{{- $_ := set $urls (printf "discovery.etcd[%d].endpoints" $at) (get $source "endpoints" | default list) -}}
{{- end -}}
{{- range $path, $list := $urls -}}
{{- range $url := compact $list -}}
{{- $host := regexReplaceAll "^([a-z]+://)?([^/@]*@)?(\\[[^]]*\\]|[^/:]*)(:[0-9]+)?.*$" $url "${1}${3}${4}" -}}
{{- if not (regexMatch "(?i)^https://(\\[[^]]*\\]|[^:]*)$|:(53|443|6443)$|^[a-z]+://(localhost|127(\\.[0-9]+){3}|\\[::1\\])(:[0-9]+)?$" $host) -}}
{{- fail (printf "networkPolicy.enabled cuts the gateways off from %s%s (%s): name it in networkPolicy.extraEgress, which is empty" $prefix $path $host) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
