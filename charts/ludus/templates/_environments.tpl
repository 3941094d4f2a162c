{{/* The environments, each merged with the defaults, as JSON by name. */}}

{{- define "ludus.environments" -}}
{{- $all := dict -}}
{{- range $name, $given := .Values.environments -}}
{{- $_ := set $all $name (include "ludus.over" (dict "base" $.Values.environmentDefaults "given" $given) | fromJson) -}}
{{- end -}}
{{ toJson $all }}
{{- end }}

{{/* The environments of mode shared, whose pods exist before their sessions. */}}
{{- define "ludus.sharedEnvironments" -}}
{{- $shared := dict -}}
{{- range $name, $environment := include "ludus.environments" . | fromJson -}}
{{- if eq $environment.mode "shared" -}}
{{- $_ := set $shared $name $environment -}}
{{- end -}}
{{- end -}}
{{ toJson $shared }}
{{- end }}

{{/* A deep merge of two maps. Sprig's merge treats 0 and false as unset; here only null is unset.
     `options` are replaced as a whole. */}}
{{- define "ludus.over" -}}
{{- $result := deepCopy .base -}}
{{- range $key, $value := .given -}}
{{- $below := get $result $key -}}
{{- if and (kindIs "map" $value) (kindIs "map" $below) (not (has $key (list "options" "nodeSelector" "affinity" "podAnnotations"))) -}}
{{- $_ := set $result $key (include "ludus.over" (dict "base" $below "given" $value) | fromJson) -}}
{{- else if not (kindIs "invalid" $value) -}}
{{- $_ := set $result $key $value -}}
{{- end -}}
{{- end -}}
{{ toJson $result }}
{{- end }}

{{/* The server's command-line arguments, in the order of its --help. Arguments: environment. */}}
{{- define "ludus.serverArguments" -}}
{{- $flags := dict "isolation" "isolation" "numWorkers" "num-workers" "numThreads" "num-threads" "stepTimeoutSeconds" "step-timeout-s" "idleTimeoutSeconds" "idle-timeout-s" "memoryLimitMiB" "memory-limit-mb" "cpuLimitSeconds" "cpu-limit-s" "acceptMissing" "accept-missing" "deterministic" "deterministic" "requireSandbox" "require-sandbox" "noNetwork" "no-network" -}}
{{- range $key, $value := .server }}
{{- if kindIs "bool" $value }}
{{- if $value }}
- {{ printf "--%s" (get $flags $key) | quote }}
{{- end }}
{{- else if not (kindIs "invalid" $value) }}
{{- range $element := kindIs "slice" $value | ternary $value (list $value) }}
- {{ printf "--%s=%v" (get $flags $key) $element | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* The container of an environment server. Arguments: root, environment. */}}
{{- define "ludus.environmentContainer" -}}
- name: environment
  image: {{ include "ludus.image" (dict "root" .root "image" .environment.image) }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  {{- with .environment.command }}
  command: {{- toYaml . | nindent 4 }}
  {{- end }}
  args:
    - {{ .environment.package | quote }}
    {{- /* The kubelet would replace $(NAME) by a variable. */}}
    - {{ printf "--options=%s" (toJson .environment.options | replace "$(" "$$(") | quote }}
    - --host=0.0.0.0
    - --port=8000
    - --grpc-port=18000
    - --admin-port=9000
    - --token-file=/run/ludus/token
    - --server-key-file=/run/ludus/server-key
    - {{ printf "--max-sessions=%d" (int .environment.capacity) | quote }}
    - {{ printf "--drain-grace-s=%d" (int .environment.drainSeconds) | quote }}
    {{- include "ludus.serverArguments" .environment | nindent 4 }}
    {{- /* Workers get only the named variables. */}}
    {{- range .environment.env }}
    - {{ printf "--pass-env=%s" .name | quote }}
    {{- end }}
  env:
    {{- include "ludus.serverIdVariable" .environment | nindent 4 }}
    - {name: HOME, value: /tmp}
    {{- with .environment.env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  ports:
    - {name: http, containerPort: 8000}
    - {name: grpc, containerPort: 18000}
    - {name: admin, containerPort: 9000}
  {{- include "ludus.probes" . | nindent 2 }}
  {{- with .environment.resources }}
  resources: {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext: {{- include "ludus.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - {name: server-secrets, mountPath: /run/ludus, readOnly: true}
    - {name: tmp, mountPath: /tmp}
{{- end }}

{{/* The variable with the server's id, which session ids contain. A gateway reads the uids of pods from
     EndpointSlices, and the names of sandboxes from their claims. Arguments: the environment. */}}
{{- define "ludus.serverIdVariable" -}}
{{- if eq .mode "sandbox" -}}
- name: LUDUS_SERVER_ID
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- else -}}
- name: POD_UID
  valueFrom: {fieldRef: {fieldPath: metadata.uid}}
{{- end }}
{{- end }}

{{/* The sidecar that derives the server's secrets from those of the fleet. Code of the environment
     cannot reach it: it has its own container and the gateway's image. Arguments: root,
     environment. */}}
{{- define "ludus.serverSecretsContainer" -}}
- name: server-secrets
  image: {{ include "ludus.image" (dict "root" .root "image" .root.Values.gateway.image) }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  # A sidecar: it starts before the server and ends after it.
  restartPolicy: Always
  command: [python, -m, ludus.env.serving.server_keys]
  args:
    - --session-key-file=/etc/ludus-secrets/session-key
    - --token-file=/etc/ludus-secrets/environment-token
    - --folder=/run/ludus
  env:
    {{- include "ludus.serverIdVariable" .environment | nindent 4 }}
  # The server starts when its secrets exist.
  startupProbe:
    exec: {command: [test, -s, /run/ludus/server-key]}
    periodSeconds: 1
    timeoutSeconds: 5
    failureThreshold: 120
  resources:
    requests: {cpu: 5m, memory: 32Mi}
    limits: {memory: 64Mi}
  securityContext: {{- include "ludus.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - {name: secrets, mountPath: /etc/ludus-secrets, readOnly: true}
    - {name: server-secrets, mountPath: /run/ludus}
{{- end }}

{{/* The volumes of an environment's pod. Arguments: root. */}}
{{- define "ludus.environmentVolumes" -}}
{{ include "ludus.secretVolume" (dict "root" .root "items" (dict "sessionKey" "session-key" "environmentToken" "environment-token")) }}
- name: server-secrets
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
- {name: tmp, emptyDir: {}}
{{- end }}
