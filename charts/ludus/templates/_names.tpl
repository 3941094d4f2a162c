{{/* Names, labels and images. A shortened name ends with a hash, so that it stays unique. */}}

{{- define "ludus.name" -}}
{{ default "ludus" .Values.nameOverride }}
{{- end }}

{{- define "ludus.fullname" -}}
{{- $name := default (include "ludus.name" .) .Values.fullnameOverride -}}
{{- if not .Values.fullnameOverride -}}
{{- $name = ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- end -}}
{{- if gt (len $name) 40 -}}
{{- $name = printf "%s-%s" (trunc 31 $name | trimSuffix "-") (sha256sum $name | trunc 8) -}}
{{- end -}}
{{ $name }}
{{- end }}

{{/* Labels of a component. Arguments: root, component; environment if it belongs to one. */}}
{{- define "ludus.labels" -}}
{{ include "ludus.selector" . }}
app.kubernetes.io/part-of: ludus
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "ludus.selector" -}}
app.kubernetes.io/name: {{ include "ludus.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .environment }}
ludus.dev/environment: {{ . }}
{{- end }}
{{- end }}

{{/* Pod selector of a component in a NetworkPolicy. Ray's pods have a different name label. */}}
{{- define "ludus.peer" -}}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/part-of: ludus
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .environment }}
ludus.dev/environment: {{ . }}
{{- end }}
{{- end }}

{{- define "ludus.podLabels" -}}
{{ include "ludus.selector" . }}
app.kubernetes.io/part-of: ludus
{{- end }}

{{/* Arguments: root, image. */}}
{{- define "ludus.image" -}}
{{- $common := .root.Values.image -}}
{{- $place := printf "%s/%s" (default $common.registry .image.registry) .image.repository -}}
{{- if .image.digest -}}
{{ $place }}@{{ .image.digest }}
{{- else -}}
{{ $place }}:{{ default (default .root.Chart.AppVersion $common.tag) .image.tag }}
{{- end -}}
{{- end }}

{{- define "ludus.gatewayName" -}}
{{ include "ludus.fullname" . }}-gateway
{{- end }}

{{/* Arguments: root, name. */}}
{{- define "ludus.environmentName" -}}
{{ include "ludus.fullname" .root }}-env-{{ .name }}
{{- end }}

{{- define "ludus.trainerName" -}}
{{ include "ludus.fullname" . }}-trainer
{{- end }}

{{- define "ludus.runsName" -}}
{{ include "ludus.fullname" . }}-runs
{{- end }}

{{- define "ludus.storeName" -}}
{{ include "ludus.fullname" . }}-store
{{- end }}

{{- define "ludus.runsClaim" -}}
{{ default (include "ludus.runsName" .) .Values.storage.runs.existingClaim }}
{{- end }}

