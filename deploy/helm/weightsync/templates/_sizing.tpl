{{/*
What worker pods are like, as JSON: replicas, engines (in each), gpus, shmGiB, memoryGiB. All workers of an engine live
in one pod. Refuses what can't be.
*/}}
{{- define "weightsync.sizing" -}}
{{- $engine := .Values.fleet.engine -}}
{{- $sync := .Values.fleet.sync -}}
{{- $workers := .Values.workers -}}
{{- $count := int $engine.count -}}
{{- $inside := mul $engine.tensor_parallel_size $engine.pipeline_parallel_size $engine.data_parallel_size | int -}}
{{- $each := float64 $inside -}}
{{- if eq $engine.device "cpu" -}}
{{- $each = 0.0 -}}
{{- else if not (kindIs "invalid" $engine.gpus) -}}
{{- $each = float64 $engine.gpus -}}
{{- if and (gt $inside 1) (ne $each (float64 $inside)) -}}
{{- fail (printf "fleet.engine.gpus: got %v, want %d or null: every worker of an engine has a GPU of its own" $engine.gpus $inside) -}}
{{- end -}}
{{- end -}}
{{- if ge (int $sync.min_available) $count -}}
{{- fail (printf "fleet.sync.min_available: got %v, want fewer than the %d of fleet.engine.count" $sync.min_available $count) -}}
{{- end -}}
{{- range $key, $none := dict "rollback" "off" "verify_stored" false "min_available" 0 -}}
{{- if and (eq $sync.stage "none") (ne (index $sync $key | toString) (toString $none)) -}}
{{- fail (printf "fleet.sync.%s: got %v, want %v, as fleet.sync.stage is none: bytes that were not staged are gone" $key (index $sync $key) $none) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $sync.caches "salt") $engine.extra.kv_transfer_config -}}
{{- fail "fleet.sync.caches: got salt with a kv_transfer_config, want reset or retain: not every connector heeds cache_salt" -}}
{{- end -}}
{{- if eq (int $sync.store_port) (int .Values.fleet.api.port) -}}
{{- fail (printf "fleet.sync.store_port: got %v, want another than fleet.api.port: one pod has both" $sync.store_port) -}}
{{- end -}}
{{/* What `ray start` leaves to its processes, and what KubeRay has a worker export its metrics on. */}}
{{- range $taken := list (list 10002 19999 "Ray's own processes take") (list 8080 8080 "Ray's metrics take") -}}
{{- if and (le (int $engine.port_base) (index $taken 1)) (gt (add $engine.port_base $count) (index $taken 0)) -}}
{{- fail (printf "fleet.engine.port_base: got %v for %d engine(s), want ports without %d to %d, which %s" $engine.port_base $count (index $taken 0) (index $taken 1) (index $taken 2)) -}}
{{- end -}}
{{- end -}}
{{- if gt (add $engine.port_base $count) 65536 -}}
{{- fail (printf "fleet.engine.port_base: got %v, want at most %d: there are %d engines" $engine.port_base (sub 65536 $count) $count) -}}
{{- end -}}

{{- $byCpu := divf (float64 $workers.cpu) (float64 $engine.cpus) | floor | int -}}
{{- $sharing := 1 -}}
{{- $room := $byCpu -}}
{{- if and (gt $each 0.0) (lt $each 1.0) -}}
{{- $sharing = divf 1.0 $each | floor | int -}}
{{- $room = mul $workers.gpusPerNode $sharing | int -}}
{{- else if ge $each 1.0 -}}
{{- $room = divf (float64 $workers.gpusPerNode) $each | floor | int -}}
{{- end -}}
{{- if lt $room 1 -}}
{{- fail (printf "workers: an engine needs %v GPU(s) and %v core(s) of one node, and workers.gpusPerNode is %v, workers.cpu %v" $each $engine.cpus $workers.gpusPerNode $workers.cpu) -}}
{{- end -}}
{{- $replicas := divf (float64 $count) (float64 $room) | ceil | int -}}
{{- $engines := divf (float64 $count) (float64 $replicas) | ceil | int -}}
{{- if gt $engines $byCpu -}}
{{- fail (printf "workers.cpu: got %v, want %v: each pod has %d engines of fleet.engine.cpus %v" $workers.cpu (mulf $engines $engine.cpus | ceil) $engines $engine.cpus) -}}
{{- end -}}

{{- $gpus := 0 -}}
{{- if ge $each 1.0 -}}
{{- $gpus = mulf $engines $each | ceil | int -}}
{{- else if gt $each 0.0 -}}
{{- $gpus = divf (float64 $engines) (float64 $sharing) | ceil | int -}}
{{- end -}}
{{- if not (kindIs "invalid" $workers.gpus) -}}
{{- if or (lt (int $workers.gpus) $gpus) (gt (int $workers.gpus) (int $workers.gpusPerNode)) -}}
{{- fail (printf "workers.gpus: got %v, want %d to %v: what the pod's engines need, and what a node has" $workers.gpus $gpus $workers.gpusPerNode) -}}
{{- end -}}
{{- $gpus = int $workers.gpus -}}
{{- end -}}
{{- $cache := .Values.cache -}}
{{- if and (gt $replicas 1) $cache.enabled (not $cache.existingClaim) (not (has "ReadWriteMany" $cache.accessModes)) -}}
{{- fail (printf "cache.accessModes: got %s, want ReadWriteMany: %d worker pods on as many nodes mount the claim" (join ", " $cache.accessModes) $replicas) -}}
{{- end -}}

{{/* Of pods whose GPUs are given, which may come to hold more engines than now: room for all that they can hold. */}}
{{- $most := $engines -}}
{{- if not (kindIs "invalid" $workers.gpus) -}}
{{- if ge $each 1.0 -}}
{{- $most = divf (float64 $gpus) $each | floor | int -}}
{{- else if gt $each 0.0 -}}
{{- $most = mul $gpus $sharing | int -}}
{{- end -}}
{{- end -}}
{{- $keeping := min (int $sync.retain_engines) $most -}}
{{- if eq $sync.stage "none" -}}
{{- $keeping = 0 -}}
{{- end -}}
{{- $store := divf (float64 .Values.ray.objectStoreMiB) 1024.0 | ceil | int -}}
{{- $shm := add (mul (max $gpus 1) $workers.ncclShmGiB) (mul 2 $workers.weightsGiB $keeping) $store | int -}}
{{- if not (kindIs "invalid" $workers.shmGiB) -}}
{{- $shm = int $workers.shmGiB -}}
{{- end -}}
{{- dict "replicas" $replicas "engines" $engines "gpus" $gpus "shmGiB" $shm "memoryGiB" (add $workers.memoryGiB $shm) | toJson -}}
{{- end -}}
