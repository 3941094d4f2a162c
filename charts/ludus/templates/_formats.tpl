{{/* Checks of values whose text has a format. The API server or a pod would refuse them later. */}}

{{- define "ludus.problems.formats" -}}
{{- with .Values }}
{{- $names := dict "auth.existingSecret" .auth.existingSecret "gateway.tls.existingSecret" .gateway.tls.existingSecret "gateway.tenants.existingSecret" .gateway.tenants.existingSecret "gateway.priorityClassName" .gateway.priorityClassName "runs.priorityClassName" .runs.priorityClassName "runs.queue.name" .runs.queue.name "runs.queue.priorityClass" .runs.queue.priorityClass "runs.cache.existingClaim" .runs.cache.existingClaim }}
{{- $names = merge $names (dict "storage.runs.existingClaim" .storage.runs.existingClaim "storage.runs.storageClassName" .storage.runs.storageClassName "storage.store.storageClassName" .storage.store.storageClassName "storage.s3.existingSecret" .storage.s3.existingSecret "ingress.className" .ingress.className "ingress.tlsSecret" .ingress.tlsSecret) }}
{{- range $index, $name := .image.pullSecrets }}
{{- $_ := set $names (printf "image.pullSecrets[%d]" $index) $name }}
{{- end }}
{{- $hosts := dict "ingress.host" .ingress.host }}
{{- range $kind, $route := dict "httpRoute" .httpRoute "grpcRoute" .grpcRoute }}
{{- range $index, $host := $route.hostnames }}
{{- $_ := set $hosts (printf "%s.hostnames[%d]" $kind $index) $host }}
{{- end }}
{{- range $index, $parent := $route.parentRefs }}
{{- $_ := set $names (printf "%s.parentRefs[%d].name" $kind $index) $parent.name }}
{{- $_ := set $names (printf "%s.parentRefs[%d].namespace" $kind $index) (default "" $parent.namespace) }}
{{- end }}
{{- end }}
{{- $variables := dict "gateway" .gateway.env "runs" .runs.env "runs.learner" .runs.learner.env "runs.rollout" .runs.rollout.env }}
{{- $images := dict "gateway.image" .gateway.image "runs.image" .runs.image "storage.store.image" .storage.store.image }}
{{- $packages := dict }}
{{- range $name, $environment := include "ludus.environments" $ | fromJson }}
{{- $_ := set $names (printf "environments.%s.priorityClassName" $name) $environment.priorityClassName }}
{{- $_ := set $names (printf "environments.%s.sandbox.runtimeClassName" $name) $environment.sandbox.runtimeClassName }}
{{- $_ := set $variables (printf "environments.%s" $name) $environment.env }}
{{- $_ := set $images (printf "environments.%s.image" $name) $environment.image }}
{{- $_ := set $packages (printf "environments.%s.package" $name) $environment.package }}
{{- end }}
{{- $keys := dict "auth.keys.sessionKey" .auth.keys.sessionKey "auth.keys.gatewayToken" .auth.keys.gatewayToken "auth.keys.environmentToken" .auth.keys.environmentToken "gateway.tenants.key" .gateway.tenants.key "storage.s3.keys.accessKeyId" .storage.s3.keys.accessKeyId "storage.s3.keys.secretAccessKey" .storage.s3.keys.secretAccessKey }}
{{- $formats := dict "name" $names "host" $hosts "key" $keys "target" $packages "registry" (dict "image.registry" .image.registry) "repository" dict "tag" (dict "image.tag" .image.tag) "variable" dict }}
{{- $formats = merge $formats (dict "url" (dict "monitoring.prometheusAddress" .monitoring.prometheusAddress) "duration" (dict "monitoring.monitors.interval" .monitoring.monitors.interval "monitoring.monitors.gatewayInterval" .monitoring.monitors.gatewayInterval) "prefix" (dict "storage.s3.prefix" .storage.s3.prefix) "region" (dict "storage.s3.region" .storage.s3.region) "label" (dict "nameOverride" .nameOverride)) }}
{{- range $place, $image := $images }}
{{- range $part := list "registry" "repository" "tag" }}
{{- $_ := set (get $formats $part) (printf "%s.%s" $place $part) (default "" (get $image $part)) }}
{{- end }}
{{- end }}
{{- range $place, $entries := $variables }}
{{- range $index, $entry := $entries }}
{{- $_ := set $formats.variable (printf "%s.env[%d].name" $place $index) (default "" $entry.name) }}
{{- end }}
{{- end }}
{{- include "ludus.problems.format" $formats }}
{{- end }}
{{- end }}

{{/* Texts that do not have their format; an empty text is none. Arguments: texts by place, by format. */}}
{{- define "ludus.problems.format" -}}
{{- $label := "[a-z0-9]([a-z0-9-]*[a-z0-9])?" }}
{{- $word := "[a-z0-9]+([._-]+[a-z0-9]+)*" }}
{{- $patterns := dict
  "name" (printf "%s([.]%s)*" $label $label)
  "host" (printf "([*][.])?(%s[.])*[a-z]([a-z0-9-]*[a-z0-9])?" $label)
  "label" "[a-zA-Z0-9]([-._a-zA-Z0-9]{0,61}[a-zA-Z0-9])?"
  "key" "[-._a-zA-Z0-9]+"
  "target" "[A-Za-z_][A-Za-z0-9_]*([.][A-Za-z_][A-Za-z0-9_]*)*(:[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?(/[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?)*)*"
  "registry" (printf "[a-zA-Z0-9]([a-zA-Z0-9.-]*[a-zA-Z0-9])?(:[0-9]{1,5})?(/%s)*" $word)
  "repository" (printf "%s(:[0-9]{1,5}/%s)?(/%s)*" $word $word $word)
  "tag" "[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
  "variable" "[-._a-zA-Z][-._a-zA-Z0-9]*"
  "url" "https?://[^/@?#[:space:]]+(/[^?#[:space:]]*)?"
  "duration" "([0-9]+(ms|s|m|h))+"
  "prefix" "[A-Za-z0-9_-][A-Za-z0-9_.-]*(/[A-Za-z0-9_-][A-Za-z0-9_.-]*)*/?"
  "region" "[a-z0-9]+(-[a-z0-9]+)*" }}
{{- $examples := dict
  "name" "the name of an object, of a-z, 0-9, - and ."
  "host" "a host name, like ludus.example.com"
  "label" "the value of a label, of at most 63 letters, digits, -, _ and ."
  "key" "a key of a Secret, of letters, digits, -, _ and ."
  "target" "a package or another target, like openspiel_env, module:Class or gymnasium:CartPole-v1"
  "registry" "a registry without a scheme, like registry.example:5000"
  "repository" "the path of an image, like ludus/env-openspiel"
  "tag" "the tag of an image, of letters, digits, -, _ and ."
  "variable" "the name of an environment variable"
  "url" "a URL, like http://prometheus.monitoring:9090"
  "duration" "a duration, like 15s"
  "prefix" "a path in the bucket, like ludus/weights"
  "region" "a region, like us-east-1" }}
{{- range $format, $texts := . }}
{{- range $place, $text := $texts }}
{{- if and $text (not (regexMatch (printf "^(%s)$" (get $patterns $format)) $text)) }}
- {{ $place }}: expected {{ get $examples $format }}, got {{ $text | quote }}; change it
{{- end }}
{{- end }}
{{- end }}
{{- end }}
