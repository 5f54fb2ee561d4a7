{{/* Spec of a worker pod. Args: root, sizing. */}}
{{- define "weightsync.worker" -}}
{{- $root := index . 0 -}}
{{- $sizing := index . 1 -}}
{{- $workers := $root.Values.workers -}}
{{- $rdma := $workers.rdma -}}
{{- include "weightsync.pod" (list $root $workers "worker") }}
{{- with $workers.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
containers:
  - name: ray-worker
    image: {{ include "weightsync.image" $root | quote }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    {{- include "weightsync.containerSecurity" (list $root (ternary list (list "IPC_LOCK") (not (and $rdma.enabled $rdma.ipcLock)))) | nindent 4 }}
    ports:
      - name: metrics
        containerPort: 8080
    env: {{- include "weightsync.env" (list $root $workers) | nindent 6 }}
      - name: VLLM_CACHE_ROOT
        value: /cache/vllm
      - name: TORCHINDUCTOR_CACHE_DIR
        value: /cache/inductor
      - name: TRITON_CACHE_DIR
        value: /cache/triton
      - name: FLASHINFER_WORKSPACE_BASE
        value: /cache
      - name: CUDA_CACHE_PATH
        value: /cache/cuda
    resources:
      {{- range $kind := list "requests" "limits" }}
      {{ $kind }}:
        cpu: {{ $workers.cpu | int64 | toString | quote }}
        memory: {{ $sizing.memoryGiB }}Gi
        {{- with include "weightsync.ephemeral" $workers.ephemeralGiB }}
        {{ . }}
        {{- end }}
        {{- if $sizing.gpus }}
        {{ $workers.gpuResource }}: {{ $sizing.gpus }}
        {{- end }}
        {{- if $rdma.enabled }}
        {{ $rdma.resource }}: {{ int64 $rdma.count }}
        {{- end }}
      {{- end }}
    volumeMounts:
      {{- include "weightsync.mounts" $root | nindent 6 }}
      - name: cache
        mountPath: /cache
      # For a trainer that runs in this pod; the engines know it anyway.
      - name: token
        mountPath: /etc/weightsync
        readOnly: true
volumes:
  {{- include "weightsync.volumes" (list $root (printf "%vGi" $sizing.shmGiB) $workers) | nindent 2 }}
  - name: cache
    {{- if $root.Values.cache.enabled }}
    persistentVolumeClaim:
      claimName: {{ default (printf "%s-cache" (include "weightsync.fullname" $root)) $root.Values.cache.existingClaim | quote }}
    {{- else }}
    {{ include "weightsync.scratch" $workers.ephemeralGiB }}
    {{- end }}
  - name: token
    secret:
      secretName: {{ include "weightsync.tokenSecret" $root | quote }}
      items:
        - key: {{ include "weightsync.tokenKey" $root | quote }}
          path: token
{{- end -}}
