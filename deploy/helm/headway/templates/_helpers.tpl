{{/* The release's name, with the chart's name in it. */}}
{{- define "headway.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "headway.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "headway.labels" -}}
{{ include "headway.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "headway.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default (printf "%s-%s" .Chart.AppVersion .Values.device) }}
{{- end }}

{{/* The secret with the API keys; empty without keys. */}}
{{- define "headway.keys" -}}
{{- if .Values.auth.existingSecret }}{{ .Values.auth.existingSecret }}
{{- else if .Values.auth.keys }}{{ include "headway.name" . }}-keys{{ end }}
{{- end }}

{{/* The claim for /cache; empty for an emptyDir. */}}
{{- define "headway.cacheClaim" -}}
{{- if .Values.cache.existingClaim }}{{ .Values.cache.existingClaim }}
{{- else if .Values.cache.persistent }}{{ include "headway.name" . }}-cache{{ end }}
{{- end }}

{{- define "headway.scheme" -}}
{{ ternary "HTTPS" "HTTP" (ne .Values.tls.existingSecret "") }}
{{- end }}

{{/* One argument a line: what the chart decides, then the operator's options. */}}
{{- define "headway.arguments" -}}
{{ with .Values.model }}- {{ . | quote }}
{{ end }}- --port=8000
- --lame-duck-s={{ .Values.drain.lameDuckSeconds }}
- --drain-timeout-s={{ .Values.drain.timeoutSeconds }}
{{- if include "headway.keys" . }}
- --api-key-file=/etc/headway/keys/api-keys
{{- end }}
{{- if .Values.tls.existingSecret }}
- --ssl-certfile=/etc/headway/tls/tls.crt
- --ssl-keyfile=/etc/headway/tls/tls.key
{{- end }}
{{- if .Values.serviceClasses }}
- --service-classes=/etc/headway/classes/classes.toml
{{- end }}
{{- if .Values.kvDisk.enabled }}
- --disk-cache=/kv
{{- /* A tenth is left for the file system. */}}
- --disk-cache-size={{ div (mul .Values.kvDisk.sizeGiB 9) 10 }}GiB
- --host-cache-memory={{ .Values.kvDisk.hostMemoryGiB }}GiB
{{- end }}
{{- range $name, $value := .Values.options }}
{{- if kindIs "bool" $value }}
- --{{ ternary "" "no-" $value }}{{ $name }}
{{- else if kindIs "slice" $value }}
- --{{ $name }}
{{- range $value }}
- {{ . | quote }}
{{- end }}
{{- else if kindIs "float64" $value }}
- {{ printf "--%s=%s" $name ($value | toJson) | quote }}
{{- else if not (kindIs "invalid" $value) }}
- {{ printf "--%s=%v" $name $value | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* What would install but not work. */}}
{{- define "headway.check" -}}
{{- $several := or .Values.autoscaling.enabled (gt (int .Values.replicas) 1) }}
{{- if and $several (include "headway.cacheClaim" .) (ne .Values.cache.accessMode "ReadWriteMany") }}
{{- fail "Several pods cannot share a claim that only one node can mount: set cache.accessMode=ReadWriteMany, or leave the claim out." }}
{{- end }}
{{- if and .Values.auth.existingSecret .Values.auth.keys }}
{{- fail "auth.existingSecret and auth.keys are two sources of API keys: give one of them." }}
{{- end }}
{{- if gt (int .Values.drain.lameDuckSeconds) (int .Values.drain.timeoutSeconds) }}
{{- fail "drain.lameDuckSeconds is part of drain.timeoutSeconds and must not be longer." }}
{{- end }}
{{- range list "host" "port" "api-key" "api-key-file" "ssl-certfile" "ssl-keyfile" "lame-duck-s" "drain-timeout-s" "service-classes" "disk-cache" "disk-cache-size" "host-cache-memory" }}
{{- if hasKey $.Values.options . }}
{{- if not (and (eq . "host-cache-memory") (not $.Values.kvDisk.enabled)) }}
{{- fail (printf "options.%s is set by the chart: use its own value for it (values.yaml lists them)." .) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
