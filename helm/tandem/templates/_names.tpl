{{/* Names, labels and images. Every label's value is quoted: a release may be called `on`. */}}

{{/* A DNS label that begins with a letter, as Services' names do, of at most 40 characters, so that every suffix fits into 63. A name that is not ends in its own digest. A parent chart's alias may have capitals. */}}
{{- define "tandem.fullname" -}}
{{- $chart := .Values.nameOverride | default .Chart.Name | lower -}}
{{- $name := ternary .Release.Name (printf "%s-%s" .Release.Name $chart) (contains $chart .Release.Name) -}}
{{- $name = .Values.fullnameOverride | default $name -}}
{{- $label := replace "." "-" $name -}}
{{- if regexMatch "^[0-9]" $label }}{{ $label = printf "tandem-%s" $label }}{{ end -}}
{{- if or (gt (len $label) 40) (ne $label $name) -}}
{{- printf "%s-%s" (trunc 31 $label | trimSuffix "-") (sha256sum $name | trunc 8) -}}
{{- else -}}
{{- $name -}}
{{- end -}}
{{- end -}}

{{/* Selector of one component: (dict "root" $ "component" "decode"). Never changes between versions. */}}
{{- define "tandem.selector" -}}
app.kubernetes.io/name: {{ .root.Values.nameOverride | default .root.Chart.Name | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component | quote }}
{{- end -}}

{{/* A value as text: Helm reads every number as a float and would print 1e+06. */}}
{{- define "tandem.text" -}}
{{- if kindIs "string" . }}{{ . }}{{ else }}{{ toJson . }}{{ end -}}
{{- end -}}

{{/* A map with its values as text, as YAML that quotes what needs it. */}}
{{- define "tandem.texts" -}}
{{- $texts := dict -}}
{{- range $key, $value := . }}{{ $_ := set $texts $key (include "tandem.text" $value) }}{{ end -}}
{{- toYaml $texts -}}
{{- end -}}

{{/* As tandem.texts, of a list of maps: later ones replace values of earlier ones, also by false, 0 and "". Nothing for none. */}}
{{- define "tandem.over" -}}
{{- $all := dict -}}
{{- range . }}{{ range $key, $value := . | default dict }}{{ $_ := set $all $key $value }}{{ end }}{{ end -}}
{{- with $all }}{{ include "tandem.texts" . }}{{ end -}}
{{- end -}}

{{/* Labels of pods, with `labels` over commonLabels. No version among them: a new chart alone starts no pod again. */}}
{{- define "tandem.podLabels" -}}
{{ include "tandem.selector" . }}
app.kubernetes.io/part-of: "tandem"
{{- with include "tandem.over" (list .root.Values.commonLabels .labels) }}
{{ . }}
{{- end }}
{{- end -}}

{{/* Labels of every object, with `labels` over commonLabels. */}}
{{- define "tandem.labels" -}}
{{ include "tandem.selector" . }}
app.kubernetes.io/part-of: "tandem"
app.kubernetes.io/version: {{ .root.Values.image.tag | default .root.Chart.AppVersion | trunc 63 | trimAll "-_." | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | quote }}
{{- with include "tandem.over" (list .root.Values.commonLabels .labels) }}
{{ . }}
{{- end }}
{{- end -}}

{{/* `metadata` of one object: (dict "root" $ "component" "decode" "suffix" "decode" "labels" (dict …) "annotations" (dict …)) */}}
{{- define "tandem.metadata" -}}
name: {{ include "tandem.name" . }}
labels:
  {{- include "tandem.labels" . | nindent 2 }}
{{- with .annotations }}
annotations: {{- include "tandem.texts" . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Name of one object: (dict "root" $ "suffix" "decode") */}}
{{- define "tandem.name" -}}
{{ printf "%s-%s" (include "tandem.fullname" .root) .suffix | quote }}
{{- end -}}

{{- define "tandem.image" -}}
{{- include "tandem.imageOf" (dict "root" . "image" .Values.image) -}}
{{- end -}}

{{/* That of a component: an instance's own where its values name one, else the release's: (dict "root" $ "spec" its values) */}}
{{- define "tandem.componentImage" -}}
{{- $own := pick (dig "image" dict (.spec | default dict)) "registry" "repository" "tag" "digest" -}}
{{- $image := deepCopy .root.Values.image -}}
{{- range $key, $value := $own -}}
{{- if $value }}{{ $image = set (omit $image "digest") $key $value }}{{ end -}}
{{- end -}}
{{- with $own.digest }}{{ $_ := set $image "digest" . }}{{ end -}}
{{- include "tandem.imageOf" (dict "root" .root "image" $image) -}}
{{- end -}}

{{- define "tandem.imageOf" -}}
{{- $image := .image -}}
{{- $registry := .root.Values.global.imageRegistry | default $image.registry | trimSuffix "/" -}}
{{- $name := ternary (printf "%s/%s" $registry $image.repository) $image.repository (ne $registry "") -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $name $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name ($image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/* An image of others, from the mirror if there is one: (dict "root" $ "image" "docker.io/library/redis:7") */}}
{{- define "tandem.mirrored" -}}
{{- $mirror := .root.Values.global.imageRegistry -}}
{{- ternary .image (printf "%s/%s" (trimSuffix "/" $mirror) (regexReplaceAll "^([^/]*[.:][^/]*|localhost)/" .image "")) (eq $mirror "") -}}
{{- end -}}

{{- define "tandem.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* ServiceAccount's name: (dict "root" $ "component" "router"). That of the hook is the router's where none is created. */}}
{{- define "tandem.serviceAccount" -}}
{{- $accounts := .root.Values.serviceAccount -}}
{{- if and (eq .component "sizes") $accounts.create -}}
{{- printf "%s-sizes" (include "tandem.fullname" .root) -}}
{{- else if has .component (list "router" "sizes") -}}
{{- $accounts.routerName | default (printf "%s-router" (include "tandem.fullname" .root)) -}}
{{- else -}}
{{- $accounts.instanceName | default (printf "%s-instance" (include "tandem.fullname" .root)) -}}
{{- end -}}
{{- end -}}

{{/* One pool's values, as YAML: those of `instance`, and over them the pool's own. A pool that is recreated inherits no rolling update, which Kubernetes rejects beside it. */}}
{{- define "tandem.pool" -}}
{{- $own := index .root.Values.pools .component | default dict -}}
{{- $spec := mustMergeOverwrite (deepCopy .root.Values.instance) (deepCopy $own) -}}
{{- if and (eq (dig "type" "" ($own.strategy | default dict)) "Recreate") (not (hasKey $own.strategy "rollingUpdate")) -}}
{{- $_ := unset $spec.strategy "rollingUpdate" -}}
{{- end -}}
{{- include "tandem.filled" $spec -}}
{{- end -}}

{{/* The router's values, as YAML. */}}
{{- define "tandem.router" -}}
{{- include "tandem.filled" (deepCopy .Values.router) -}}
{{- end -}}

{{/* Removes the keys of a map whose value is null, as Helm does with keys of values.yaml; renders nothing. */}}
{{- define "tandem.removeNulls" -}}
{{- $map := . -}}
{{- range $key, $value := $map -}}
{{- if kindIs "invalid" $value }}{{ $_ := unset $map $key }}{{ else if kindIs "map" $value }}{{ include "tandem.removeNulls" $value }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* Without keys of null, except in settings and vllmArgs, where null is a value. A key without a value, as a values file has it whose lines below are comments, is one with an empty value. */}}
{{- define "tandem.filled" -}}
{{- $spec := omit . "settings" "vllmArgs" -}}
{{- include "tandem.removeNulls" $spec -}}
{{- $_ := set $spec "settings" .settings -}}
{{- $_ := set $spec "vllmArgs" .vllmArgs -}}
{{- range $key := list "podLabels" "podAnnotations" "nodeSelector" "affinity" "dnsConfig" "vllmArgs" }}{{ $_ := set $spec $key (get $spec $key | default dict) }}{{ end -}}
{{- range $key := list "tolerations" "extraEnv" "envFrom" "sidecars" "initContainers" "extraVolumes" "extraVolumeMounts" "addCapabilities" "resourceClaims" }}{{ $_ := set $spec $key (get $spec $key | default list) }}{{ end -}}
{{- $_ := set $spec "probes" (merge ($spec.probes | default dict) (dict "startup" dict "liveness" dict "readiness" dict)) -}}
{{- toYaml $spec -}}
{{- end -}}

{{/* The size of a pool that the chart writes; empty: none, since others size it: (dict "root" $ "spec" its values) */}}
{{- define "tandem.replicas" -}}
{{- if and (eq .root.Values.autoscaling.mode "none") (not (kindIs "invalid" .spec.replicas)) -}}{{ .spec.replicas | int }}{{- end -}}
{{- end -}}

{{/* A histogram's bound as Prometheus writes it: 2.5, and 1.0 for 1. */}}
{{- define "tandem.bound" -}}
{{- if eq (. | float64) (floor .) }}{{ printf "%.1f" (. | float64) }}{{ else }}{{ . }}{{ end -}}
{{- end -}}
