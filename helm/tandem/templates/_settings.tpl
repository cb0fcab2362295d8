{{/* The settings file of each component: what the chart decides, and the user's `settings` over it. */}}

{{- define "tandem.grpcPort" -}}50051{{- end -}}

{{/* Of a prefill or decode instance: (dict "root" $ "spec" its values) */}}
{{- define "tandem.instanceSettings" -}}
{{- $root := .root -}}
{{- $decided := dict
  "model" (dict "folder" (include "tandem.modelFolder" $root) "name" $root.Values.model.name)
  "server" (dict "port" (include "tandem.grpcPort" $root | int))
  "transfer" (include "tandem.transferSettings" $root | fromYaml)
  "log" (dict "format" "json") -}}
{{- $device := dig "engine" "device" (ternary "cuda" "cpu" (gt (.spec.gpu.count | int) 0)) .spec.settings -}}
{{- $_ := set $decided "engine" (dict "device" $device) -}}
{{- if and (eq $device "cpu") (not (dig "engine" "num_blocks" "" .spec.settings)) -}}
{{- $_ := set $decided.engine "kv_cache_bytes" 1073741824 -}}
{{- end -}}
{{- toYaml (mustMergeOverwrite $decided (deepCopy .spec.settings)) -}}
{{- end -}}

{{/* Of the router. A pool is every address of its headless Service. */}}
{{- define "tandem.routerSettings" -}}
{{- $root := .root -}}
{{- $port := include "tandem.grpcPort" $root -}}
{{- $target := printf "dns:%s-%%s:%s" (include "tandem.fullname" $root) $port -}}
{{- $decided := dict
  "router" (dict "model" (include "tandem.modelFolder" $root) "model_name" $root.Values.model.name)
  "server" (dict "port" ($port | int))
  "pools" (dict "prefill" (printf $target "prefill") "decode" (printf $target "decode"))
  "admission" (dict "num_routers" (.spec.replicas | int))
  "log" (dict "format" "json") -}}
{{- toYaml (mustMergeOverwrite $decided (deepCopy .spec.settings)) -}}
{{- end -}}

{{/* Seconds until SIGKILL, of a settings tree: a drain, and 15 s for the engine core to end. */}}
{{- define "tandem.terminationGrace" -}}
{{- add (ceil .server.drain_accept_s) (ceil .server.drain_grace_s) 15 -}}
{{- end -}}
