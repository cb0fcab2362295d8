{{/*
TLS and tokens of each component (docs/security.md). Secrets are mounted as whole folders, never by subPath: the kubelet
replaces their files when the Secret changes, and the services read them again.
*/}}

{{/* DNS names inside the namespace that certificates carry. */}}
{{- define "tandem.routerName" -}}
{{- .Values.tls.routerName | default (printf "%s-router.%s.svc" (include "tandem.fullname" .) .Release.Namespace) -}}
{{- end -}}

{{- define "tandem.instanceName" -}}
{{- .Values.tls.instanceName | default (printf "%s-instance.%s.svc" (include "tandem.fullname" .) .Release.Namespace) -}}
{{- end -}}

{{/* Protocols of a Service's ports: TLS ports are named https. */}}
{{- define "tandem.grpcProtocol" -}}
{{- ternary "https" "kubernetes.io/h2c" .Values.tls.enabled -}}
{{- end -}}

{{- define "tandem.httpProtocol" -}}
{{- ternary "https" "http" .Values.tls.enabled -}}
{{- end -}}

{{/* Name of the Secret with a component's certificate: (dict "root" $ "component" "decode") */}}
{{- define "tandem.tlsSecret" -}}
{{- $tls := .root.Values.tls -}}
{{- $who := ternary "router" "instance" (eq .component "router") -}}
{{- if $tls.existingSecret -}}
{{- ternary $tls.existingSecret ($tls.existingInstanceSecret | default $tls.existingSecret) (eq $who "router") -}}
{{- else -}}
{{- printf "%s-%s-tls" (include "tandem.fullname" .root) $who -}}
{{- end -}}
{{- end -}}

{{- define "tandem.caFile" -}}
{{- ternary "/etc/tandem/ca/ca.crt" "/etc/tandem/tls/ca.crt" (ne .Values.tls.existingCaConfigMap "") -}}
{{- end -}}

{{/* Names that a router asks of those who show it a certificate. Its own is among them: `helm test` shows that. */}}
{{- define "tandem.clientNames" -}}
{{- with .Values.tls.clients.names -}}
{{- uniq (append . (include "tandem.routerName" $)) | toJson -}}
{{- else -}}
[]
{{- end -}}
{{- end -}}

{{/* The sections `tls` and `auth` of a component's settings. */}}
{{- define "tandem.securitySettings" -}}
{{- $root := .root -}}
{{- $auth := $root.Values.auth -}}
{{- $isRouter := eq .component "router" -}}
{{- if $root.Values.tls.enabled }}
tls:
  cert_file: /etc/tandem/tls/tls.crt
  key_file: /etc/tandem/tls/tls.key
  ca_file: {{ include "tandem.caFile" $root }}
  peer_name: {{ include "tandem.instanceName" $root | quote }}
  {{- if $isRouter }}
  client_names: {{ include "tandem.clientNames" $root }}
  require_client_cert: {{ $root.Values.tls.clients.certificateRequired }}
  {{- else }}
  client_names: [{{ include "tandem.routerName" $root | quote }}, {{ include "tandem.instanceName" $root | quote }}]
  {{- end }}
{{- end }}
{{- if and $isRouter $auth.existingSecret }}
auth:
  {{- if $auth.existingSecretTokensKey }}
  tokens_file: /etc/tandem/auth/tokens
  {{- end }}
  {{- if $auth.existingSecretAdminTokensKey }}
  admin_tokens_file: /etc/tandem/auth/admin-tokens
  {{- end }}
{{- end }}
{{- end -}}

{{- define "tandem.securityVolumes" -}}
{{- $auth := .root.Values.auth -}}
{{- include "tandem.tlsVolumes" . }}
{{- if and (eq .component "router") $auth.existingSecret }}
- name: auth
  secret:
    secretName: {{ $auth.existingSecret | quote }}
    defaultMode: {{ include "tandem.secretMode" .root }}
    items:
      {{- with $auth.existingSecretTokensKey }}
      - {key: {{ . | quote }}, path: tokens}
      {{- end }}
      {{- with $auth.existingSecretAdminTokensKey }}
      - {key: {{ . | quote }}, path: admin-tokens}
      {{- end }}
{{- end }}
{{- end -}}

{{- define "tandem.securityMounts" -}}
{{- include "tandem.tlsMounts" . }}
{{- if and (eq .component "router") .root.Values.auth.existingSecret }}
- {name: auth, mountPath: /etc/tandem/auth, readOnly: true}
{{- end }}
{{- end -}}

{{- define "tandem.tlsVolumes" -}}
{{- $tls := .root.Values.tls -}}
{{- if $tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "tandem.tlsSecret" . | quote }}
    defaultMode: {{ include "tandem.secretMode" .root }}
{{- if $tls.existingCaConfigMap }}
{{- include "tandem.caVolume" .root }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The CAs alone. */}}
{{- define "tandem.caVolume" -}}
{{- $tls := .Values.tls }}
- name: ca
{{- if $tls.existingCaConfigMap }}
  configMap:
    name: {{ $tls.existingCaConfigMap | quote }}
    items: [{key: {{ $tls.existingCaConfigMapKey | quote }}, path: ca.crt}]
{{- else }}
  secret:
    secretName: {{ include "tandem.tlsSecret" (dict "root" . "component" "router") | quote }}
    defaultMode: {{ include "tandem.secretMode" . }}
    items: [{key: ca.crt, path: ca.crt}]
{{- end }}
{{- end -}}

{{- define "tandem.tlsMounts" -}}
{{- if .root.Values.tls.enabled }}
- {name: tls, mountPath: /etc/tandem/tls, readOnly: true}
{{- if .root.Values.tls.existingCaConfigMap }}
- {name: ca, mountPath: /etc/tandem/ca, readOnly: true}
{{- end }}
{{- end }}
{{- end -}}

{{/* Mode of the files of a Secret. The kubelet gives them to root, and to the group of the pods if they have one. */}}
{{- define "tandem.secretMode" -}}
{{- ternary "0444" "0440" (kindIs "invalid" (get (.Values.podSecurityContext | default dict) "fsGroup" | default nil)) -}}
{{- end -}}
