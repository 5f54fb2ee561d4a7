{{- define "weightsync.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/*
40 characters: KubeRay makes names of pods and of the head's service from it, and cuts what is longer. Services and RayClusters want a
letter first and no dot, which a release's name need not have.
*/}}
{{- define "weightsync.fullname" -}}
{{- $name := include "weightsync.name" . -}}
{{- $full := .Values.fullnameOverride -}}
{{- if not $full -}}
{{- $full = ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $full) -}}
{{- fail (printf "fullnameOverride: not given, and %q, of the release's name, is none for a Service: it wants letters, digits and '-', a letter first" $full) -}}
{{- end -}}
{{- $full -}}
{{- end -}}

{{/* KubeRay sets app.kubernetes.io/name of its pods, so no selector uses it. */}}
{{- define "weightsync.selector" -}}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/part-of: weightsync
{{- end -}}

{{- define "weightsync.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: {{ include "weightsync.name" . | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "weightsync.selector" . }}
{{- end -}}

{{- define "weightsync.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "weightsync.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "weightsync.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{- printf "%s@%s" .repository .digest -}}
{{- else -}}
{{- printf "%s:%s" .repository (default $.Chart.AppVersion .tag) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "weightsync.tokenSecret" -}}
{{- default (printf "%s-token" (include "weightsync.fullname" .)) .Values.auth.existingSecret -}}
{{- end -}}

{{- define "weightsync.tokenKey" -}}
{{- if .Values.auth.existingSecret -}}{{ .Values.auth.existingSecretKey }}{{- else -}}token{{- end -}}
{{- end -}}

{{- define "weightsync.raySecret" -}}
{{- default (printf "%s-ray" (include "weightsync.fullname" .)) .Values.ray.existingSecret -}}
{{- end -}}

{{/* KubeRay's own name for the head's service. */}}
{{- define "weightsync.head" -}}
{{- printf "%s-head-svc:6379" (include "weightsync.fullname" .) -}}
{{- end -}}
