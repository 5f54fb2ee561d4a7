{{/*
fleet.toml. Helm's own toToml writes whole numbers as floats (8.192e+03), which vLLM's arguments would not take;
JSON's scalars are TOML's too.
*/}}
{{- define "weightsync.settings" -}}
{{- $fleet := deepCopy .Values.fleet -}}
{{- $_ := set $fleet "state_dir" "/var/lib/weightsync" -}}
{{- $_ := set $fleet "leave_fleet" true -}}
{{- $_ := set $fleet.api "host" "0.0.0.0" -}}
{{- $_ := set $fleet.sync "retain_folder" "/dev/shm" -}}
{{- $_ := set $fleet "ray" (dict "address" (include "weightsync.head" .)) -}}
{{- range $key, $value := $fleet -}}
{{- if not (kindIs "map" $value) }}
{{ $key }} = {{ include "weightsync.toml" (list $key $value) }}
{{- end -}}
{{- end -}}
{{- range $section, $table := $fleet -}}
{{- if kindIs "map" $table }}

[{{ $section }}]
{{- range $key, $value := $table -}}
{{- if not (kindIs "invalid" $value) }}
{{ $key }} = {{ include "weightsync.toml" (list (printf "%s.%s" $section $key) $value) }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* One value in TOML, inline. Args: its path, the value. */}}
{{- define "weightsync.toml" -}}
{{- $path := index . 0 -}}
{{- $value := index . 1 -}}
{{- if kindIs "invalid" $value -}}
{{- fail (printf "fleet.%s: got null, which TOML has not; leave the key out" $path) -}}
{{- else if kindIs "map" $value -}}
{{- $entries := list -}}
{{- range $key, $inner := $value -}}
{{- $entries = append $entries (printf "%s = %s" (include "weightsync.text" $key) (include "weightsync.toml" (list (printf "%s.%s" $path $key) $inner))) -}}
{{- end -}}
{ {{- join ", " $entries -}} }
{{- else if kindIs "slice" $value -}}
{{- $entries := list -}}
{{- range $inner := $value -}}
{{- $entries = append $entries (include "weightsync.toml" (list (printf "%s[]" $path) $inner)) -}}
{{- end -}}
[ {{- join ", " $entries -}} ]
{{- else -}}
{{- include "weightsync.text" $value -}}
{{- end -}}
{{- end -}}

{{/* A scalar. DEL and the controls behind it JSON leaves as they are; TOML refuses the one, YAML the others. */}}
{{- define "weightsync.text" -}}
{{- $text := toJson . -}}
{{- range $code := untilStep 127 160 1 -}}
{{- $text = replace (printf "%c" $code) (printf "\\u%04x" $code) $text -}}
{{- end -}}
{{- $text -}}
{{- end -}}

{{/*
Hash of the settings that live engines keep: a `serve` that joins a Ray finds its engines by name and would go on with
those of other settings. It stands in the RayCluster's pods, so that KubeRay makes them anew. engine.count is not in it: a fleet
may be scaled.
*/}}
{{- define "weightsync.fixed" -}}
{{- $fleet := .Values.fleet -}}
{{- $fixed := dict "fleet" $fleet.fleet "engine" (omit $fleet.engine "count") -}}
{{- $_ := set $fixed "api" (pick $fleet.api "max_request_bytes") -}}
{{- $_ := set $fixed "sync" (pick $fleet.sync "caches" "stage" "rollback" "verify_stored" "local" "in_flight" "new_requests") -}}
{{- $_ := set $fixed "token" (sha256sum (printf "%s/%s/%s" (include "weightsync.tokenSecret" .) (include "weightsync.tokenKey" .) (default "" .Values.auth.token))) -}}
{{- toJson $fixed | sha256sum -}}
{{- end -}}
