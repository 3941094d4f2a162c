{{/* Checks that a schema cannot express. All problems are reported together, each with a remedy. */}}

{{- define "ludus.problems" -}}
{{- include "ludus.problems.names" . }}
{{- include "ludus.problems.gateway" . }}
{{- range $name, $environment := include "ludus.environments" . | fromJson }}
{{- $args := dict "root" $ "name" $name "environment" $environment "place" (printf "environments.%s" $name) }}
{{- include "ludus.problems.environment" $args }}
{{- include "ludus.problems.server" $args }}
{{- include "ludus.problems.quantities" (dict "place" $args.place "part" $environment) }}
{{- include "ludus.problems.variables" (dict "place" $args.place "part" $environment) }}
{{- include "ludus.problems.scaling" $args }}
{{- end }}
{{- include "ludus.problems.runs" . }}
{{- include "ludus.problems.storage" . }}
{{- include "ludus.problems.routes" . }}
{{- include "ludus.problems.network" . }}
{{- include "ludus.problems.formats" . }}
{{- include "ludus.problems.kinds" . }}
{{- with .Values }}
{{- range $place, $part := dict "gateway" .gateway "runs" .runs "runs.head" .runs.head "runs.learner" .runs.learner "runs.rollout" .runs.rollout "runs.autoscaling" .runs.autoscaling "runs.cache" .runs.cache "storage.runs" .storage.runs "storage.store" .storage.store }}
{{- include "ludus.problems.quantities" (dict "place" $place "part" $part) }}
{{- include "ludus.problems.variables" (dict "place" $place "part" $part) }}
{{- end }}
{{- end }}
{{- end }}

{{/* Quantities of CPU, memory and storage. Arguments: place, part. */}}
{{- define "ludus.problems.quantities" -}}
{{- $amounts := dict }}
{{- range $name := list "size" "shmSize" }}
{{- if hasKey $.part $name }}
{{- $_ := set $amounts (printf "%s.%s" $.place $name) (get $.part $name) }}
{{- end }}
{{- end }}
{{- range $kind, $resources := default dict .part.resources }}
{{- range $name, $amount := $resources }}
{{- $_ := set $amounts (printf "%s.resources.%s.%s" $.place $kind $name) $amount }}
{{- end }}
{{- end }}
{{- range $place, $amount := $amounts }}
{{- if not (regexMatch "^[0-9]+([.][0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi|E|Ei)?$" (toString $amount)) }}
- {{ $place }}: expected a quantity such as 500m, 2 or 8Gi, got {{ $amount }}; change it
{{- end }}
{{- end }}
{{- end }}

{{/* Plain secrets in variables. Arguments: place, part. */}}
{{- define "ludus.problems.variables" -}}
{{- range .part.env }}
{{- if and .value (regexMatch "(^|_)(TOKEN|SECRET|PASSWORD|CREDENTIALS?|API_?KEY|(SESSION|ACCESS|PRIVATE)_KEY)$" (upper .name)) }}
- {{ $.place }}.env: {{ .name }} must come from a Secret, because every reader of pods sees a plain value; set valueFrom.secretKeyRef with name and key instead of value
{{- end }}
{{- end }}
{{- end }}

{{- define "ludus.problems.network" -}}
{{- range .Values.networkPolicy.apiServer.cidrs }}
{{- $octet := "(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])" }}
{{- if not (regexMatch (printf "^(%s([.]%s){3}/([12]?[0-9]|3[0-2])|[0-9a-fA-F:]*:[0-9a-fA-F:]*/(1[01][0-9]|12[0-8]|[1-9]?[0-9]))$" $octet $octet) .) }}
- networkPolicy.apiServer.cidrs: expected addresses with a prefix length, like 10.0.0.1/32, got {{ . }}; add the length
{{- end }}
{{- end }}
{{- end }}

{{- define "ludus.problems.names" -}}
{{- $fullname := include "ludus.fullname" . }}
{{- if not (regexMatch "^[a-z]([a-z0-9-]*[a-z0-9])?$" $fullname) }}
- fullnameOverride: a name must start with a letter and contain only a-z, 0-9 and -, got {{ $fullname }}; choose another release name, or set fullnameOverride
{{- end }}
{{- if not .Values.auth.existingSecret }}
{{- $keys := .Values.auth.keys }}
- auth.existingSecret: needs the name of a Secret; create one with: kubectl create secret generic ludus-auth -n {{ .Release.Namespace }}{{ range list $keys.sessionKey $keys.gatewayToken $keys.environmentToken }} --from-literal={{ . }}=$(openssl rand -hex 32){{ end }}; then set auth.existingSecret=ludus-auth
{{- end }}
{{- if not .Values.environments }}
- environments: at least one environment is required; set for example environments.blackjack.package=openspiel_env, environments.blackjack.options.game=blackjack and environments.blackjack.image.repository=ludus/env-openspiel
{{- end }}
{{- $images := dict "gateway.image" .Values.gateway.image "runs.image" .Values.runs.image "storage.store.image" .Values.storage.store.image }}
{{- range $name, $environment := include "ludus.environments" . | fromJson }}
{{- $_ := set $images (printf "environments.%s.image" $name) $environment.image }}
{{- end }}
{{- range $place, $image := $images }}
{{- if not $image.repository }}
- {{ $place }}.repository: needs the path of an image; set for example {{ $place }}.repository=ludus/env-openspiel
{{- end }}
{{- if and $image.digest (not (regexMatch "^sha256:[0-9a-f]{64}$" $image.digest)) }}
- {{ $place }}.digest: expected sha256: and 64 digits of 0-9a-f, got {{ $image.digest }}; set it to the digest in the registry, or set {{ $place }}.tag
{{- end }}
{{- end }}
{{- end }}

{{- define "ludus.problems.gateway" -}}
{{- $gateway := .Values.gateway }}
{{- include "ludus.problems.maxUnavailable" (dict "place" "gateway" "value" $gateway.maxUnavailable) }}
{{- with $gateway.autoscaling }}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) }}
- gateway.autoscaling: minReplicas must not exceed maxReplicas, got {{ .minReplicas }} and {{ .maxReplicas }}; raise maxReplicas or lower minReplicas
{{- end }}
{{- if and .enabled (not (dig "requests" "cpu" "" $gateway.resources)) }}
- gateway.autoscaling: needs gateway.resources.requests.cpu, because the target is a percentage of it; set it, for example to 500m
{{- end }}
{{- end }}
{{- end }}

{{/* Values of maxUnavailable. Arguments: place, value. */}}
{{- define "ludus.problems.maxUnavailable" -}}
{{- if not (regexMatch "^([1-9][0-9]*|[1-9][0-9]?%|100%)$" (toString .value)) }}
- {{ .place }}.maxUnavailable: expected a number of at least 1 or a percentage from 1% to 100%, got {{ .value }}; a node could not be drained with less
{{- end }}
{{- end }}

{{- define "ludus.problems.environment" -}}
{{- $object := include "ludus.environmentName" . }}
{{- $environment := .environment }}
{{- if not (regexMatch "^[a-z0-9]([a-z0-9-]*[a-z0-9])?$" .name) }}
- {{ .place }}: the name must contain only a-z, 0-9 and -, got {{ .name }}; rename it
{{- else if gt (len $object) 54 }}
- {{ .place }}: {{ $object }} may have at most 54 characters, got {{ len $object }}; shorten the environment's name by {{ sub (len $object) 54 }}, or set fullnameOverride
{{- end }}
{{- if not $environment.package }}
- {{ .place }}.package: needs a package or another target; set for example {{ .place }}.package=openspiel_env
{{- end }}
{{- include "ludus.problems.maxUnavailable" (dict "place" .place "value" $environment.maxUnavailable) }}
{{- if eq $environment.mode "sandbox" }}
{{- if ne (int $environment.capacity) 1 }}
- {{ .place }}.capacity: expected 1 with mode sandbox, because each session has its own pod, got {{ $environment.capacity }}; set {{ .place }}.capacity=1
{{- end }}
{{- if ne $environment.autoscaling.kind "none" }}
- {{ .place }}.autoscaling.kind: expected none with mode sandbox, because its pods come from a warm pool, got {{ $environment.autoscaling.kind }}; set {{ .place }}.sandbox.warmPool instead
{{- end }}
{{- end }}
{{- end }}

{{- define "ludus.problems.server" -}}
{{- $server := .environment.server }}
{{- $isolation := default "inline" $server.isolation }}
{{- if and $server.numWorkers (ne $isolation "pool") }}
- {{ .place }}.server.numWorkers: needs isolation pool, got isolation {{ $isolation }}; set {{ .place }}.server.isolation=pool, or remove numWorkers
{{- end }}
{{- if and $server.memoryLimitMiB (eq $isolation "inline") }}
- {{ .place }}.server.memoryLimitMiB: needs isolation pool or process, got {{ $isolation }}; set {{ .place }}.server.isolation, or remove memoryLimitMiB
{{- end }}
{{- if and $server.cpuLimitSeconds (ne $isolation "process") }}
- {{ .place }}.server.cpuLimitSeconds: needs isolation process, got {{ $isolation }}; set {{ .place }}.server.isolation=process, or remove cpuLimitSeconds
{{- end }}
{{- range $name := list "requireSandbox" "noNetwork" }}
{{- if and (get $server $name) (eq $isolation "inline") }}
- {{ $.place }}.server.{{ $name }}: needs isolation pool or process, got {{ $isolation }}; set {{ $.place }}.server.isolation, or remove {{ $name }}
{{- end }}
{{- end }}
{{- end }}

{{- define "ludus.problems.scaling" -}}
{{- $scaling := .environment.autoscaling }}
{{- $place := printf "%s.autoscaling" .place }}
{{- if and (ne $scaling.kind "none") (ne .environment.mode "sandbox") }}
{{- if gt (int $scaling.min) (int $scaling.max) }}
- {{ $place }}: min must not exceed max, got {{ $scaling.min }} and {{ $scaling.max }}; raise max or lower min
{{- end }}
{{- if and (eq (int $scaling.min) 0) (eq $scaling.kind "hpa") }}
- {{ $place }}.min: expected at least 1 with kind hpa, which cannot start from zero, got 0; set {{ $place }}.min=1 or {{ $place }}.kind=keda
{{- end }}
{{- if lt (int $scaling.scaleDownWindowSeconds) (int $scaling.scaleDownPeriodSeconds) }}
- {{ $place }}.scaleDownWindowSeconds: expected at least scaleDownPeriodSeconds ({{ $scaling.scaleDownPeriodSeconds }}), got {{ $scaling.scaleDownWindowSeconds }}; an autoscaler would remove all pods that it added in this period at the same time; raise it
{{- end }}
{{- if gt (int $scaling.sessionsPerPod) (int .environment.capacity) }}
- {{ $place }}.sessionsPerPod: expected at most the capacity of {{ .environment.capacity }}, got {{ $scaling.sessionsPerPod }}; set it to about three quarters of the capacity
{{- end }}
{{- $timeout := .root.Values.gateway.sessions.queueTimeoutSeconds }}
{{- if and (eq (int $scaling.min) 0) (lt (int $timeout) 60) }}
- gateway.sessions.queueTimeoutSeconds: expected at least 60, so that the first open of {{ .name }} waits until its first pod runs, got {{ $timeout }}; raise it, or set {{ $place }}.min=1
{{- end }}
{{- if not .root.Values.monitoring.monitors.enabled }}
- {{ $place }}.kind: {{ $scaling.kind }} needs monitoring.monitors.enabled, because it reads the number of sessions from Prometheus; set monitoring.monitors.enabled=true, or {{ $place }}.kind=none
{{- end }}
{{- end }}
{{- end }}

{{- define "ludus.problems.runs" -}}
{{- $runs := .Values.runs }}
{{- with $runs.rollout }}
{{- if and $runs.autoscaling.enabled (or (gt (int .min) (int .replicas)) (gt (int .replicas) (int .max))) }}
- runs.rollout: min, replicas and max must be in ascending order, got {{ .min }}, {{ .replicas }} and {{ .max }}; change them, or set runs.autoscaling.enabled=false
{{- end }}
{{- end }}
{{- range $group, $count := dict "learner" $runs.learner.ranksPerPod "rollout" 0 }}
{{- $gpus := dig "limits" "nvidia.com/gpu" 0 (get $runs $group).resources | int }}
{{- if and $gpus $count (ne $gpus (int $count)) }}
- runs.learner.ranksPerPod: expected one rank for each of the {{ $gpus }} GPUs of runs.learner.resources, got {{ $count }}; set runs.learner.ranksPerPod={{ $gpus }}
{{- end }}
{{- if not (dig "limits" "memory" "" (get $runs $group).resources) }}
- runs.{{ $group }}.resources.limits.memory: needs a value, because Ray otherwise uses all memory of the node; set it, for example to 8Gi
{{- end }}
{{- end }}
{{- if not (regexMatch "^[0-9]+[.][0-9]+[.][0-9]+$" $runs.rayVersion) }}
- runs.rayVersion: expected a version such as 2.60.0, got {{ $runs.rayVersion }}; set it to the version of Ray in runs.image
{{- end }}
{{- if and $runs.queue.priorityClass (not $runs.queue.name) }}
- runs.queue.priorityClass: needs runs.queue.name; set it to the LocalQueue
{{- end }}
{{- end }}

{{- define "ludus.problems.storage" -}}
{{- $storage := .Values.storage }}
{{- $isS3 := eq $storage.weights.kind "s3" }}
{{- if and $isS3 (not $storage.s3.bucket) (not $storage.store.enabled) }}
- storage.s3.bucket: storage.weights.kind=s3 needs the name of a bucket; set it, or set storage.store.enabled=true for trials
{{- end }}
{{- if and $storage.store.enabled (not $isS3) }}
- storage.store.enabled: needs storage.weights.kind=s3, because only weights use the store, got {{ $storage.weights.kind }}; set storage.weights.kind=s3
{{- end }}
{{- if and $storage.store.enabled (not $storage.s3.existingSecret) }}
- storage.s3.existingSecret: the bundled store needs the name of a Secret; create one with: kubectl create secret generic ludus-s3 -n {{ .Release.Namespace }} --from-literal={{ $storage.s3.keys.accessKeyId }}=ludus --from-literal={{ $storage.s3.keys.secretAccessKey }}=$(openssl rand -hex 32); then set storage.s3.existingSecret=ludus-s3
{{- end }}
{{- if and $storage.store.enabled $storage.s3.endpoint }}
- storage.s3.endpoint: must be empty with storage.store.enabled, got {{ $storage.s3.endpoint }}; remove one of the two
{{- end }}
{{- if and $storage.s3.endpoint (not (regexMatch "^https?://[^/@?#[:space:]]+/?$" $storage.s3.endpoint)) }}
- storage.s3.endpoint: must be a URL with only scheme, host and port, like https://storage.example:9000; credentials go into storage.s3.existingSecret
{{- end }}
{{- if and $isS3 (not $storage.store.enabled) .Values.networkPolicy.enabled (not .Values.networkPolicy.runs) }}
- networkPolicy.runs: runs need a rule to reach the object store of storage.s3; set for example networkPolicy.runs[0].ports[0].port=443
{{- end }}
{{- if not $storage.runs.accessModes }}
- storage.runs.accessModes: at least one mode is required; set ReadWriteMany
{{- end }}
{{- end }}

{{- define "ludus.problems.routes" -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.host) }}
- ingress.host: needs the host name of the gateway; set for example ingress.host=ludus.example.com
{{- end }}
{{- range $kind := list "httpRoute" "grpcRoute" }}
{{- $route := get $.Values $kind }}
{{- if and $route.enabled (not $route.parentRefs) }}
- {{ $kind }}.parentRefs: needs the Gateway to attach to; set for example {{ $kind }}.parentRefs[0].name=NAME
{{- end }}
{{- end }}
{{- range $kind := list "ingress" "httpRoute" "grpcRoute" }}
{{- if and (get $.Values $kind).enabled $.Values.gateway.tls.existingSecret }}
- {{ $kind }}.enabled: needs a gateway without TLS, got gateway.tls.existingSecret={{ $.Values.gateway.tls.existingSecret }}; terminate TLS in one place: remove gateway.tls.existingSecret, or set gateway.service.type=LoadBalancer instead of {{ $kind }}
{{- end }}
{{- end }}
{{- end }}

{{- define "ludus.problems.kinds" -}}
{{- range $name, $environment := include "ludus.environments" . | fromJson }}
{{- if eq $environment.autoscaling.kind "keda" }}
{{- include "ludus.problems.kind" (dict "root" $ "place" (printf "environments.%s.autoscaling.kind=keda" $name) "kind" "keda.sh/v1alpha1/ScaledObject" "operator" "KEDA" "other" (printf "environments.%s.autoscaling.kind=none" $name)) }}
{{- end }}
{{- if eq $environment.mode "sandbox" }}
{{- include "ludus.problems.kind" (dict "root" $ "place" (printf "environments.%s.mode=sandbox" $name) "kind" "extensions.agents.x-k8s.io/v1beta1/SandboxWarmPool" "operator" "agent-sandbox" "other" (printf "environments.%s.mode=shared" $name)) }}
{{- end }}
{{- end }}
{{- if .Values.rayCluster.enabled }}
{{- include "ludus.problems.kind" (dict "root" . "place" "rayCluster.enabled" "kind" "ray.io/v1/RayCluster" "operator" "KubeRay" "other" "rayCluster.enabled=false") }}
{{- end }}
{{- range $route, $kind := dict "httpRoute" "HTTPRoute" "grpcRoute" "GRPCRoute" }}
{{- if (get $.Values $route).enabled }}
{{- include "ludus.problems.kind" (dict "root" $ "place" (printf "%s.enabled" $route) "kind" (printf "gateway.networking.k8s.io/v1/%s" $kind) "operator" "the Gateway API" "other" (printf "%s.enabled=false" $route)) }}
{{- end }}
{{- end }}
{{- range $what, $kind := dict "monitors" "PodMonitor" "rules" "PrometheusRule" }}
{{- if (get $.Values.monitoring $what).enabled }}
{{- include "ludus.problems.kind" (dict "root" $ "place" (printf "monitoring.%s.enabled" $what) "kind" (printf "monitoring.coreos.com/v1/%s" $kind) "operator" "the Prometheus operator" "other" (printf "monitoring.%s.enabled=false" $what)) }}
{{- end }}
{{- end }}
{{- end }}

{{/* A missing kind of object. Arguments: root, place, kind, operator, other. */}}
{{- define "ludus.problems.kind" -}}
{{- if not (.root.Capabilities.APIVersions.Has .kind) }}
- {{ .place }}: the cluster does not have {{ .kind }} of {{ .operator }}; install {{ .operator }}, or set {{ .other }}. If helm does not contact the cluster, add --api-versions {{ .kind }}
{{- end }}
{{- end }}
