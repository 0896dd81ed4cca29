{{/* Objects have fixed names: the CSIDriver's name and the operator's contract with the driver allow one installation
     per cluster. */}}

{{- define "forebay.selector" -}}
app.kubernetes.io/name: forebay
app.kubernetes.io/component: {{ . }}
{{- end -}}

{{- define "forebay.labels" -}}
app.kubernetes.io/name: forebay
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: forebay
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "forebay.image" -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag }}
{{- end -}}
{{- end -}}

{{- define "forebay.ownImage" -}}
{{- $image := .Values.image -}}
{{- include "forebay.image" (dict "repository" $image.repository "digest" $image.digest "tag" (default .Chart.AppVersion $image.tag)) -}}
{{- end -}}

{{/* What Pod Security's `restricted` asks of a pod and of a container. */}}
{{- define "forebay.restrictedPod" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "forebay.restrictedContainer" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* Replicas on different nodes and zones where that is possible. */}}
{{- define "forebay.spread" -}}
- maxSkew: 1
  topologyKey: kubernetes.io/hostname
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- include "forebay.selector" . | nindent 6 }}
- maxSkew: 1
  topologyKey: topology.kubernetes.io/zone
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- include "forebay.selector" . | nindent 6 }}
{{- end -}}

{{- define "forebay.featureGates" -}}
{{- $pairs := list -}}
{{- range $name, $on := . -}}
{{- $pairs = append $pairs (printf "%s=%t" $name $on) -}}
{{- end -}}
{{- join "," $pairs -}}
{{- end -}}

{{/* "true" where VolumeSnapshots can be made. */}}
{{- define "forebay.hasSnapshots" -}}
{{- $enabled := .Values.csi.controller.snapshotter.enabled -}}
{{- if or (eq $enabled "always") (and (eq $enabled "auto") (.Capabilities.APIVersions.Has "snapshot.storage.k8s.io/v1/VolumeSnapshotContent")) -}}
true
{{- end -}}
{{- end -}}

{{/* Ports of the CSI controller's sidecars with metrics, by name. */}}
{{- define "forebay.controllerMetricsPorts" -}}
{{- $controller := .Values.csi.controller -}}
metrics: {{ $controller.metricsPort }}
provisioner: {{ $controller.provisioner.httpPort }}
resizer: {{ $controller.resizer.httpPort }}
{{- if include "forebay.hasSnapshots" . }}
snapshotter: {{ $controller.snapshotter.httpPort }}
{{- end }}
{{- end -}}
