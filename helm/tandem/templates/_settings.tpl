{{/* The settings file of each component: what the chart decides, and the user's `settings` over it. */}}

{{- define "tandem.grpcPort" -}}50051{{- end -}}

{{/* Health alone, in plaintext, for the kubelet: clients of the other ports cannot use up its connections. */}}
{{- define "tandem.healthPort" -}}50053{{- end -}}

{{/* What routers show each other of the pools. */}}
{{- define "tandem.signalsPort" -}}50054{{- end -}}

{{/* Where Gateways ask for a router. */}}
{{- define "tandem.pickerPort" -}}50055{{- end -}}

{{/* Where routers listen for clients: all addresses of the pod; `::` includes IPv4. */}}
{{- define "tandem.bindAddress" -}}
{{- .Values.router.bindAddress | default (ternary "::" "0.0.0.0" (has "IPv6" (.Values.ipFamilies | default list))) -}}
{{- end -}}

{{/* The families of the clients' Service; without values the cluster's default. */}}
{{- define "tandem.ipFamilies" -}}
{{- with .Values.ipFamilies -}}
ipFamilyPolicy: {{ ternary "RequireDualStack" "SingleStack" (gt (len .) 1) }}
ipFamilies: {{ toJson . }}
{{- end -}}
{{- end -}}

{{/* Of a Service whose pods listen at their first address alone: that is of the cluster's first family. */}}
{{- define "tandem.ipFamily" -}}
{{- if gt (len (.Values.ipFamilies | default list)) 1 -}}
ipFamilyPolicy: SingleStack
{{- else -}}
{{- include "tandem.ipFamilies" . -}}
{{- end -}}
{{- end -}}

{{/* "true" where nothing but a port-forward reaches the admin listener. */}}
{{- define "tandem.isAdminLocal" -}}
{{- if regexMatch "^(127\\.0\\.0\\.1|localhost|\\[::1\\]):" .Values.router.adminListen -}}true{{- end -}}
{{- end -}}

{{/* Of a prefill or decode instance: (dict "root" $ "spec" its values) */}}
{{- define "tandem.instanceSettings" -}}
{{- $root := .root -}}
{{- $decided := dict
  "model" (dict "folder" (include "tandem.modelFolder" $root) "name" $root.Values.model.name)
  "server" (dict "port" (include "tandem.grpcPort" $root | int))
  "transfer" (include "tandem.transferSettings" $root | fromYaml)
  "log" (dict "format" "json") -}}
{{- with $root.Values.tracing.otlp }}{{ $_ := set $decided "tracing" (dict "otlp" .) }}{{ end -}}
{{- $decided = mustMergeOverwrite $decided (include "tandem.securitySettings" . | fromYaml) -}}
{{- $device := dig "engine" "device" (ternary "cuda" "cpu" (gt (.spec.gpu.count | int) 0)) .spec.settings -}}
{{- $_ := set $decided "engine" (mustMerge (dict "device" $device) (include "tandem.engineSettings" . | fromYaml)) -}}
{{- if and (eq $device "cpu") (not (dig "engine" "num_blocks" "" .spec.settings)) -}}
{{- $_ := set $decided.engine "kv_cache_bytes" 1073741824 -}}
{{- end -}}
{{- toYaml (mustMergeOverwrite $decided (deepCopy .spec.settings)) -}}
{{- end -}}

{{/* Of the router. A pool is every pod behind its headless Service, by DNS or by EndpointSlices. */}}
{{- define "tandem.routerSettings" -}}
{{- $root := .root -}}
{{- $port := include "tandem.grpcPort" $root -}}
{{- $scheme := ternary "kubernetes" "dns" (eq $root.Values.discovery "endpoints") -}}
{{- $target := printf "%s:%s-%%s:%s" $scheme (include "tandem.fullname" $root) $port -}}
{{- $decided := dict
  "router" (dict "model" (include "tandem.modelFolder" $root) "model_name" $root.Values.model.name)
  "server" (dict "port" ($port | int))
  "pools" (dict "prefill" (printf $target "prefill") "decode" (printf $target "decode"))
  "signals" (dict "routers" (printf "%s:%s-routers:%s" $scheme (include "tandem.fullname" $root) (include "tandem.signalsPort" $root)))
  "log" (dict "format" "json") -}}
{{- with $root.Values.tracing.otlp }}{{ $_ := set $decided "tracing" (dict "otlp" .) }}{{ end -}}
{{- $decided = mustMergeOverwrite $decided (include "tandem.securitySettings" . | fromYaml) -}}
{{- if $root.Values.tls.enabled }}{{ $_ := set $decided.signals "router_name" (include "tandem.routerName" $root) }}{{ end -}}
{{- if eq $root.Values.autoscaling.mode "builtin" -}}
{{- $decided = mustMergeOverwrite $decided (include "tandem.resizingSettings" $root | fromYaml) (include "tandem.scalingSettings" $root | fromYaml) -}}
{{- else if eq $root.Values.autoscaling.mode "external" -}}
{{- range $role := list "prefill" "decode" -}}
{{- $spec := include "tandem.pool" (dict "root" $root "component" $role) | fromYaml -}}
{{- with include "tandem.minReadySeconds" (dict "root" $root "component" $role "spec" $spec) | int -}}
{{- $decided = mustMergeOverwrite $decided (dict "autoscaler" (dict $role (dict "min_ready_s" .))) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if $root.Values.autoscaling.keda.enabled -}}
{{- $decided = mustMergeOverwrite $decided (include "tandem.scalingSettings" $root | fromYaml) -}}
{{- $_ := set $decided.signals "active_s" (mul 3 $root.Values.autoscaling.keda.pollingSeconds) -}}
{{- $bounds := $root.Values.autoscaling -}}
{{- $splits := eq (dig "disaggregation" "mode" "auto" .spec.settings) "always" -}}
{{- if or (eq (int $bounds.decode.minReplicas) 0) (and $splits (eq (int $bounds.prefill.minReplicas) 0)) -}}
{{- $_ := set $decided "admission" (dict "instance_wait_s" $root.Values.autoscaling.keda.waitSeconds) -}}
{{- end -}}
{{- end -}}
{{- toYaml (mustMergeOverwrite $decided (deepCopy .spec.settings)) -}}
{{- end -}}

{{/* What the router resizes itself. */}}
{{- define "tandem.resizingSettings" -}}
{{- $fullname := include "tandem.fullname" . -}}
kubernetes:
  prefill: deployment/{{ $fullname }}-prefill
  decode: deployment/{{ $fullname }}-decode
  lease: {{ $fullname }}-autoscaler
  mark_pods: {{ .Values.autoscaling.markPods }}
autoscaler:
  enabled: true
{{- end -}}

{{/* Within which bounds pools are sized, and for which objectives. */}}
{{- define "tandem.scalingSettings" -}}
{{- $prefill := .Values.autoscaling.prefill -}}
{{- $decode := .Values.autoscaling.decode -}}
autoscaler:
  prefill:
    min_size: {{ max 1 ($prefill.minReplicas | int) }}
    max_size: {{ $prefill.maxReplicas | int }}
    start_timeout_s: {{ include "tandem.startDeadline" (dict "root" . "component" "prefill") }}
    {{- with $prefill.timeToFirstTokenSeconds }}
    ttft_objective_s: {{ . }}
    {{- end }}
  decode:
    min_size: {{ max 1 ($decode.minReplicas | int) }}
    max_size: {{ $decode.maxReplicas | int }}
    start_timeout_s: {{ include "tandem.startDeadline" (dict "root" . "component" "decode") }}
    {{- with $decode.interTokenLatencySeconds }}
    itl_objective_s: {{ . }}
    {{- end }}
{{- end -}}

{{/* "true" where the router asks the API server. */}}
{{- define "tandem.asksKubernetes" -}}
{{- if or (eq .Values.autoscaling.mode "builtin") (eq .Values.discovery "endpoints") -}}true{{- end -}}
{{- end -}}

{{/* Seconds until SIGKILL, of a settings tree: a drain, and 15 s for the engine core to end. Without a value the services' longest defaults count. */}}
{{- define "tandem.terminationGrace" -}}
{{- $server := .server | default dict -}}
{{- $accept := ternary 5 $server.drain_accept_s (kindIs "invalid" $server.drain_accept_s) -}}
{{- $grace := ternary 30 $server.drain_grace_s (kindIs "invalid" $server.drain_grace_s) -}}
{{- add (ceil $accept) (ceil $grace) 15 -}}
{{- end -}}
