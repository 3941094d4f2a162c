{{/* The label of the release, added to every series. */}}
{{- define "ludus.relabelings" -}}
- {targetLabel: release, replacement: {{ .Release.Name }}}
{{- end }}
