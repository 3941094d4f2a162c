{{/* Common parts of all pods, which comply with the profile `restricted`. */}}

{{- define "ludus.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{/* A variable from a Secret. Arguments: name of the variable, secret, key. */}}
{{- define "ludus.secretVariable" -}}
- name: {{ .name }}
  valueFrom: {secretKeyRef: {name: {{ .secret }}, key: {{ .key }}}}
{{- end }}

{{/* A volume with keys of the Secret auth.existingSecret as files. Arguments: root; items: file names by
     field of auth.keys. */}}
{{- define "ludus.secretVolume" -}}
{{- $keys := .root.Values.auth.keys -}}
- name: secrets
  secret:
    secretName: {{ .root.Values.auth.existingSecret }}
    # Only the pod's group may read the files.
    defaultMode: 0440
    items:
      {{- range $field, $file := .items }}
      - {key: {{ get $keys $field }}, path: {{ $file }}}
      {{- end }}
{{- end }}

{{/* Common fields of every pod. Arguments: root; part: its values; labels: the pods to spread. */}}
{{- define "ludus.podFields" -}}
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .part.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
tolerations:
  {{- with .part.tolerations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- range list "not-ready" "unreachable" }}
  - key: node.kubernetes.io/{{ . }}
    operator: Exists
    effect: NoExecute
    tolerationSeconds: {{ $.root.Values.lostNodeSeconds }}
  {{- end }}
{{- range $field := list "nodeSelector" "affinity" "topologySpreadConstraints" }}
{{- with get $.part $field }}
{{ $field }}: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- if and .labels (not .part.affinity) }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- .labels | nindent 8 }}
{{- end }}
{{- end }}

{{/* Probes of the admin port, which needs neither TLS nor a token. */}}
{{- define "ludus.probes" -}}
startupProbe:
  httpGet: {path: /healthz, port: admin}
  periodSeconds: 2
  failureThreshold: 60
readinessProbe:
  httpGet: {path: /readyz, port: admin}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 3
livenessProbe:
  httpGet: {path: /healthz, port: admin}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}
