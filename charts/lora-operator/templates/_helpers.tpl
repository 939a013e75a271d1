{{/* The release's full name: at most 52 characters, so that suffixes fit into 63. */}}
{{- define "lora-operator.fullname" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "lora-operator.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "lora-operator.labels" -}}
{{ include "lora-operator.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "lora-operator.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "lora-operator.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* Names of Secrets as a comma-separated list: the given ones, else the stores' own. Arguments: given, stores, key. */}}
{{- define "lora-operator.secretNames" -}}
{{- $names := .given -}}
{{- if not $names -}}
{{- range .stores -}}
{{- with (get (default dict .credentials) $.key) -}}
{{- $names = append $names . -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if has "*" $names -}}
{{- $names = list -}}
{{- end -}}
{{- $names | uniq | sortAlpha | join "," -}}
{{- end -}}

{{/* A rule to read the Secrets of a comma-separated list, all of them when it is empty. */}}
{{- define "lora-operator.secretRule" -}}
- apiGroups: [""]
  resources: [secrets]
  verbs: [get]
{{- with . }}
  resourceNames:
{{- range splitList "," . }}
    - {{ . }}
{{- end }}
{{- end }}
{{- end -}}
