{{/* Rules of the NetworkPolicies. docs/kubernetes.md lists the resulting flows. */}}

{{/* Peers of a component. Arguments: root, component; environment if it belongs to one. */}}
{{- define "ludus.peers" -}}
- podSelector:
    matchLabels: {{- include "ludus.peer" . | nindent 6 }}
{{- end }}

{{- define "ludus.dnsRule" -}}
- to: {{- toYaml .Values.networkPolicy.dns.to | nindent 4 }}
  ports:
    - {protocol: UDP, port: {{ .Values.networkPolicy.dns.port }}}
    - {protocol: TCP, port: {{ .Values.networkPolicy.dns.port }}}
{{- end }}

{{- define "ludus.apiServerRule" -}}
- to:
    {{- range .Values.networkPolicy.apiServer.cidrs }}
    - ipBlock: {cidr: {{ . }}}
    {{- end }}
  ports:
    {{- range .Values.networkPolicy.apiServer.ports }}
    - {protocol: TCP, port: {{ . }}}
    {{- end }}
{{- end }}

{{- define "ludus.prometheusRule" -}}
- from: {{- toYaml .root.Values.networkPolicy.prometheus | nindent 4 }}
  ports:
    {{- range .ports }}
    - {protocol: TCP, port: {{ . }}}
    {{- end }}
{{- end }}

{{/* Gateways and Prometheus may connect; the server opens no connections. Arguments: root,
     environment. */}}
{{- define "ludus.environmentRules" -}}
ingress:
  - from:
      {{- include "ludus.peers" (dict "root" .root "component" "gateway") | nindent 6 }}
    ports:
      - {protocol: TCP, port: 18000}
  {{- with .root.Values.networkPolicy.prometheus }}
  {{- include "ludus.prometheusRule" (dict "root" $.root "ports" (list 9000)) | nindent 2 }}
  {{- end }}
  {{- with .environment.networkPolicy.ingress }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
egress: {{- toYaml .environment.networkPolicy.egress | nindent 2 }}
{{- end }}

{{/* Ray's pods that belong to no run with its own policy. */}}
{{- define "ludus.sharedRaySelector" -}}
matchLabels: {{- include "ludus.peer" (dict "root" . "component" "trainer") | nindent 2 }}
matchExpressions:
  - {key: ludus.dev/network, operator: DoesNotExist}
{{- end }}

{{/* Policy of a run, whose pods reach each other and no other run. ludus submit inserts the name. */}}
{{- define "ludus.runPolicy" -}}
{{- $trainer := dict "root" . "component" "trainer" }}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: RUN-network
  labels: {{- include "ludus.labels" $trainer | nindent 4 }}
spec:
  podSelector:
    matchLabels: {{- include "ludus.runPeer" . | nindent 6 }}
  policyTypes: [Ingress, Egress]
  ingress:
    - from:
        - podSelector:
            matchLabels: {{- include "ludus.runPeer" . | nindent 14 }}
  egress:
    - to:
        - podSelector:
            matchLabels: {{- include "ludus.runPeer" . | nindent 14 }}
{{- end }}

{{- define "ludus.runPeer" -}}
{{ include "ludus.peer" (dict "root" . "component" "trainer") }}
ludus.dev/run: RUN
{{- end }}
