{{/* Scaling behavior: up immediately and without limit, down slowly after the window. */}}
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

{{/* The number of sessions that pods are needed for, counted once for all gateways. Sessions on
     draining pods do not count, because these pods do not count either. A gateway that one scrape
     missed still has its queue, so its last value counts for a minute. */}}
{{- define "ludus.sessionsWanted" -}}
{{- $labels := printf "namespace=%q,release=%q,env=%q" .root.Release.Namespace .root.Release.Name .name -}}
{{- printf "max(last_over_time(ludus_gateway_sessions{%s,state=\"active\"}[1m])) + sum(last_over_time(ludus_gateway_sessions{%s,state=\"pending\"}[1m]))" $labels $labels -}}
{{- end }}
