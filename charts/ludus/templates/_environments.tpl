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
{{- $flags := dict "isolation" "isolation" "numWorkers" "num-workers" "numThreads" "num-threads" "stepTimeoutSeconds" "step-timeout-s" "idleTimeoutSeconds" "idle-timeout-s" "memoryLimitMiB" "memory-limit-mb" "cpuLimitSeconds" "cpu-limit-s" "acceptMissing" "accept-missing" -}}
{{- range $key, $value := .server }}
{{- if not (kindIs "invalid" $value) }}
{{- range $element := kindIs "slice" $value | ternary $value (list $value) }}
- {{ printf "--%s=%v" (get $flags $key) $element | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* The container of an environment server. Arguments: root, environment. */}}
{{- define "ludus.environmentContainer" -}}
{{- $keys := .root.Values.auth.keys -}}
{{- $secret := .root.Values.auth.existingSecret -}}
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
    - {{ printf "--max-sessions=%d" (int .environment.capacity) | quote }}
    - {{ printf "--drain-grace-s=%d" (int .environment.drainSeconds) | quote }}
    {{- include "ludus.serverArguments" .environment | nindent 4 }}
    {{- /* Workers get only the named variables. */}}
    {{- range .environment.env }}
    - {{ printf "--pass-env=%s" .name | quote }}
    {{- end }}
  env:
    {{- include "ludus.secretVariable" (dict "name" "LUDUS_SESSION_KEY" "secret" $secret "key" $keys.sessionKey) | nindent 4 }}
    {{- include "ludus.secretVariable" (dict "name" "LUDUS_ENV_TOKEN" "secret" $secret "key" $keys.environmentToken) | nindent 4 }}
    # A session id contains the server id, which is derived from the pod.
    - name: POD_UID
      valueFrom: {fieldRef: {fieldPath: metadata.uid}}
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
    - {name: tmp, mountPath: /tmp}
{{- end }}
