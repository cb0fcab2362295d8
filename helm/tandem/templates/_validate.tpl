{{/* Rejects combinations of values that the schema cannot express. Each message names the value and the fix. */}}
{{- define "tandem.validate" -}}
{{- $connector := .Values.connector -}}
{{- $names := include "tandem.connectors" . | fromJsonArray -}}
{{- $known := list "null" "nixl" "redis" "shared_storage" "lmcache" -}}
{{- if ne (len $names) (len (uniq $names)) -}}
{{- fail (printf "connector.name: %q names a connector twice" $connector.name) -}}
{{- end -}}
{{- range $name := $names -}}
{{- if not (or (has $name $known) (contains ":" $name)) -}}
{{- fail (printf "connector.name: %q is none of %s, nor module:Class" $name (join ", " $known)) -}}
{{- end -}}
{{- end -}}
{{- range $name := rest $names -}}
{{- if has $name (list "nixl" "null") -}}
{{- fail (printf "connector.name: %s stores nothing: it can only be the first of a list, which hands over; write connector.name=%s,…" $name $name) -}}
{{- end -}}
{{- end -}}
{{- if and (gt (len $names) 1) (has "null" $names) -}}
{{- fail "connector.name: null moves nothing and stands alone" -}}
{{- end -}}
{{- if and (has "lmcache" $names) (or (has "redis" $names) (has "shared_storage" $names)) -}}
{{- fail "connector.name: lmcache shares its address or volume with redis and shared_storage; put it alone, or after nixl" -}}
{{- end -}}
{{- if and (has "lmcache" $names) (eq $connector.lmcache.place "server") (not $connector.lmcache.serverUrl) -}}
{{- fail "connector.lmcache.serverUrl: place is server, so give tcp://host:port of an `lmcache server`" -}}
{{- end -}}
{{- if and (include "tandem.usesRedis" .) (not $connector.redis.bundled) (not $connector.redis.url) -}}
{{- fail "connector.redis.url: redis is not bundled, so give redis://host:port/db, or set connector.redis.bundled=true" -}}
{{- end -}}
{{- if and (include "tandem.usesRedis" .) $connector.redis.bundled $connector.redis.url -}}
{{- fail "connector.redis.url: the bundled Redis would not be used; set connector.redis.bundled=false, or leave url empty" -}}
{{- end -}}
{{- if and (include "tandem.bundlesRedis" .) (not (has $connector.redis.username (list "" "default"))) -}}
{{- fail (printf "connector.redis.username: the bundled Redis has no user %q; leave it out, or set connector.redis.bundled=false" $connector.redis.username) -}}
{{- end -}}
{{- if and (include "tandem.usesRedis" .) (not (include "tandem.redisSecret" .)) (not (has $connector.redis.username (list "" "default"))) -}}
{{- fail (printf "connector.redis.username: %q has no password; give connector.redis.existingSecret, or leave it out" $connector.redis.username) -}}
{{- end -}}
{{- range $value, $suffix := dict "key" "kv-key" "redis" "redis" -}}
{{- $given := (index $connector $value).existingSecret -}}
{{- if eq $given (printf "%s-%s" (include "tandem.fullname" $) $suffix) -}}
{{- fail (printf "connector.%s.existingSecret: %s is the name of the Secret that the chart creates where none is given; if this release created it, Helm deletes it when it is named here; copy it to a Secret with another name, and give that name" $value $given) -}}
{{- end -}}
{{- end -}}
{{- if and $connector.capacityBytes (not (include "tandem.usesVolume" .)) -}}
{{- fail (printf "connector.capacityBytes: means nothing to %s; a Redis is bounded by connector.redis.maxMemory" $connector.name) -}}
{{- end -}}
{{- range $option, $_ := $connector.options -}}
{{- $own := last (splitList "." $option) -}}
{{- if and (gt (len $names) 1) (not (has (trimSuffix (printf ".%s" $own) $option) (without $names $option))) -}}
{{- fail (printf "connector.options.%s: in a list of connectors an option has the name of its connector; write %s.%s" $option (last $names) $own) -}}
{{- end -}}
{{- end -}}
{{- if and (include "tandem.usesVolume" .) (not $connector.sharedStorage.existingClaim) (not (has "ReadWriteMany" $connector.sharedStorage.accessModes)) -}}
{{- fail "connector.sharedStorage.accessModes: all instances write to this volume, so it is [ReadWriteMany]; for one node give an existingClaim" -}}
{{- end -}}
{{- $model := .Values.model -}}
{{- if and (eq $model.source "hub") (not $model.hub.id) -}}
{{- fail "model.hub.id: model.source is hub, so give owner/name" -}}
{{- end -}}
{{- if and (eq $model.source "oci") (not $model.oci.reference) -}}
{{- fail "model.oci.reference: model.source is oci, so give the image with the checkpoint" -}}
{{- end -}}
{{- if and $model.hub.preload (not (and (eq $model.source "hub") (include "tandem.modelCacheClaim" .))) -}}
{{- fail "model.hub.preload: it fills the cache; set model.source=hub, and model.hub.cache.create=true or model.hub.cache.existingClaim" -}}
{{- end -}}
{{- if and (eq $model.source "claim") (not $model.claim.name) -}}
{{- fail "model.claim.name: model.source is claim, so give the PersistentVolumeClaim with the checkpoint" -}}
{{- end -}}
{{- if and (eq $model.source "hub") $model.hub.cache.create (not $model.hub.cache.existingClaim) (not (has "ReadWriteMany" $model.hub.cache.accessModes)) -}}
{{- fail "model.hub.cache.accessModes: all pods mount this volume, so it is [ReadWriteMany]; for one node give an existingClaim" -}}
{{- end -}}
{{- $keda := .Values.autoscaling.keda -}}
{{- $least := add (max 1 (int .Values.autoscaling.prefill.minReplicas)) (max 1 (int .Values.autoscaling.decode.minReplicas)) -}}
{{- $most := dig "autoscaler" "max_instances" nil .Values.router.settings -}}
{{- if and (or (eq .Values.autoscaling.mode "builtin") $keda.enabled) (not (kindIs "invalid" $most)) (lt (int $most) (int $least)) -}}
{{- fail (printf "router.settings.autoscaler.max_instances: %d is below the sum of both minReplicas, which is %d%s" (int $most) (int $least) (ternary " (0 counts as 1)" "" $keda.enabled)) -}}
{{- end -}}
{{- if and $keda.enabled (ne .Values.autoscaling.mode "external") -}}
{{- fail (printf "autoscaling.keda.enabled: autoscaling.mode is %s, which sizes the pools too; set it to external" .Values.autoscaling.mode) -}}
{{- end -}}
{{- if and $keda.enabled .Values.tls.enabled (not $keda.authenticationRef) -}}
{{- fail "autoscaling.keda.authenticationRef: tls is enabled, so KEDA needs a certificate and the CA; name a TriggerAuthentication that has them" -}}
{{- end -}}
{{- range $role := list "prefill" "decode" -}}
{{- $bounds := index $.Values.autoscaling $role -}}
{{- if and (eq ($bounds.minReplicas | int) 0) (not $keda.enabled) -}}
{{- fail (printf "autoscaling.%s.minReplicas: 0 needs autoscaling.keda.enabled, which starts the first pod" $role) -}}
{{- end -}}
{{- if gt ($bounds.minReplicas | int) ($bounds.maxReplicas | int) -}}
{{- fail (printf "autoscaling.%s.minReplicas: %d is above maxReplicas, which is %d" $role ($bounds.minReplicas | int) ($bounds.maxReplicas | int)) -}}
{{- end -}}
{{- $window := dig "scaleDown" "stabilizationWindowSeconds" 300 $keda.behavior | int -}}
{{- $spec := include "tandem.pool" (dict "root" $ "component" $role) | fromYaml -}}
{{- $readySeconds := include "tandem.minReadySeconds" (dict "root" $ "component" $role "spec" $spec) | int -}}
{{- if and $keda.enabled (lt $window (add 60 $readySeconds | int)) -}}
{{- fail (printf "autoscaling.keda.behavior.scaleDown.stabilizationWindowSeconds: %d is less than 60 s and the minReadySeconds of the %s pool, which are %d: a new pod could be removed before it counts; set it to %d or more" $window $role $readySeconds (add 60 $readySeconds)) -}}
{{- end -}}
{{- end -}}
{{- include "tandem.validateEngines" . -}}
{{- include "tandem.validateSecurity" . -}}
{{- include "tandem.validateWaysIn" . -}}
{{- if include "tandem.bundlesRedis" . }}{{ include "tandem.validateRedis" . }}{{ end -}}
{{- include "tandem.validateLabels" . -}}
{{- include "tandem.validatePorts" . -}}
{{- range $component := list "router" "prefill" "decode" -}}
{{- $spec := include "tandem.router" $ | fromYaml -}}
{{- if ne $component "router" }}{{ $spec = include "tandem.pool" (dict "root" $ "component" $component) | fromYaml }}{{ end -}}
{{- include "tandem.validateWorkload" (dict "root" $ "component" $component "spec" $spec) -}}
{{- end -}}
{{- if and .Values.metrics.alerts.enabled (not .Values.metrics.enabled) -}}
{{- fail "metrics.alerts.enabled: nothing would be measured; set metrics.enabled=true" -}}
{{- end -}}
{{- if and (ne .Values.metrics.monitor.kind "none") (not .Values.metrics.enabled) -}}
{{- fail (printf "metrics.monitor.kind: a %s would find no port; set metrics.enabled=true" .Values.metrics.monitor.kind) -}}
{{- end -}}
{{- if not .Values.serviceAccount.create -}}
{{- if not (and .Values.serviceAccount.routerName .Values.serviceAccount.instanceName) -}}
{{- fail "serviceAccount.routerName and serviceAccount.instanceName: serviceAccount.create is false, so both are needed" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Rejects a Redis that would be killed for its memory. */}}
{{- define "tandem.validateRedis" -}}
{{- $redis := .Values.connector.redis -}}
{{- $limit := include "tandem.text" (dig "limits" "memory" "" $redis.resources) -}}
{{- $pages := include "tandem.bytes" (regexReplaceAll "b$" $redis.maxMemory "i" | replace "k" "K" | replace "m" "M" | replace "g" "G") | float64 -}}
{{- if and $limit (lt (include "tandem.bytes" $limit | float64) (mulf $pages 1.25)) -}}
{{- fail (printf "connector.redis.resources.limits.memory: %s is less than a quarter above maxMemory, which is %s; raise the limit and the request" $limit $redis.maxMemory) -}}
{{- end -}}
{{- end -}}

{{/* A quantity of Kubernetes in bytes. */}}
{{- define "tandem.bytes" -}}
{{- $unit := regexFind "[A-Za-z]*$" . -}}
{{- $power := index (dict "" 0 "k" 1 "K" 1 "M" 2 "G" 3 "T" 4 "P" 5 "E" 6) (trimSuffix "i" $unit) | int -}}
{{- $factor := ternary 1024 1000 (hasSuffix "i" $unit) -}}
{{- $bytes := trimSuffix $unit . | float64 -}}
{{- range until $power }}{{ $bytes = mulf $bytes $factor }}{{ end -}}
{{- printf "%.0f" $bytes -}}
{{- end -}}

{{/* Minutes of a duration in hours or minutes. */}}
{{- define "tandem.minutes" -}}
{{- mul (regexFind "^[0-9]+" . | int) (ternary 60 1 (hasSuffix "h" .)) -}}
{{- end -}}

{{/* Rejects values that would silently disable protection. */}}
{{- define "tandem.validateSecurity" -}}
{{- $tls := .Values.tls -}}
{{- $issuer := $tls.certManager.issuerRef.name -}}
{{- if and $tls.enabled (not $tls.existingSecret) (not $issuer) -}}
{{- fail "tls.enabled: give the certificates by tls.existingSecret, or let cert-manager make them by tls.certManager.issuerRef.name" -}}
{{- end -}}
{{- $renewed := include "tandem.minutes" $tls.certManager.renewBefore | int -}}
{{- if and $issuer (ge $renewed (include "tandem.minutes" $tls.certManager.duration | int)) -}}
{{- fail (printf "tls.certManager.renewBefore: %s must be less than duration, which is %s" $tls.certManager.renewBefore $tls.certManager.duration) -}}
{{- end -}}
{{- if and $issuer .Values.metrics.alerts.enabled (ge (int .Values.metrics.alerts.certificateSeconds) (mul $renewed 60 | int)) -}}
{{- fail (printf "metrics.alerts.certificateSeconds: %d must be less than tls.certManager.renewBefore, which is %s: every certificate would raise the alert" (int .Values.metrics.alerts.certificateSeconds) $tls.certManager.renewBefore) -}}
{{- end -}}
{{- if and $tls.existingSecret $issuer -}}
{{- fail "tls.existingSecret: tls.certManager.issuerRef.name makes other Secrets; leave one of the two empty" -}}
{{- end -}}
{{- if and $tls.existingInstanceSecret (not $tls.existingSecret) -}}
{{- fail "tls.existingInstanceSecret: the routers need a certificate too, in tls.existingSecret" -}}
{{- end -}}
{{- if and (not $tls.enabled) (or $tls.existingSecret $issuer $tls.existingCaConfigMap $tls.clients.certificateRequired $tls.clients.names) -}}
{{- fail "tls.enabled: it is false, and other values of tls are given that would do nothing; set tls.enabled=true" -}}
{{- end -}}
{{- $auth := .Values.auth -}}
{{- if and .Values.router.openai.page (not (and .Values.router.openai.enabled $auth.existingSecret $auth.existingSecretAdminTokensKey)) -}}
{{- fail "router.openai.page: set router.openai.enabled=true, and auth.existingSecret with auth.existingSecretAdminTokensKey: operators need a token for the page" -}}
{{- end -}}
{{- if and $auth.existingSecret (not $auth.existingSecretTokensKey) (not $auth.existingSecretAdminTokensKey) -}}
{{- fail "auth.existingSecret: none of its keys is used; give auth.existingSecretTokensKey or auth.existingSecretAdminTokensKey" -}}
{{- end -}}
{{- end -}}

{{/* Rejects ways to ports that are not there, and from nowhere. */}}
{{- define "tandem.validateWaysIn" -}}
{{- $routes := .Values.routes -}}
{{- range $value, $isEnabled := dict "ingress" .Values.ingress.enabled "routes.http" $routes.http.enabled "inferencePool" .Values.inferencePool.enabled -}}
{{- if and $isEnabled (not $.Values.router.openai.enabled) -}}
{{- fail (printf "%s.enabled: it leads to OpenAI's HTTP API; set router.openai.enabled=true" $value) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) -}}
{{- fail "ingress.hosts: give the host names for which this is the backend" -}}
{{- end -}}
{{- $service := .Values.router.service -}}
{{- if and $service.loadBalancerSourceRanges (ne $service.type "LoadBalancer") -}}
{{- fail (printf "router.service.loadBalancerSourceRanges: the Service is a %s; set router.service.type=LoadBalancer, or networkPolicy.clients" $service.type) -}}
{{- end -}}
{{- range $kind, $route := $routes -}}
{{- if and $route.enabled (not $route.parentRefs) -}}
{{- fail (printf "routes.%s.parentRefs: name the Gateway, as in [{name: public, namespace: gateways}]" $kind) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Rejects labels and annotations that the chart sets itself: with others of the same name, selectors would miss their pods. */}}
{{- define "tandem.validateLabels" -}}
{{- $metrics := .Values.metrics -}}
{{- $maps := dict "commonLabels" .Values.commonLabels "router.podLabels" .Values.router.podLabels "instance.podLabels" .Values.instance.podLabels -}}
{{- $_ := set $maps "metrics.monitor.labels" $metrics.monitor.labels -}}
{{- $_ := set $maps "metrics.alerts.labels" $metrics.alerts.labels -}}
{{- $_ := set $maps "metrics.dashboard.labels" $metrics.dashboard.labels -}}
{{- range $role, $pool := .Values.pools }}{{ $_ := set $maps (printf "pools.%s.podLabels" $role) ($pool.podLabels | default dict) }}{{ end -}}
{{- $reserved := list "helm.sh/chart" "pod-template-hash" -}}
{{- range list "name" "instance" "component" "part-of" "version" "managed-by" }}{{ $reserved = append $reserved (printf "app.kubernetes.io/%s" .) }}{{ end -}}
{{- range $value, $labels := $maps -}}
{{- range $key, $_ := $labels -}}
{{- if has $key $reserved -}}
{{- fail (printf "%s: the chart sets %s itself; name yours differently" $value $key) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Rejects two listeners on one port. */}}
{{- define "tandem.validatePorts" -}}
{{- $router := .Values.router -}}
{{- $taken := dict (include "tandem.pickerPort" .) "the endpoint picker" (include "tandem.grpcPort" .) "gRPC" (include "tandem.healthPort" .) "probes" (include "tandem.signalsPort" .) "the routers' signals" -}}
{{- $wanted := dict -}}
{{- if .Values.metrics.enabled }}{{ $_ := set $wanted "metrics.port" .Values.metrics.port }}{{ end -}}
{{- if $router.openai.enabled }}{{ $_ := set $wanted "router.openai.port" $router.openai.port }}{{ end -}}
{{- with $router.adminListen }}{{ $_ := set $wanted "router.adminListen" (splitList ":" . | last) }}{{ end -}}
{{- range $value, $port := $wanted -}}
{{- if hasKey $taken (toString $port) -}}
{{- fail (printf "%s: port %s is taken by %s; choose another one" $value (toString $port) (get $taken (toString $port))) -}}
{{- end -}}
{{- $_ := set $taken (toString $port) $value -}}
{{- end -}}
{{- if and $router.openai.enabled (eq (int $router.service.port) (int $router.openai.port)) -}}
{{- fail (printf "router.service.port: %d is router.openai.port too, and the Service has both" (int $router.service.port)) -}}
{{- end -}}
{{- if has "nixl" (include "tandem.connectors" . | fromJsonArray) -}}
{{- $range := splitList "-" .Values.connector.nixl.tcpPorts -}}
{{- $first := first $range | int -}}
{{- $last := last $range | int -}}
{{- if or (gt $first $last) (gt $last 65535) -}}
{{- fail (printf "connector.nixl.tcpPorts: %s is no range: first-last, at most 65535" .Values.connector.nixl.tcpPorts) -}}
{{- end -}}
{{- range $port, $who := omit $taken (toString $router.openai.port) -}}
{{- if and (ge (int $port) $first) (le (int $port) $last) -}}
{{- fail (printf "connector.nixl.tcpPorts: %s contains port %s of %s" $.Values.connector.nixl.tcpPorts $port $who) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Rejects what no API server accepts of one component: (dict "component" "decode" "spec" its values) */}}
{{- define "tandem.validateWorkload" -}}
{{- $where := .component -}}
{{- range $who, $env := dict $where .spec.extraEnv "model.hub" (.root.Values.model.hub.extraEnv | default list) -}}
{{- $names := list -}}
{{- range $env }}{{ $names = append $names .name }}{{ end -}}
{{- if ne (len $names) (len (uniq $names)) -}}
{{- fail (printf "extraEnv of %s: a variable is there twice (%s)" $who (join ", " $names)) -}}
{{- end -}}
{{- end -}}
{{- range .spec.extraEnv -}}
{{- $setting := lower .name | trimPrefix "tandem_server__" -}}
{{- if and (hasPrefix "tandem_server__" (lower .name)) (has $setting (list "drain_accept_s" "drain_grace_s")) -}}
{{- fail (printf "extraEnv of %s: terminationGracePeriodSeconds would not follow %s; set server.%s in %s.settings" $where .name $setting (ternary "router" "instance" (eq $where "router"))) -}}
{{- end -}}
{{- end -}}
{{- $volumes := list -}}
{{- range include "tandem.volumes" . | fromYamlArray }}{{ $volumes = append $volumes .name }}{{ end -}}
{{- if ne (len $volumes) (len (uniq $volumes)) -}}
{{- fail (printf "extraVolumes of %s: a name is there twice (%s)" $where (join ", " $volumes)) -}}
{{- end -}}
{{- $paths := list -}}
{{- range include "tandem.mounts" . | fromYamlArray -}}
{{- $paths = append $paths (.mountPath | trimSuffix "/") -}}
{{- if not (has .name $volumes) -}}
{{- fail (printf "extraVolumeMounts of %s: there is no volume %q; name it in extraVolumes, or one of %s" $where .name (join ", " $volumes)) -}}
{{- end -}}
{{- end -}}
{{- if ne (len $paths) (len (uniq $paths)) -}}
{{- fail (printf "extraVolumeMounts of %s: a path is there twice (%s)" $where (join ", " $paths)) -}}
{{- end -}}
{{- $containers := list $where -}}
{{- range concat (include "tandem.modelInit" . | fromYamlArray) .spec.initContainers .spec.sidecars }}{{ $containers = append $containers .name }}{{ end -}}
{{- if ne (len $containers) (len (uniq $containers)) -}}
{{- fail (printf "sidecars and initContainers of %s: a name is there twice (%s)" $where (join ", " $containers)) -}}
{{- end -}}
{{- with .spec.gpu -}}
{{- if and (eq (int .count) 0) (hasKey (dig "limits" dict ($.spec.resources | default dict) | default dict) .resource) (not (dig "engine" "device" "" $.spec.settings)) -}}
{{- fail (printf "resources of %s: with a limit of %s alone the engine would use the CPU; set instance.gpu.count=1 instead, which sets the limit too" $where .resource) -}}
{{- end -}}
{{- end -}}
{{- if hasKey .spec.podAnnotations "tandem/settings" -}}
{{- fail (printf "podAnnotations of %s: the chart sets tandem/settings itself; name yours differently" $where) -}}
{{- end -}}
{{- $rolling := dig "rollingUpdate" dict (.spec.strategy | default dict) -}}
{{- if and (has (toString $rolling.maxSurge) (list "0" "0%")) (has (toString $rolling.maxUnavailable) (list "0" "0%")) -}}
{{- fail (printf "strategy of %s: with maxSurge and maxUnavailable of 0 no pod could be replaced; give one of them" $where) -}}
{{- end -}}
{{- end -}}
