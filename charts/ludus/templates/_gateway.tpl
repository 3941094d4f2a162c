{{/* The gateway's configuration. Its pods have its hash as annotation, so a change restarts them. */}}
{{- define "ludus.gatewayConfig" -}}
{{- $gateway := .Values.gateway -}}
host = "0.0.0.0"
port = 8000
grpc_port = 18000
admin_port = 9000
max_connection_age_s = {{ $gateway.maxConnectionAgeSeconds }}
drain_grace_s = {{ $gateway.drainSeconds }}
{{- if $gateway.tenants.existingSecret }}
tenants_file = {{ printf "/etc/ludus-tenants/%s" $gateway.tenants.key | toJson }}
{{- end }}

[sessions]
linger_s = {{ $gateway.sessions.lingerSeconds }}
id_lifetime_s = {{ $gateway.sessions.idLifetimeSeconds }}
queue_size = {{ $gateway.sessions.queueSize | int }}
queue_timeout_s = {{ $gateway.sessions.queueTimeoutSeconds }}
max_group_size = {{ $gateway.sessions.maxGroupSize | int }}

[servers]
token_env = "LUDUS_ENV_TOKEN"
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
lease = {{ $object }}
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

{{- define "ludus.gatewayVariables" -}}
{{- $secret := .Values.auth.existingSecret -}}
{{- $keys := .Values.auth.keys -}}
{{ include "ludus.secretVariable" (dict "name" "LUDUS_SESSION_KEY" "secret" $secret "key" $keys.sessionKey) }}
{{ include "ludus.secretVariable" (dict "name" "LUDUS_ENV_TOKEN" "secret" $secret "key" $keys.environmentToken) }}
{{- if not .Values.gateway.tenants.existingSecret }}
{{ include "ludus.secretVariable" (dict "name" "LUDUS_GATEWAY_TOKEN" "secret" $secret "key" $keys.gatewayToken) }}
{{- end }}
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
