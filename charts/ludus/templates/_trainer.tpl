{{/* The Ray cluster of a run: a head for the driver, a fixed number of learners, and rollout
     workers. A run's RayJob and the permanent RayCluster use it. */}}

{{- define "ludus.rayVariables" -}}
{{- $values := .root.Values -}}
- {name: HOME, value: /tmp}
- {name: XDG_CACHE_HOME, value: /cache}
- {name: HF_HOME, value: /cache/huggingface}
- {name: VLLM_CACHE_ROOT, value: /cache/vllm}
- {name: TORCHINDUCTOR_CACHE_DIR, value: /cache/inductor}
- {name: TRITON_CACHE_DIR, value: /cache/triton}
# The token that a run sends to the gateway.
{{ include "ludus.secretVariable" (dict "name" "LUDUS_ENV_TOKEN" "secret" $values.auth.existingSecret "key" $values.auth.keys.gatewayToken) }}
{{- with include "ludus.storeVariables" .root }}
{{ . }}
{{- end }}
{{- if $values.gateway.tls.existingSecret }}
- {name: GRPC_DEFAULT_SSL_ROOTS_FILE_PATH, value: /etc/ludus-tls/ca.crt}
{{- end }}
{{- if ne .group "head" }}
- {name: RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S, value: {{ $values.runs.drainSeconds | quote }}}
{{- end }}
{{- range list $values.runs.env .part.env }}
{{- with . }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- end }}

{{/* Arguments: root, group, part, ports, config: whether the run's configuration is mounted. */}}
{{- define "ludus.rayTemplate" -}}
{{- $runs := .root.Values.runs -}}
{{- $isHead := eq .group "head" -}}
metadata:
  labels:
    {{- include "ludus.peer" (dict "root" .root "component" "trainer") | nindent 4 }}
    ludus.dev/group: {{ .group }}
  {{- if or $runs.podAnnotations (ne .group "rollout") }}
  annotations:
    {{- if ne .group "rollout" }}
    # Moving the pod would end the run or reset it to its checkpoint.
    cluster-autoscaler.kubernetes.io/safe-to-evict: "false"
    karpenter.sh/do-not-disrupt: "true"
    {{- end }}
    {{- with $runs.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
spec:
  serviceAccountName: {{ include "ludus.trainerName" .root }}
  automountServiceAccountToken: {{ and $isHead $runs.autoscaling.enabled }}
  restartPolicy: {{ ternary "Never" "Always" (or $isHead $runs.autoscaling.enabled) }}
  terminationGracePeriodSeconds: {{ add $runs.drainSeconds 30 }}
  {{- $part := set (deepCopy .part) "priorityClassName" $runs.priorityClassName }}
  {{- include "ludus.podFields" (dict "root" .root "part" $part) | nindent 2 }}
  containers:
    - name: {{ ternary "ray-head" "ray-worker" $isHead }}
      image: {{ include "ludus.image" (dict "root" .root "image" $runs.image) }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      env: {{- include "ludus.rayVariables" . | nindent 8 }}
      ports:
        {{- if $isHead }}
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        - {name: client, containerPort: 10001}
        - {name: as-metrics, containerPort: 44217}
        - {name: dash-metrics, containerPort: 44227}
        - {name: run-metrics, containerPort: {{ $runs.metricsPort }}}
        {{- end }}
        - {name: metrics, containerPort: 8080}
      resources: {{- toYaml .part.resources | nindent 8 }}
      securityContext: {{- include "ludus.containerSecurity" .root | nindent 8 }}
      volumeMounts:
        - {name: runs, mountPath: /runs}
        - {name: cache, mountPath: /cache}
        - {name: shared-memory, mountPath: /dev/shm}
        - {name: tmp, mountPath: /tmp}
        {{- if .config }}
        - {name: run-config, mountPath: /etc/ludus, readOnly: true}
        {{- end }}
        {{- if .root.Values.gateway.tls.existingSecret }}
        - {name: gateway-ca, mountPath: /etc/ludus-tls, readOnly: true}
        {{- end }}
  volumes: {{- include "ludus.rayVolumes" . | nindent 4 }}
{{- end }}

{{- define "ludus.rayVolumes" -}}
- name: runs
  persistentVolumeClaim: {claimName: {{ include "ludus.runsClaim" .root }}}
- name: cache
  {{- with .root.Values.runs.cache }}
  {{- if .existingClaim }}
  persistentVolumeClaim: {claimName: {{ .existingClaim }}}
  {{- else }}
  emptyDir: {sizeLimit: {{ .size }}}
  {{- end }}
  {{- end }}
- name: shared-memory
  emptyDir: {medium: Memory, sizeLimit: {{ .part.shmSize }}}
- {name: tmp, emptyDir: {}}
{{- if .config }}
- name: run-config
  configMap: {name: RUN-config}
{{- end }}
{{- with .root.Values.gateway.tls.existingSecret }}
- name: gateway-ca
  secret: {secretName: {{ . }}, items: [{key: ca.crt, path: ca.crt}]}
{{- end }}
{{- end }}

{{/* Arguments: part, resource, count. The value passes a shell, so it needs double quotes. */}}
{{- define "ludus.rayStartParams" -}}
resources: {{ toJson (dict .resource .count) | quote | quote }}
{{- with .part.numCpus }}
num-cpus: {{ . | quote }}
{{- end }}
{{- end }}

{{/* Arguments: root, config, withReplicas: false if another object sets the number of pods. */}}
{{- define "ludus.rayCluster" -}}
{{- $runs := .root.Values.runs -}}
{{- $learner := $runs.learner -}}
{{- $rollout := $runs.rollout -}}
rayVersion: {{ $runs.rayVersion | quote }}
enableInTreeAutoscaling: {{ $runs.autoscaling.enabled }}
{{- if $runs.autoscaling.enabled }}
autoscalerOptions:
  version: v2
  upscalingMode: {{ $runs.autoscaling.upscalingMode }}
  idleTimeoutSeconds: {{ $runs.autoscaling.idleTimeoutSeconds }}
  resources: {{- toYaml $runs.autoscaling.resources | nindent 4 }}
  securityContext: {{- include "ludus.containerSecurity" .root | nindent 4 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
{{- end }}
authOptions: {mode: token}
headGroupSpec:
  rayStartParams:
    dashboard-host: 0.0.0.0
    # Ray schedules no task here unless the task requests the resource `head`.
    num-cpus: "0"
    {{- include "ludus.rayStartParams" (dict "part" dict "resource" "head" "count" 1000) | nindent 4 }}
  template: {{- include "ludus.rayTemplate" (dict "root" .root "group" "head" "part" $runs.head "config" .config) | nindent 4 }}
workerGroupSpecs:
  - groupName: learner
    {{- if .withReplicas }}
    replicas: {{ $learner.replicas }}
    {{- end }}
    minReplicas: {{ $learner.replicas }}
    maxReplicas: {{ $learner.replicas }}
    rayStartParams: {{- include "ludus.rayStartParams" (dict "part" $learner "resource" "learner" "count" $learner.ranksPerPod) | nindent 6 }}
    template: {{- include "ludus.rayTemplate" (dict "root" .root "group" "learner" "part" $learner "config" .config) | nindent 6 }}
  - groupName: rollout
    {{- if .withReplicas }}
    replicas: {{ $rollout.replicas }}
    {{- end }}
    minReplicas: {{ ternary $rollout.min $rollout.replicas $runs.autoscaling.enabled }}
    maxReplicas: {{ ternary $rollout.max $rollout.replicas $runs.autoscaling.enabled }}
    {{- if $runs.autoscaling.enabled }}
    idleTimeoutSeconds: {{ $runs.autoscaling.idleTimeoutSeconds }}
    {{- end }}
    rayStartParams: {{- include "ludus.rayStartParams" (dict "part" $rollout "resource" "rollout" "count" $rollout.workersPerPod) | nindent 6 }}
    template: {{- include "ludus.rayTemplate" (dict "root" .root "group" "rollout" "part" $rollout "config" .config) | nindent 6 }}
{{- end }}

{{/* A complete RayJob; `ludus submit` replaces RUN by the run's name. */}}
{{- define "ludus.rayJob" -}}
{{- $runs := .Values.runs -}}
apiVersion: ray.io/v1
kind: RayJob
metadata:
  name: RUN
  namespace: {{ .Release.Namespace }}
  labels:
    {{- include "ludus.labels" (dict "root" . "component" "trainer") | nindent 4 }}
    {{- with $runs.queue.name }}
    kueue.x-k8s.io/queue-name: {{ . }}
    {{- end }}
    {{- with $runs.queue.priorityClass }}
    kueue.x-k8s.io/priority-class: {{ . }}
    {{- end }}
  {{- if and $runs.queue.name $runs.autoscaling.enabled }}
  annotations:
    kueue.x-k8s.io/elastic-job: "true"
  {{- end }}
spec:
  submissionMode: HTTPMode
  entrypoint: python -m ludus.trainer train --config /etc/ludus/run.json --resume=auto
  metadata: {run_id: RUN}
  # Kueue needs this, and the volume keeps a run's results.
  shutdownAfterJobFinishes: true
  ttlSecondsAfterFinished: {{ $runs.ttlSecondsAfterFinished }}
  backoffLimit: {{ $runs.backoffLimit }}
  {{- with $runs.activeDeadlineSeconds }}
  activeDeadlineSeconds: {{ . }}
  {{- end }}
  {{- with $runs.preRunningDeadlineSeconds }}
  preRunningDeadlineSeconds: {{ . }}
  {{- end }}
  rayClusterSpec: {{- include "ludus.rayCluster" (dict "root" . "config" true "withReplicas" true) | nindent 4 }}
{{- end }}

{{/* Properties of the release for `ludus submit`. */}}
{{- define "ludus.platform" -}}
{{- $environments := dict -}}
{{- range $name, $environment := include "ludus.environments" . | fromJson -}}
{{- $address := include "ludus.grpcAddress" (dict "root" $ "name" $name) -}}
{{- $http := printf "%s/envs/%s" (include "ludus.httpAddress" $) $name -}}
{{- $_ := set $environments $name (dict "address" $address "http" $http "package" $environment.package "options" $environment.options) -}}
{{- end -}}
{{- $platform := dict "release" .Release.Name "namespace" .Release.Namespace -}}
{{- $_ := set $platform "environments" $environments -}}
{{- $_ := set $platform "gateway" (dict "service" (include "ludus.gatewayName" .) "http" (include "ludus.httpAddress" .) "grpc" (include "ludus.grpcAddress" (dict "root" . "name" "") | trimSuffix "/")) -}}
{{- $_ := set $platform "output_dir" "/runs" -}}
{{- $_ := set $platform "weights" (include "ludus.weights" . | fromJson) -}}
{{- $_ := set $platform "token_secret" .Values.auth.existingSecret -}}
{{- $_ := set $platform "queue" (ternary .Values.runs.queue.name nil (ne .Values.runs.queue.name "")) -}}
{{- $_ := set $platform "ray_version" .Values.runs.rayVersion -}}
{{- $_ := set $platform "metrics_port" (int .Values.runs.metricsPort) -}}
{{- $_ := set $platform "learner" (dict "per_pod" (int .Values.runs.learner.ranksPerPod)) -}}
{{- $_ := set $platform "rollout" (dict "per_pod" (int .Values.runs.rollout.workersPerPod)) -}}
{{ toPrettyJson $platform }}
{{- end }}
