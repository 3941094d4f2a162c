{{/* Up at once, by as much as there is; down slowly, by the highest number of the window. */}}
{{- define "ludus.scalingBehavior" -}}
scaleUp:
  stabilizationWindowSeconds: 0
  selectPolicy: Max
  policies:
    - {type: Percent, value: 100, periodSeconds: 15}
    - {type: Pods, value: 8, periodSeconds: 15}
scaleDown:
  stabilizationWindowSeconds: {{ .scaleDownWindowSeconds }}
  selectPolicy: Max
  policies:
    - {type: Percent, value: 10, periodSeconds: 60}
    - {type: Pods, value: 1, periodSeconds: 60}
{{- end }}

{{/* Sessions to provide for, once however many gateways say it. Those on pods that drain are left
     out: such pods count no more, and theirs would be provided for twice. */}}
{{- define "ludus.sessionsWanted" -}}
{{- $labels := printf "namespace=%q,release=%q,env=%q" .root.Release.Namespace .root.Release.Name .name -}}
{{- printf "max(ludus_gateway_sessions{%s,state=\"active\"}) + sum(ludus_gateway_sessions{%s,state=\"pending\"})" $labels $labels -}}
{{- end }}
