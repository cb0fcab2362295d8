{{/*
The Deployment of one component, the same for router and pools:
  root, component  the owner
  module           python -m …
  ready            gRPC service whose health is readiness; the empty name is liveness
  spec             its values
  settings         settings file, as YAML
  replicas         absent: another component sets them
  sizedBy          of a pool: the chart's replicas, or others
  startupSeconds   time until it listens
*/}}
{{- define "tandem.deployment" -}}
{{- $settings := fromYaml .settings -}}
{{- if gt (len .settings) 131072 -}}
{{- fail (printf "settings of %s: they are %d bytes long, and an annotation of the pods keeps at most 131072; shorten them" .component (len .settings)) -}}
{{- end -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  {{- include "tandem.metadata" (merge (dict "suffix" .component "annotations" (ternary (dict "tandem/sized-by" .sizedBy) dict (hasKey . "sizedBy"))) .) | nindent 2 }}
spec:
  {{- if hasKey . "replicas" }}
  replicas: {{ .replicas }}
  {{- end }}
  revisionHistoryLimit: 5
  {{- with include "tandem.minReadySeconds" . | int }}
  minReadySeconds: {{ . }}
  {{- end }}
  progressDeadlineSeconds: {{ include "tandem.progressDeadline" . }}
  strategy:
    {{- toYaml (.spec.strategy | default (dict "type" "RollingUpdate" "rollingUpdate" (dict "maxSurge" 1 "maxUnavailable" 0))) | nindent 4 }}
  selector:
    matchLabels: {{- include "tandem.selector" . | nindent 6 }}
  template:
    metadata:
      labels:
        {{- include "tandem.podLabels" (merge (dict "labels" .spec.podLabels) .) | nindent 8 }}
      annotations:
        # Here, so that each revision keeps its own: a pod of the old one that restarts during a rollout reads what it began with, and a rollback restores it.
        tandem/settings: |
          {{- .settings | nindent 10 }}
        # Nothing in them must outlive a pod, so a cluster autoscaler may remove the node.
        {{- if not (hasKey .spec.podAnnotations "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes") }}
        cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes: "tmp,cache,shm,model"
        {{- end }}
        {{- with .spec.podAnnotations }}
        {{- include "tandem.texts" . | nindent 8 }}
        {{- end }}
    spec:
      {{- include "tandem.podSettings" . | nindent 6 }}
      terminationGracePeriodSeconds: {{ include "tandem.terminationGrace" $settings }}
      {{- with concat (include "tandem.modelInit" . | fromYamlArray) .spec.initContainers }}
      initContainers: {{- toYaml . | nindent 8 }}
      {{- end }}
      containers:
        - name: {{ .component }}
          {{- include "tandem.container" . | nindent 10 }}
        {{- with .spec.sidecars }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      volumes: {{- include "tandem.volumes" . | nindent 8 }}
{{- end -}}

{{/*
How long a new pod is ready before an old one drains, so that those who find it by DNS know it by then: the 30 s for which a cluster's DNS caches its answer, with a margin. Clients resolve routers
by their headless Service, whatever `discovery` is; of an instance every router resolves the name anew, which takes an interval and a fifth more, unless EndpointSlices tell of it before it is ready.
With Recreate no old one is left.
*/}}
{{- define "tandem.minReadySeconds" -}}
{{- $cached := 34 -}}
{{- if hasKey .spec "minReadySeconds" -}}{{ .spec.minReadySeconds | int }}
{{- else if eq (dig "type" "" (.spec.strategy | default dict)) "Recreate" -}}0
{{- else if eq .component "router" -}}{{ $cached }}
{{- else if ne .root.Values.discovery "dns" -}}0
{{- else -}}{{ min 240 (add $cached (ceil (mulf 1.2 (dig "pools" "dns_interval_s" 5 .root.Values.router.settings)))) }}
{{- end -}}
{{- end -}}

{{/* Seconds until a new pod is ready where it gets its room, say a GPU, when an old one has drained. Routers wait for instances, so for the longest of these drains. */}}
{{- define "tandem.progressDeadline" -}}
{{- $drain := include "tandem.terminationGrace" (fromYaml .settings) | int -}}
{{- if eq .component "router" -}}
{{- range $role := list "prefill" "decode" -}}
{{- $pool := include "tandem.pool" (dict "root" $.root "component" $role) | fromYaml -}}
{{- $drain = max $drain (include "tandem.terminationGrace" $pool.settings | int) -}}
{{- end -}}
{{- end -}}
{{- add (include "tandem.startDeadline" .) $drain -}}
{{- end -}}

{{/* The chart's volumes, then the user's. */}}
{{- define "tandem.volumes" -}}
- name: settings
  downwardAPI: {items: [{path: settings.yaml, fieldRef: {fieldPath: "metadata.annotations['tandem/settings']"}}]}
- name: tmp
  emptyDir: {sizeLimit: {{ .spec.scratchSize | quote }}}
- name: cache
  emptyDir: {sizeLimit: {{ .spec.scratchSize | quote }}}
{{- with include "tandem.modelVolumes" .root | trim }}
{{ . }}
{{- end }}
{{- with include "tandem.securityVolumes" . | trim }}
{{ . }}
{{- end }}
{{- if ne .component "router" }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .spec.shmSize | quote }}}
{{- with include "tandem.connectorVolumes" .root | trim }}
{{ . }}
{{- end }}
{{- end }}
{{- with .spec.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Where they are mounted. */}}
{{- define "tandem.mounts" -}}
- {name: settings, mountPath: /etc/tandem/settings, readOnly: true}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /var/cache/tandem}
{{- with include "tandem.modelMounts" .root | trim }}
{{ . }}
{{- end }}
{{- with include "tandem.securityMounts" . | trim }}
{{ . }}
{{- end }}
{{- if ne .component "router" }}
- {name: shm, mountPath: /dev/shm}
{{- with include "tandem.connectorMounts" .root | trim }}
{{ . }}
{{- end }}
{{- end }}
{{- with .spec.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tandem.servesOpenai" -}}
{{- if and (eq .component "router") .root.Values.router.openai.enabled -}}true{{- end -}}
{{- end -}}

{{/* Where a pod runs: the fields of a component's values that a pod spec has under the same name. */}}
{{- define "tandem.placement" -}}
{{- $spec := . -}}
{{- with $spec.nodeSelector }}
nodeSelector: {{- include "tandem.texts" . | nindent 2 }}
{{- end }}
{{- range $field := list "tolerations" "affinity" "priorityClassName" "schedulerName" "dnsConfig" "runtimeClassName" "resourceClaims" }}
{{- with index $spec $field }}
{{ $field }}: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* What a pod has beside its containers and volumes. */}}
{{- define "tandem.podSettings" -}}
serviceAccountName: {{ include "tandem.serviceAccount" . | quote }}
automountServiceAccountToken: {{ and (eq .component "router") (eq (include "tandem.asksKubernetes" .root) "true") }}
enableServiceLinks: false
securityContext: {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- include "tandem.pullSecrets" .root | nindent 0 }}
{{- include "tandem.placement" .spec }}
{{- if kindIs "invalid" .spec.topologySpreadConstraints }}
topologySpreadConstraints:
  - topologyKey: kubernetes.io/hostname
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "tandem.selector" . | nindent 8 }}
    matchLabelKeys: [pod-template-hash]
{{- else if .spec.topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml .spec.topologySpreadConstraints | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The container itself. Each probe asks for one service of grpc.health.v1; the port has no name, the kubelet wants a number. */}}
{{- define "tandem.container" -}}
{{- $probed := include "tandem.healthPort" .root -}}
image: {{ include "tandem.componentImage" . | quote }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
command: [python, -m, {{ .module }}]
args: [--config=/etc/tandem/settings/settings.yaml]
env: {{- include "tandem.mergedEnv" (dict "env" (include "tandem.env" .) "own" .spec.extraEnv) | nindent 2 }}
{{- with .spec.envFrom }}
envFrom: {{- toYaml . | nindent 2 }}
{{- end }}
ports:
  - {name: grpc, containerPort: {{ include "tandem.grpcPort" .root }}}
  - {name: health, containerPort: {{ $probed }}}
  {{- if eq .component "router" }}
  - {name: signals, containerPort: {{ include "tandem.signalsPort" .root }}}
  {{- end }}
  {{- if and (eq .component "router") .root.Values.inferencePool.enabled }}
  - {name: picker, containerPort: {{ include "tandem.pickerPort" .root }}}
  {{- end }}
  {{- if include "tandem.servesOpenai" . }}
  - {name: openai, containerPort: {{ .spec.openai.port }}}
  {{- end }}
  {{- if .root.Values.metrics.enabled }}
  - {name: metrics, containerPort: {{ .root.Values.metrics.port }}}
  {{- end }}
startupProbe:
  {{- $period := dig "startup" "periodSeconds" 5 .spec.probes }}
  grpc: {port: {{ $probed }}, service: ""}
  {{- include "tandem.probe" (dict "own" .spec.probes.startup "period" $period "timeout" 5 "failures" (max 1 (ceil (divf .startupSeconds $period)))) | nindent 2 }}
livenessProbe:
  grpc: {port: {{ $probed }}, service: ""}
  {{- include "tandem.probe" (dict "own" .spec.probes.liveness "period" 10 "timeout" 5 "failures" 3) | nindent 2 }}
readinessProbe:
  grpc: {port: {{ $probed }}, service: {{ .ready }}}
  {{- include "tandem.probe" (dict "own" .spec.probes.readiness "period" 3 "timeout" 3 "failures" 2) | nindent 2 }}
securityContext: {{- include "tandem.securityContext" . | nindent 2 }}
resources: {{- include "tandem.resources" . | nindent 2 }}
volumeMounts: {{- include "tandem.mounts" . | nindent 2 }}
{{- end -}}

{{/* The times of a probe: the chart's, and the user's over them. */}}
{{- define "tandem.probe" -}}
{{- toYaml (merge (deepCopy .own) (dict "periodSeconds" .period "timeoutSeconds" .timeout "failureThreshold" .failures)) -}}
{{- end -}}

{{/* Variables: what only the pod knows, and where libraries may write. Settings in the environment go before the file. */}}
{{- define "tandem.env" -}}
{{- $resources := .spec.resources | default dict -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- {name: TANDEM_SERVER__HOST, value: {{ ternary (include "tandem.bindAddress" .root) "$(POD_IP)" (eq .component "router") | quote }}}
{{- if .root.Values.metrics.enabled }}
- {name: TANDEM_METRICS__LISTEN, value: "[$(POD_IP)]:{{ .root.Values.metrics.port }}"}
{{- end }}
- {name: TANDEM_HEALTH__LISTEN, value: "[$(POD_IP)]:{{ include "tandem.healthPort" .root }}"}
{{- if eq .component "router" }}
- {name: TANDEM_SIGNALS__LISTEN, value: "[$(POD_IP)]:{{ include "tandem.signalsPort" .root }}"}
{{- if .root.Values.inferencePool.enabled }}
- {name: TANDEM_ENDPOINT_PICKER__LISTEN, value: "[$(POD_IP)]:{{ include "tandem.pickerPort" .root }}"}
{{- end }}
{{- with .spec.adminListen }}
- {name: TANDEM_ROUTER__ADMIN_LISTEN, value: {{ replace "$(POD_IP):" "[$(POD_IP)]:" . | quote }}}
{{- end }}
{{- if include "tandem.servesOpenai" . }}
- {name: TANDEM_HTTP__LISTEN, value: "[{{ include "tandem.bindAddress" .root }}]:{{ .spec.openai.port }}"}
{{- if .spec.openai.page }}
- {name: TANDEM_HTTP__PAGE, value: "true"}
{{- end }}
{{- end }}
{{- else }}
- name: TANDEM_INSTANCE__ID
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- if .spec.domain }}
- {name: TANDEM_INSTANCE__DOMAIN, value: {{ .spec.domain | quote }}}
{{- else if .spec.domainLabel }}
- name: TANDEM_INSTANCE__DOMAIN
  valueFrom: {fieldRef: {fieldPath: "metadata.labels['{{ .spec.domainLabel }}']"}}
{{- end }}
{{- $which := ternary "limits" "requests" (hasKey ($resources.limits | default dict) "cpu") }}
{{- if and (hasKey (index $resources $which | default dict) "cpu") (not (dig "engine" "num_threads" "" .spec.settings)) (eq (include "tandem.workers" . | int) 1) }}
- name: TANDEM_ENGINE__NUM_THREADS
  valueFrom: {resourceFieldRef: {containerName: {{ .component }}, resource: {{ $which }}.cpu}}
{{- end }}
- {name: NUMBA_CACHE_DIR, value: /var/cache/tandem/numba}
- {name: TRITON_CACHE_DIR, value: /var/cache/tandem/triton}
{{- include "tandem.connectorEnv" .root }}
{{- end }}
- {name: XDG_CACHE_HOME, value: /var/cache/tandem}
- {name: HOME, value: /tmp}
{{- end -}}

{{/*
With the user's variables, which replace the chart's of the same name: (dict "env" the chart's, as YAML, "own" the user's). They come last and may contain all of the chart's, except one that the chart's
contain, such as $(POD_IP): Kubernetes expands it only in what follows, so it takes the place of the chart's, after the user's before it that contain none of the chart's to come.
*/}}
{{- define "tandem.mergedEnv" -}}
{{- $chart := .env -}}
{{- $own := list -}}
{{- $byName := dict -}}
{{- range .own -}}
{{- $one := ternary (merge (dict "value" (include "tandem.text" .value)) .) . (and (hasKey . "value") (not (kindIs "invalid" .value))) -}}
{{- $own = append $own $one -}}
{{- $_ := set $byName .name $one -}}
{{- end -}}
{{- $merged := list -}}
{{- $placed := list -}}
{{- $toCome := list -}}
{{- range $chart | fromYamlArray }}{{ $toCome = append $toCome .name }}{{ end -}}
{{- range $chart | fromYamlArray -}}
{{- $name := .name -}}
{{- if not (hasKey $byName $name) -}}
{{- $merged = append $merged . -}}
{{- else if and (contains (printf "$(%s)" $name) $chart) (not (has $name $placed)) -}}
{{- $isBefore := true -}}
{{- range $one := $own -}}
{{- if eq $one.name $name }}{{ $isBefore = false }}{{ end -}}
{{- $mayMove := and $isBefore (not (has $one.name $placed)) -}}
{{- range $toCome }}{{ if contains (printf "$(%s)" .) ($one.value | default "") }}{{ $mayMove = false }}{{ end }}{{ end -}}
{{- if or $mayMove (eq $one.name $name) -}}
{{- $merged = append $merged $one -}}
{{- $placed = append $placed $one.name -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $toCome = without $toCome $name -}}
{{- end -}}
{{- range $own -}}
{{- if not (has .name $placed) }}{{ $merged = append $merged . }}{{ end -}}
{{- end -}}
{{- toYaml $merged -}}
{{- end -}}

{{- define "tandem.securityContext" -}}
{{- $context := deepCopy (.root.Values.containerSecurityContext | default dict) -}}
{{- with .spec.addCapabilities -}}
{{- $_ := set $context "capabilities" (mustMergeOverwrite ($context.capabilities | default dict) (dict "add" .)) -}}
{{- end -}}
{{- toYaml $context -}}
{{- end -}}

{{/* Resources, with the GPUs and all claims of the pod. */}}
{{- define "tandem.resources" -}}
{{- $resources := deepCopy (.spec.resources | default dict) -}}
{{- if ne .component "router" -}}
{{- with .spec.gpu -}}
{{- if gt (.count | int) 0 -}}
{{- $_ := set $resources "limits" (mustMergeOverwrite ($resources.limits | default dict) (dict .resource (.count | int))) -}}
{{- end -}}
{{- end -}}
{{- with .spec.resourceClaims -}}
{{- $claims := list -}}
{{- range . }}{{ $claims = append $claims (dict "name" .name) }}{{ end -}}
{{- $_ := set $resources "claims" $claims -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{/* A headless Service: of each ready pod the address at which it listens. */}}
{{- define "tandem.headlessService" -}}
apiVersion: v1
kind: Service
metadata:
  {{- include "tandem.metadata" . | nindent 2 }}
spec:
  type: ClusterIP
  clusterIP: None
  {{- include "tandem.ipFamily" .root | nindent 2 }}
  publishNotReadyAddresses: false
  selector: {{- include "tandem.selector" . | nindent 4 }}
  ports:
    - {name: grpc, port: {{ include "tandem.grpcPort" .root }}, targetPort: grpc, appProtocol: {{ include "tandem.grpcProtocol" .root }}}
    {{- if include "tandem.servesOpenai" . }}
    - {name: openai, port: {{ .spec.openai.port }}, targetPort: openai, appProtocol: {{ include "tandem.httpProtocol" .root }}}
    {{- end }}
    {{- if .root.Values.metrics.enabled }}
    - {name: metrics, port: {{ .root.Values.metrics.port }}, targetPort: metrics}
    {{- end }}
{{- end -}}

{{- define "tandem.disruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "tandem.metadata" (merge (dict "suffix" .component) .) | nindent 2 }}
spec:
  maxUnavailable: {{ .spec.maxUnavailable }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels: {{- include "tandem.selector" . | nindent 6 }}
{{- end -}}
