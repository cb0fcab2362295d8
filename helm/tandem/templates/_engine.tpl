{{/* Which engine an instance runs: the section `engine` of its settings, and what cannot be combined. */}}

{{/* Workers of one instance, one for each GPU: (dict "spec" its values) */}}
{{- define "tandem.workers" -}}
{{- mul .spec.tensorParallelSize .spec.pipelineParallelSize -}}
{{- end -}}

{{/*
Compute threads of each worker where several share the pod's cores; empty: the downward API gives them to the only one, or the pod has no number of cores.
*/}}
{{- define "tandem.workerThreads" -}}
{{- $resources := .spec.resources | default dict -}}
{{- $cpu := dig "limits" "cpu" (dig "requests" "cpu" "" $resources) $resources | toString -}}
{{- $workers := include "tandem.workers" . | int -}}
{{- if and $cpu (gt $workers 1) -}}
{{- $cores := ternary (divf (trimSuffix "m" $cpu | float64) 1000) (float64 $cpu) (hasSuffix "m" $cpu) -}}
{{- max 1 (floor (divf $cores $workers) | int) -}}
{{- end -}}
{{- end -}}

{{- define "tandem.engineSettings" -}}
{{- $sizes := dict -}}
{{- if gt (int .spec.tensorParallelSize) 1 }}{{ $_ := set $sizes "tensor_parallel_size" (int .spec.tensorParallelSize) }}{{ end -}}
{{- if gt (int .spec.pipelineParallelSize) 1 }}{{ $_ := set $sizes "pipeline_parallel_size" (int .spec.pipelineParallelSize) }}{{ end -}}
{{- with include "tandem.workerThreads" . }}
num_threads: {{ . }}
{{- end }}
{{- if eq .spec.engine "vllm" }}
kind: vllm
# The interpreter of vLLM's own image (vllm.Dockerfile).
python: /usr/bin/python3
{{- if eq (int .spec.gpu.count) 0 }}
# vLLM's kernels for CPUs want a multiple of it.
block_size: 32
{{- end }}
{{- with mustMerge $sizes .spec.vllmArgs }}
vllm_args: {{- toYaml . | nindent 2 }}
{{- end }}
{{- else }}
{{- with $sizes }}
{{ toYaml . }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Rejects what no engine would start with. Both pools have one engine: others are never paired. */}}
{{- define "tandem.validateEngines" -}}
{{- $engines := list -}}
{{- $compared := list -}}
{{- $withoutEffect := (.Files.Get "vllm_arguments.yaml" | fromYaml).withoutEffect -}}
{{- range $role := list "prefill" "decode" -}}
{{- $spec := include "tandem.pool" (dict "root" $ "component" $role) | fromYaml -}}
{{- $engines = append $engines $spec.engine -}}
{{- $args := deepCopy $spec.vllmArgs -}}
{{- range $withoutEffect }}{{ $_ := unset $args . }}{{ end -}}
{{- $compared = append $compared (toJson $args) -}}
{{- $workers := include "tandem.workers" (dict "spec" $spec) | int -}}
{{- $gpus := int $spec.gpu.count -}}
{{- if and (gt $gpus 0) (ne $gpus $workers) -}}
{{- fail (printf "gpu.count of %s: %d, and its engine has %d worker(s), one for each GPU; set instance.tensorParallelSize=%d, or gpu.count=%d" $role $gpus $workers $gpus $workers) -}}
{{- end -}}
{{- $quantization := dig "engine" "quantization" "none" $spec.settings -}}
{{- if and (ne $quantization "none") (or (eq $spec.engine "vllm") (eq (dig "engine" "device" (ternary "cuda" "cpu" (gt $gpus 0)) $spec.settings) "cuda")) -}}
{{- fail (printf "settings.engine.quantization of %s: %s is for the built-in engine on CPUs; leave it out%s" $role $quantization (ternary ", or set instance.vllmArgs.quantization" "" (eq $spec.engine "vllm"))) -}}
{{- end -}}
{{- if eq $spec.engine "vllm" -}}
{{- if gt (dig "engine" "num_speculative_tokens" 0 $spec.settings | int) 0 -}}
{{- fail (printf "settings.engine.num_speculative_tokens of %s: it is for the built-in engine, and the engine is vllm; leave it out" $role) -}}
{{- end -}}
{{- include "tandem.validateVllm" (dict "root" $ "component" $role "spec" $spec) -}}
{{- else if $spec.vllmArgs -}}
{{- fail (printf "vllmArgs of %s: the engine is %s, which has no such arguments; set instance.engine=vllm, or leave them out" $role $spec.engine) -}}
{{- else if and (gt $workers 1) (eq (dig "engine" "device" (ternary "cuda" "cpu" (gt $gpus 0)) $spec.settings) "cuda") -}}
{{- $name := ternary "tensorParallelSize" "pipelineParallelSize" (gt (int $spec.tensorParallelSize) 1) -}}
{{- fail (printf "%s of %s: %d on GPUs, and this chart divides the built-in engine on CPUs only; set instance.engine=vllm" $name $role (int (get $spec $name))) -}}
{{- end -}}
{{- end -}}
{{- if ne (first $engines) (last $engines) -}}
{{- fail (printf "pools: prefill has the engine %s and decode %s, and instances of different engines are never paired; set instance.engine" (first $engines) (last $engines)) -}}
{{- end -}}
{{- if and (ne .Values.connector.name "null") (ne (first $compared) (last $compared)) -}}
{{- fail (printf "vllmArgs: prefill has %s and decode %s, and instances with different arguments are never paired; set instance.vllmArgs" (first $compared) (last $compared)) -}}
{{- end -}}
{{- end -}}

{{/* Rejects what vllm_engine/start.py rejects at the start: (dict "root" $ "component" "decode" "spec" its values) */}}
{{- define "tandem.validateVllm" -}}
{{- $spec := .spec -}}
{{- $role := .component -}}
{{- $rules := .root.Files.Get "vllm_arguments.yaml" | fromYaml -}}
{{- $image := $spec.image -}}
{{- if not (or $image.repository $image.tag $image.digest) -}}
{{- fail (printf "image of %s: the engine is vllm; set instance.image.repository, with instance.image.tag or instance.image.digest, to an image built with vllm.Dockerfile" $role) -}}
{{- end -}}
{{- range $name, $_ := $spec.vllmArgs -}}
{{- with get $rules.refused $name -}}
{{- fail (printf "vllmArgs of %s: %s: %s" $role $name .) -}}
{{- end -}}
{{- end -}}
{{- $connector := .root.Values.connector.name -}}
{{- if or (contains "," $connector) (eq $connector "lmcache") -}}
{{- fail (printf "connector.name: %s is not supported with instance.engine=vllm; allowed: nixl, redis, shared_storage, null, or module:Class" $connector) -}}
{{- end -}}
{{- if ne $connector "null" -}}
{{- $own := dict "tensor_parallel_size" "tensorParallelSize" "pipeline_parallel_size" "pipelineParallelSize" -}}
{{- range $name := $rules.workerCounts -}}
{{- $value := get $own $name -}}
{{- $count := ternary (get $spec $value) (dig $name 1 $spec.vllmArgs) (ne $value "") | int -}}
{{- if ne $count 1 -}}
{{- fail (printf "%s of %s: %d, and vLLM hands over the KV of one worker only; set connector.name=null, with which one pool serves" ($value | default (printf "vllmArgs.%s" $name)) $role $count) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
