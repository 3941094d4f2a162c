{{/* Credentials for the bucket; empty if the pods' identity grants access. */}}
{{- define "ludus.storeVariables" -}}
{{- with .Values.storage.s3 -}}
{{- if .existingSecret -}}
{{ include "ludus.secretVariable" (dict "name" "AWS_ACCESS_KEY_ID" "secret" .existingSecret "key" .keys.accessKeyId) }}
{{ include "ludus.secretVariable" (dict "name" "AWS_SECRET_ACCESS_KEY" "secret" .existingSecret "key" .keys.secretAccessKey) }}
{{- end -}}
{{- end -}}
{{- end }}

{{/* The bucket; the bundled store has a default name. */}}
{{- define "ludus.bucket" -}}
{{- default (ternary "ludus" "" .Values.storage.store.enabled) .Values.storage.s3.bucket -}}
{{- end }}

{{/* The `weights` of a run, as JSON. */}}
{{- define "ludus.weights" -}}
{{- $weights := dict "kind" .Values.storage.weights.kind -}}
{{- if eq .Values.storage.weights.kind "s3" -}}
{{- $s3 := .Values.storage.s3 -}}
{{- $_ := set $weights "bucket" (include "ludus.bucket" .) -}}
{{- $_ := set $weights "prefix" $s3.prefix -}}
{{- $_ := set $weights "region" $s3.region -}}
{{- $bundled := printf "http://%s.%s.svc:8333" (include "ludus.storeName" .) .Release.Namespace -}}
{{- $endpoint := default (ternary $bundled "" .Values.storage.store.enabled) $s3.endpoint -}}
{{- $_ := set $weights "endpoint" (ternary $endpoint nil (ne $endpoint "")) -}}
{{- end -}}
{{ toJson $weights }}
{{- end }}
