{{/*
What the connector needs, in one place: settings, volumes, mounts and variables.
The names of a list as a space-separated string; `contains` on it would find `redis` in `my.redis:Class`, so ask `has`.
*/}}

{{- define "tandem.connectors" -}}
{{- splitList "," .Values.connector.name | toJson -}}
{{- end -}}

{{/* "true" where pages lie on the volume of sharedStorage. */}}
{{- define "tandem.usesVolume" -}}
{{- $names := include "tandem.connectors" . | fromJsonArray -}}
{{- if or (has "shared_storage" $names) (and (has "lmcache" $names) (eq .Values.connector.lmcache.place "disk")) -}}true{{- end -}}
{{- end -}}

{{/* "true" where pages lie in a Redis. */}}
{{- define "tandem.usesRedis" -}}
{{- $names := include "tandem.connectors" . | fromJsonArray -}}
{{- if has "redis" $names -}}true{{- end -}}
{{- end -}}

{{- define "tandem.bundlesRedis" -}}
{{- if and (include "tandem.usesRedis" .) .Values.connector.redis.bundled -}}true{{- end -}}
{{- end -}}

{{- define "tandem.usesKey" -}}
{{- if ne .Values.connector.name "null" -}}true{{- end -}}
{{- end -}}

{{- define "tandem.keySecret" -}}
{{- .Values.connector.key.existingSecret | default (printf "%s-kv-key" (include "tandem.fullname" .)) -}}
{{- end -}}

{{/* Name of the Secret with Redis's password; empty: no login. */}}
{{- define "tandem.redisSecret" -}}
{{- if .Values.connector.redis.existingSecret -}}
{{- .Values.connector.redis.existingSecret -}}
{{- else if include "tandem.bundlesRedis" . -}}
{{- printf "%s-redis" (include "tandem.fullname" .) -}}
{{- end -}}
{{- end -}}

{{- define "tandem.redisImage" -}}
{{- $redis := .Values.connector.redis -}}
{{- $image := $redis.image -}}
{{- include "tandem.mirrored" (dict "root" . "image" $image) -}}{{- with $redis.digest -}}@{{ . }}{{- end -}}
{{- end -}}

{{- define "tandem.storeClaim" -}}
{{- .Values.connector.sharedStorage.existingClaim | default (printf "%s-store" (include "tandem.fullname" .)) -}}
{{- end -}}

{{- define "tandem.connectorUrl" -}}
{{- if include "tandem.bundlesRedis" . -}}
redis://{{ include "tandem.fullname" . }}-redis:6379/0
{{- else if include "tandem.usesRedis" . -}}
{{- .Values.connector.redis.url -}}
{{- else if has "lmcache" (include "tandem.connectors" . | fromJsonArray) -}}
{{- if eq .Values.connector.lmcache.place "server" }}{{ .Values.connector.lmcache.serverUrl }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* The section `transfer` of an instance's settings. */}}
{{- define "tandem.transferSettings" -}}
{{- $connector := .Values.connector -}}
{{- $names := include "tandem.connectors" . | fromJsonArray -}}
{{- $options := dict -}}
{{- if and (has "redis" $names) (include "tandem.redisSecret" .) -}}
{{- $prefix := ternary "redis." "" (gt (len $names) 1) -}}
{{- $_ := set $options (printf "%spassword_file" $prefix) "/etc/tandem/redis/password" -}}
{{- $_ := set $options (printf "%susername" $prefix) $connector.redis.username -}}
{{- end -}}
connector: {{ $connector.name | quote }}
{{- if include "tandem.usesVolume" . }}
folder: /var/lib/tandem/kv
{{- if $connector.capacityBytes }}
capacity_bytes: {{ $connector.capacityBytes | int64 }}
{{- end }}
{{- end }}
{{- with include "tandem.connectorUrl" . }}
url: {{ . | quote }}
{{- end }}
{{- if include "tandem.usesKey" . }}
secret_file: /etc/tandem/kv/key
{{- end }}
{{- with mustMergeOverwrite $options ($connector.options | default dict) }}
options: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "tandem.connectorVolumes" -}}
{{- if include "tandem.usesKey" . }}
- name: kv-key
  secret:
    secretName: {{ include "tandem.keySecret" . | quote }}
    defaultMode: {{ include "tandem.secretMode" . }}
    items: [{key: {{ .Values.connector.key.existingSecretKey | quote }}, path: key}]
{{- end }}
{{- if include "tandem.usesVolume" . }}
- name: kv-store
  persistentVolumeClaim: {claimName: {{ include "tandem.storeClaim" . | quote }}}
{{- end }}
{{- if and (include "tandem.usesRedis" .) (include "tandem.redisSecret" .) }}
- name: redis-password
  secret:
    secretName: {{ include "tandem.redisSecret" . | quote }}
    defaultMode: {{ include "tandem.secretMode" . }}
    items: [{key: {{ .Values.connector.redis.existingSecretPasswordKey | quote }}, path: password}]
{{- end }}
{{- end -}}

{{- define "tandem.connectorMounts" -}}
{{- if include "tandem.usesKey" . }}
- {name: kv-key, mountPath: /etc/tandem/kv, readOnly: true}
{{- end }}
{{- if include "tandem.usesVolume" . }}
- {name: kv-store, mountPath: /var/lib/tandem/kv}
{{- end }}
{{- if and (include "tandem.usesRedis" .) (include "tandem.redisSecret" .) }}
- {name: redis-password, mountPath: /etc/tandem/redis, readOnly: true}
{{- end }}
{{- end -}}

{{/* UCX reads these; it listens on TCP whatever else it uses. */}}
{{- define "tandem.connectorEnv" -}}
{{- $nixl := .Values.connector.nixl -}}
{{- if has "nixl" (include "tandem.connectors" . | fromJsonArray) }}
{{- range $name, $value := mustMerge (dict "UCX_TLS" $nixl.ucxTls "UCX_NET_DEVICES" $nixl.ucxNetDevices "UCX_TCP_PORT_RANGE" $nixl.tcpPorts) ($nixl.ucxEnv | default dict) }}
{{- if ne (toString $value) "" }}
- {name: {{ $name }}, value: {{ include "tandem.text" $value | quote }}}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}
