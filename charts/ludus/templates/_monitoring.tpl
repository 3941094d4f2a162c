{{/* Every series says of which release it is. */}}
{{- define "ludus.relabelings" -}}
- {targetLabel: release, replacement: {{ .Release.Name }}}
{{- end }}
