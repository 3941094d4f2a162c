{{/* The gateway's configuration. Its pods have its hash as annotation, so a change restarts them. */}}
{{- define "ludus.gatewayConfig" -}}
{{- $gateway := .Values.gateway -}}
host = "0.0.0.0"
port = 8000
grpc_port = 18000
admin_port = 9000
max_connection_age_s = {{ $gateway.maxConnectionAgeSeconds }}
drain_grace_s = {{ $gateway.drainSeconds }}
session_key_file = "/etc/ludus-secrets/session-key"
{{- if $gateway.tenants.existingSecret }}
tenants_file = {{ printf "/etc/ludus-tenants/%s" $gateway.tenants.key | toJson }}
{{- else }}
token_file = "/etc/ludus-secrets/gateway-token"
{{- end }}

[sessions]
linger_s = {{ $gateway.sessions.lingerSeconds }}
id_lifetime_s = {{ $gateway.sessions.idLifetimeSeconds }}
queue_size = {{ $gateway.sessions.queueSize | int }}
queue_timeout_s = {{ $gateway.sessions.queueTimeoutSeconds }}
max_group_size = {{ $gateway.sessions.maxGroupSize | int }}

[servers]
token_file = "/etc/ludus-secrets/environment-token"
derive_tokens = true
unreachable_after_s = {{ $gateway.servers.unreachableAfterSeconds }}
retry_within_s = {{ $gateway.servers.retryWithinSeconds }}
call_timeout_s = {{ $gateway.servers.callTimeoutSeconds }}
{{- if $gateway.tls.existingSecret }}

[tls]
cert = "/etc/ludus-tls/tls.crt"
key = "/etc/ludus-tls/tls.key"
{{- end }}

[environments]
{{- range $name, $environment := include "ludus.environments" . | fromJson }}
{{- $object := include "ludus.environmentName" (dict "root" $ "name" $name) | toJson }}
[environments.{{ $name }}]
kind = {{ ternary "sandbox" "kubernetes" (eq $environment.mode "sandbox") | toJson }}
namespace = {{ $.Release.Namespace | toJson }}
{{- if eq $environment.mode "sandbox" }}
warm_pool = {{ $object }}
{{- else }}
service = {{ $object }}
{{- if include "ludus.hasDeletionCosts" (dict "root" $ "environment" $environment) }}
lease = {{ $object }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* The address of an environment for clients in the cluster. Arguments: root, name. */}}
{{- define "ludus.grpcAddress" -}}
{{ ternary "grpcs" "grpc" (not (empty .root.Values.gateway.tls.existingSecret)) }}://{{ include "ludus.gatewayName" .root }}.{{ .root.Release.Namespace }}.svc:18000/{{ .name }}
{{- end }}

{{- define "ludus.httpAddress" -}}
{{ ternary "https" "http" (not (empty .Values.gateway.tls.existingSecret)) }}://{{ include "ludus.gatewayName" . }}.{{ .Release.Namespace }}.svc:8000
{{- end }}

{{/* "true" if the gateway marks the environment's pods for a scale-in. Arguments: root, environment. */}}
{{- define "ludus.hasDeletionCosts" -}}
{{- if and .root.Values.gateway.deletionCosts (eq .environment.mode "shared") (ne .environment.autoscaling.kind "none") -}}
true
{{- end -}}
{{- end }}

{{/* The name of the gateway's cluster-wide objects. */}}
{{- define "ludus.gatewayPolicyName" -}}
{{ include "ludus.gatewayName" . }}-{{ sha256sum .Release.Namespace | trunc 8 }}
{{- end }}

{{/* The gateway's secrets. It reads changed files again. */}}
{{- define "ludus.gatewaySecrets" -}}
{{- $items := dict "sessionKey" "session-key" "environmentToken" "environment-token" -}}
{{- if not .Values.gateway.tenants.existingSecret -}}
{{- $_ := set $items "gatewayToken" "gateway-token" -}}
{{- end -}}
{{ include "ludus.secretVolume" (dict "root" . "items" $items) }}
{{- end }}

{{- define "ludus.gatewayVariables" -}}
- {name: HOME, value: /tmp}
{{- with .Values.gateway.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "ludus.gatewayPorts" -}}
{{- $isSecure := not (empty .Values.gateway.tls.existingSecret) -}}
- {name: http, port: 8000, targetPort: http, appProtocol: {{ ternary "https" "http" $isSecure }}}
- {name: grpc, port: 18000, targetPort: grpc{{ if not $isSecure }}, appProtocol: kubernetes.io/h2c{{ end }}}
{{- end }}
