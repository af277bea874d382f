{{- define "zerotune.selector" -}}
app.kubernetes.io/name: zerotune
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "zerotune.labels" -}}
{{ include "zerotune.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/component: tuner-daemon
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "zerotune.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}
