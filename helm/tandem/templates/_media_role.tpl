{{- /* Pods of a model that make its pictures ready (`role` preprocessor) or encode them (encoder), found by their names. `config`
has the settings but for those that both roles have; `cache` is where files of the Hub go. */ -}}
{{- define "tandem.mediaRole" }}
{{- $root := .root }}
{{- $name := include "tandem.name" $root }}
{{- $model := .model }}
{{- $role := .role }}
{{- $values := .values }}
{{- $full := printf "%s-%s-%s" $name (include "tandem.slug" $model) $role }}
{{- $config := merge .config (dict "host" "0.0.0.0" "port" (int $values.grpcPort) "health_port" (int $values.healthPort) "metrics_port" (int $values.metricsPort) "drain_s" (int $values.drainSeconds)) }}
{{- $config = merge $config (include "tandem.tlsConfig" $root | fromJson) }}
{{- $secrets := include "tandem.tlsSecrets" $root | fromJsonArray }}
---
apiVersion: v1
kind: ConfigMap
metadata:
  name: '{{ $full }}'
  labels: {{- include "tandem.labels" $root | nindent 4 }}
data:
  {{ $role }}.yaml: |
    {{- toYaml $config | nindent 4 }}
---
# A StatefulSet, since others choose among its pods by their names: the same picture goes to the same pod.
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: '{{ $full }}'
  labels: {{- include "tandem.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ $role }}
spec:
  serviceName: '{{ $full }}s'
  replicas: {{ int .replicas }}
  podManagementPolicy: Parallel
  selector:
    matchLabels: {{- include "tandem.selector" $root | nindent 6 }}
      tandem/{{ $role }}: '{{ $full }}'
  template:
    metadata:
      labels: {{- include "tandem.labels" $root | nindent 8 }}
        app.kubernetes.io/component: {{ $role }}
        tandem/{{ $role }}: '{{ $full }}'
      annotations:
        checksum/config: {{ toYaml $config | sha256sum }}
    spec:
      serviceAccountName: '{{ $name }}'
      automountServiceAccountToken: false
      securityContext: {{- toYaml $root.Values.podSecurityContext | nindent 8 }}
      terminationGracePeriodSeconds: {{ add $values.drainSeconds 15 }}
      {{- with $values.runtimeClassName }}
      runtimeClassName: '{{ . }}'
      {{- end }}
      {{- with $root.Values.image.pullSecrets }}
      imagePullSecrets: {{- range . }}
        - name: '{{ . }}'
        {{- end }}
      {{- end }}
      {{- with include "tandem.modelDownload" (dict "model" $model) }}
      initContainers: {{- . | nindent 8 }}
      {{- end }}
      containers:
        - name: {{ $role }}
          image: '{{ include "tandem.image" (dict "root" $root "name" $root.Values.image.worker) }}'
          imagePullPolicy: '{{ $root.Values.image.pullPolicy }}'
          command: [python, -m, {{ .module }}]
          args: [--config, /etc/tandem/{{ $role }}.yaml{{ if .advertises }}, --set, advertise_host=$(POD_NAME).{{ $full }}s{{ end }}]
          env:
            {{- include "tandem.podEnv" $root | nindent 12 }}
            {{- if hasKey $model.source "hub" }}{{ include "tandem.hubEnv" (dict "models" (list $model)) | nindent 12 }}{{ end }}
          ports:
            - {name: grpc, containerPort: {{ $values.grpcPort }}}
            - {name: health, containerPort: {{ $values.healthPort }}}
            - {name: metrics, containerPort: {{ $values.metricsPort }}}
          {{- include "tandem.probes" (dict "port" $values.healthPort "startupSeconds" $values.startupSeconds) | nindent 10 }}
          securityContext: {{- include "tandem.containerSecurity" $root | nindent 12 }}
          resources: {{- toYaml .resources | nindent 12 }}
          volumeMounts:
            - {name: config, mountPath: /etc/tandem, readOnly: true}
            - {name: tmp, mountPath: /tmp}
            {{- include "tandem.tlsMounts" $secrets | nindent 12 }}
            {{- if hasKey $model.source "hub" }}{{ include "tandem.hubMount" $root | nindent 12 }}{{ end }}
            {{- include "tandem.modelMount" $model | nindent 12 }}
      volumes:
        - name: config
          configMap: {name: '{{ $full }}'}
        - name: tmp
          emptyDir: {}
        {{- include "tandem.tlsVolumes" $secrets | nindent 8 }}
        {{- if hasKey $model.source "hub" }}
        {{- include "tandem.hubVolume" .cache | nindent 8 }}
        {{- end }}
        {{- include "tandem.modelVolume" (dict "model" $model "name" $name) | nindent 8 }}
      {{- with $values.nodeSelector }}
      nodeSelector: {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $values.tolerations }}
      tolerations: {{- toYaml . | nindent 8 }}
      {{- end }}
---
# Each pod by its own name.
apiVersion: v1
kind: Service
metadata:
  name: '{{ $full }}s'
  labels: {{- include "tandem.labels" $root | nindent 4 }}
    tandem/metrics: "true"
spec:
  clusterIP: None
  selector: {{- include "tandem.selector" $root | nindent 4 }}
    tandem/{{ $role }}: '{{ $full }}'
  ports:
    - {name: grpc, port: {{ $values.grpcPort }}, targetPort: grpc}
    - {name: metrics, port: {{ $values.metricsPort }}, targetPort: metrics}
{{- end }}
