{{/* Where the checkpoint lies in a pod, and how it comes there. */}}

{{- define "tandem.modelFolder" -}}
{{- $model := .Values.model -}}
{{- if eq $model.source "hub" -}}
/models/{{ $model.hub.id | replace "/" "--" }}/{{ $model.hub.revision | replace "/" "--" }}
{{- else if eq $model.source "claim" -}}
/models{{ with $model.claim.path }}/{{ trimAll "/" . }}{{ end }}
{{- else if eq $model.source "oci" -}}
/models{{ with $model.oci.path }}/{{ trimAll "/" . }}{{ end }}
{{- else -}}
{{ $model.image.path }}
{{- end -}}
{{- end -}}

{{- define "tandem.modelCacheClaim" -}}
{{- if .Values.model.hub.cache.existingClaim -}}
{{- .Values.model.hub.cache.existingClaim -}}
{{- else if .Values.model.hub.cache.create -}}
{{- printf "%s-model-cache" (include "tandem.fullname" .) -}}
{{- end -}}
{{- end -}}

{{- define "tandem.modelVolumes" -}}
{{- if eq .Values.model.source "claim" }}
- name: model
  persistentVolumeClaim: {claimName: {{ .Values.model.claim.name | quote }}, readOnly: true}
{{- else if eq .Values.model.source "oci" }}
- name: model
  image: {reference: {{ include "tandem.mirrored" (dict "root" . "image" .Values.model.oci.reference) | quote }}, pullPolicy: {{ .Values.model.oci.pullPolicy }}}
{{- else if eq .Values.model.source "hub" }}
- name: model
{{- if include "tandem.modelCacheClaim" . }}
  persistentVolumeClaim: {claimName: {{ include "tandem.modelCacheClaim" . | quote }}}
{{- else }}
  emptyDir: {sizeLimit: {{ .Values.model.hub.cache.size | quote }}}
{{- end }}
{{- with .Values.model.hub.existingCaConfigMap }}
- name: hub-ca
  configMap:
    name: {{ . | quote }}
    items: [{key: {{ $.Values.model.hub.existingCaConfigMapKey | quote }}, path: ca.crt}]
{{- end }}
{{- end }}
{{- end -}}

{{- define "tandem.modelMounts" -}}
{{- if ne .Values.model.source "image" }}
- {name: model, mountPath: /models, readOnly: true}
{{- end }}
{{- end -}}

{{- define "tandem.hubEnv" -}}
- {name: HF_HOME, value: /var/cache/tandem/hub}
- {name: HF_HUB_DISABLE_TELEMETRY, value: "1"}
{{- with .endpoint }}
- {name: HF_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- if .existingSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ .existingSecret | quote }}, key: {{ .existingSecretTokenKey | quote }}}}
{{- end }}
{{- if .existingCaConfigMap }}
- {name: SSL_CERT_FILE, value: /etc/tandem/hub-ca/ca.crt}
- {name: REQUESTS_CA_BUNDLE, value: /etc/tandem/hub-ca/ca.crt}
{{- end }}
{{- end -}}

{{/* Fetches what is not there yet of the files that engine/checkpoint.py would fetch. A router needs no weights: (dict "root" $ "component" "router"). */}}
{{- define "tandem.modelInit" -}}
{{- $root := .root -}}
{{- $hub := .root.Values.model.hub -}}
{{- if eq .root.Values.model.source "hub" }}
- name: model
  image: {{ include "tandem.componentImage" . | quote }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  # With a branch or tag, `hf` accepts an incomplete folder if the hub does not answer.
  command: [sh, -c]
  args:
    - |
      trap 'kill $!; exit 143' TERM  # which Linux keeps from PID 1 otherwise
      hf download "$@" &
      wait $! && cd "$0" || exit
      {{- if eq .component "router" }}
      files=config.json
      {{- else }}
      files='config.json *.safetensors'
      [ -e model.safetensors ] || files="$files $(grep -ohs '[^"]*\.safetensors' model.safetensors.index.json | sort -u)"
      {{- end }}
      for file in $files; do
        [ -e "$file" ] || {
          echo "$0 has no $file: the hub did not answer and an earlier download is incomplete, or the model has no such file" >&2
          exit 1
        }
      done
    - {{ include "tandem.modelFolder" .root | quote }}
    - {{ $hub.id | quote }}
    - --revision={{ $hub.revision }}
    - --local-dir={{ include "tandem.modelFolder" .root }}
    {{- range list "*.json" "*.jinja" "tokenizer.model" "merges.txt" "vocab.txt" }}
    - --include={{ . }}
    {{- end }}
    {{- range list "consolidated*" "[!a]*/*" "a[!d]*/*" "ad[!d]*/*" "add[!i]*/*" }}
    - --exclude={{ . }}
    {{- end }}
    {{- if ne .component "router" }}
    - --include=*.safetensors
    {{- end }}
  env: {{- include "tandem.mergedEnv" (dict "env" (include "tandem.hubEnv" $hub) "own" $hub.extraEnv) | nindent 4 }}
  securityContext: {{- toYaml .root.Values.containerSecurityContext | nindent 4 }}
  resources: {{- toYaml $hub.resources | nindent 4 }}
  volumeMounts:
    {{- if $hub.existingCaConfigMap }}
    - {name: hub-ca, mountPath: /etc/tandem/hub-ca, readOnly: true}
    {{- end }}
    - {name: model, mountPath: /models}
    - {name: cache, mountPath: /var/cache/tandem}
    - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end -}}

{{/*
Seconds until a new pod of a component is ready, at the most: to be scheduled and pull the image, to download, to load. A router is ready with its first
decode instance: (dict "root" $ "component" "decode")
*/}}
{{- define "tandem.startDeadline" -}}
{{- $model := .root.Values.model -}}
{{- $instance := add 300 $model.startupSeconds (ternary $model.hub.downloadSeconds 0 (eq $model.source "hub")) -}}
{{- ternary (add $instance 120) $instance (eq .component "router") -}}
{{- end -}}

{{/* Annotations of what the download before an upgrade needs; of its network policy too, which must be there first: (dict "root" $ "weight" "0") */}}
{{- define "tandem.preloadHook" -}}
helm.sh/hook: {{ ternary "pre-install,pre-upgrade" "pre-upgrade" (ne .root.Values.model.hub.cache.existingClaim "") }}
helm.sh/hook-weight: {{ .weight | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}
