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
    - {type: Percent, value: 10, periodSeconds: {{ .scaleDownPeriodSeconds }}}
    - {type: Pods, value: 1, periodSeconds: {{ .scaleDownPeriodSeconds }}}
{{- end }}

{{/* Sessions to provide for, once however many gateways say it. Those on pods that drain are left
     out: such pods count no more, and theirs would be provided for twice. A gateway that was not
     reached by one scrape still has its queue, so what it said last counts for a minute. */}}
{{- define "ludus.sessionsWanted" -}}
{{- $labels := printf "namespace=%q,release=%q,env=%q" .root.Release.Namespace .root.Release.Name .name -}}
{{- printf "max(last_over_time(ludus_gateway_sessions{%s,state=\"active\"}[1m])) + sum(last_over_time(ludus_gateway_sessions{%s,state=\"pending\"}[1m]))" $labels $labels -}}
{{- end }}
