{{/* Beginning of every pod's spec. Args: root, the pod's values, its component. */}}
{{- define "weightsync.pod" -}}
{{- $root := index . 0 -}}
{{- $pod := index . 1 -}}
{{- $component := index . 2 -}}
serviceAccountName: {{ include "weightsync.serviceAccount" $root | quote }}
automountServiceAccountToken: false
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
# Kubernetes' own variables for a service called weightsync would look like settings, and be refused.
enableServiceLinks: false
{{- if $root.Values.hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ int64 $root.Values.security.runAsUser }}
  runAsGroup: {{ int64 $root.Values.security.runAsGroup }}
  fsGroup: {{ int64 $root.Values.security.fsGroup }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with $pod.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with $pod.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $pod.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- $affinity := deepCopy (default dict $pod.affinity) }}
{{- if $root.Values.hostNetwork }}
# Two nodes of Ray take the same ports of a host.
{{- $apart := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels" (include "weightsync.selector" $root | fromYaml)) }}
{{- $anti := default dict $affinity.podAntiAffinity }}
{{- $required := append (default list $anti.requiredDuringSchedulingIgnoredDuringExecution) $apart }}
{{- $_ := set $anti "requiredDuringSchedulingIgnoredDuringExecution" $required }}
{{- $_ := set $affinity "podAntiAffinity" $anti }}
{{- end }}
{{- with $affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $pod.topologySpreadConstraints }}
# Without a selector a constraint counts no pods at all.
topologySpreadConstraints:
{{- $own := set (include "weightsync.selector" $root | fromYaml) "app.kubernetes.io/component" $component }}
{{- range . }}
{{- toYaml (list (merge (dict) . (ternary (dict) (dict "labelSelector" (dict "matchLabels" $own)) (hasKey . "labelSelector")))) | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Args: root, capabilities to add. */}}
{{- define "weightsync.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
    {{- with index . 1 }}
    add: {{ toJson . }}
    {{- end }}
{{- end -}}

{{/* Variables of every pod, which is a node of Ray, and those of its own. Args: root, the pod's values. */}}
{{- define "weightsync.env" -}}
{{- $root := index . 0 -}}
- name: RAY_AUTH_MODE
  value: token
- name: RAY_AUTH_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ include "weightsync.raySecret" $root | quote }}
      key: auth_token
# As `weightsync serve` sets them where it starts Ray itself.
- name: RAY_USAGE_STATS_ENABLED
  value: "0"
- name: RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO
  value: "0"
- name: RAY_DISABLE_FAILURE_SIGNAL_HANDLER
  value: "1"
- name: RAY_task_events_report_interval_ms
  value: "0"
# The user has no entry in the image's passwd, and its root is read-only.
- name: HOME
  value: /home/weightsync
- name: USER
  value: weightsync
{{- with (index . 1).env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "weightsync.mounts" -}}
- name: tmp
  mountPath: /tmp
- name: home
  mountPath: /home/weightsync
- name: shm
  mountPath: /dev/shm
{{- if or .Values.models.existingClaim .Values.models.hostPath }}
- name: models
  mountPath: {{ .Values.models.mountPath | quote }}
  readOnly: true
{{- end }}
{{- end -}}

{{/* What a pod may take of its node's disk, for requests and limits. Args: GiB, none when 0. */}}
{{- define "weightsync.ephemeral" -}}
{{- if . -}}
ephemeral-storage: {{ int64 . }}Gi
{{- end -}}
{{- end -}}

{{/* A folder on the node's disk. Args: GiB, any size when 0. */}}
{{- define "weightsync.scratch" -}}
emptyDir: {{ if . }}{sizeLimit: {{ int64 . }}Gi}{{ else }}{}{{ end }}
{{- end -}}

{{/* Args: root, size of /dev/shm, the pod's values. */}}
{{- define "weightsync.volumes" -}}
{{- $models := (index . 0).Values.models -}}
{{- $scratch := include "weightsync.scratch" (index . 2).ephemeralGiB -}}
- name: tmp
  {{ $scratch }}
- name: home
  {{ $scratch }}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ index . 1 }}
{{- if $models.existingClaim }}
- name: models
  persistentVolumeClaim:
    claimName: {{ $models.existingClaim | quote }}
    readOnly: true
{{- else if $models.hostPath }}
- name: models
  hostPath:
    path: {{ $models.hostPath | quote }}
    type: Directory
{{- end }}
{{- end -}}
