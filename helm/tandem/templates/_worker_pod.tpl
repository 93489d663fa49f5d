{{- /* Numbers of a pool's ranks, by its settings or vLLM's flags in them, as JSON: `gpus` and `local` workers of a pod, `pods` of
a group, `nodes` of a worker. */ -}}
{{- define "tandem.sizes" -}}
{{- $config := .config -}}
{{- $args := $config.vllm_args | default "" -}}
{{- $flags := dict "tensor_parallel" "tensor[-_]parallel[-_]size|-tp" "pipeline_parallel" "pipeline[-_]parallel[-_]size|-pp" "nodes" "nnodes|-n" "data_parallel" "data[-_]parallel[-_]size|-dp" "data_parallel_local" "data[-_]parallel[-_]size[-_]local|-dpl" -}}
{{- $sizes := dict -}}
{{- range $name, $flag := $flags -}}
{{- $pattern := printf "(^|\\s)(--%s)[=\\s]+[0-9]+" ($flag | replace "|" "|") -}}
{{- $found := regexFind $pattern $args -}}
{{- $_ := set $sizes $name (int (get $config $name | default (regexFind "[0-9]+$" $found) | default 1)) -}}
{{- end -}}
{{- $ranks := mul $sizes.tensor_parallel $sizes.pipeline_parallel -}}
{{- if mod $ranks $sizes.nodes }}{{ fail (printf "%s.config.nodes: %d does not divide the %d ranks" .of $sizes.nodes $ranks) }}{{ end -}}
{{- if mod $sizes.data_parallel $sizes.data_parallel_local }}{{ fail (printf "%s.config.data_parallel_local: %d does not divide data_parallel, %d" .of $sizes.data_parallel_local $sizes.data_parallel) }}{{ end -}}
{{- if and (gt $sizes.nodes 1) (gt $sizes.data_parallel 1) }}{{ fail (printf "%s.config.nodes: a worker of a data-parallel group has one node in this chart: set data_parallel or nodes to 1" .of) }}{{ end -}}
{{- dict "gpus" (mul (div $ranks $sizes.nodes) $sizes.data_parallel_local) "local" $sizes.data_parallel_local "nodes" $sizes.nodes "pods" (mul $sizes.nodes (div $sizes.data_parallel $sizes.data_parallel_local)) | toJson -}}
{{- end -}}

{{- /* Largest number of workers that a pod of any pool has. */ -}}
{{- define "tandem.mostLocal" -}}
{{- $most := 1 -}}
{{- range $model := .Values.models -}}
{{- range $role := list "prefill" "decode" -}}
{{- $pool := get $model $role | default dict -}}
{{- $config := mergeOverwrite (deepCopy ($.Values.worker.config | default dict)) (deepCopy ($pool.config | default dict)) -}}
{{- $sizes := include "tandem.sizes" (dict "config" $config "of" (printf "models: %s.%s" $model.name $role)) | fromJson -}}
{{- $most = max $most (int $sizes.local) -}}
{{- end -}}
{{- end -}}
{{- $most -}}
{{- end -}}

{{- /* Size of /dev/shm: sharedMemory, and what the workers of the pod keep of evicted blocks there. */ -}}
{{- define "tandem.sharedMemory" -}}
{{- $kv := mul (int (.config.kv_host_memory_mib | default 0)) (int (.local | default 1)) -}}
{{- $size := toString .size -}}
{{- if and $kv (regexMatch "^[0-9]+[GM]i$" $size) -}}
{{- $number := int (regexFind "^[0-9]+" $size) -}}
{{- printf "%dMi" (add $kv (ternary (mul 1024 $number) $number (hasSuffix "Gi" $size))) -}}
{{- else -}}
{{- $size -}}
{{- end -}}
{{- end -}}

{{- /* Template of a worker's pod. `settings` are further ones of its program; `headless`: it computes for a worker in another
pod, and serves nothing. */ -}}
{{- define "tandem.workerPod" -}}
{{- $values := .root.Values -}}
{{- $worker := .worker -}}
metadata:
  labels: {{- include "tandem.labels" .root | nindent 4 }}
    app.kubernetes.io/component: {{ if .headless }}node{{ else }}{{ .role }}{{ end }}
    {{- if not .headless }}
    tandem/pool: '{{ .full }}'
    {{- end }}
    tandem/model: '{{ include "tandem.slug" .model }}'
    tandem/worker: "true"
    {{- with .group }}
    tandem/group: '{{ . }}'
    {{- end }}
    {{- with .set }}
    tandem/set: '{{ . }}'
    {{- end }}
  annotations:
    checksum/config: {{ dict "config" .config "source" .model.source | toYaml | sha256sum }}
    {{- with .annotations }}{{ toYaml . | nindent 4 }}{{ end }}
spec:
  serviceAccountName: '{{ .name }}'
  automountServiceAccountToken: false
  securityContext: {{- toYaml $values.podSecurityContext | nindent 4 }}
  # To finish streams, to hand over the rest, and to stay readable until those are placed anew.
  terminationGracePeriodSeconds: {{ add $worker.drainSeconds 30 }}
  {{- with $worker.runtimeClassName }}
  runtimeClassName: '{{ . }}'
  {{- end }}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets: {{- range . }}
    - name: '{{ . }}'
    {{- end }}
  {{- end }}
  {{- with .before }}
  initContainers: {{- . | nindent 4 }}
  {{- end }}
  containers:
    - name: worker
      command: [python, -m, {{ .role }}_worker]
      args: [--config, /etc/tandem/worker.yaml, --set, worker_id=$(POD_NAME), --set, advertise_host=$(POD_IP){{ range .settings }}, --set, {{ . }}{{ end }}]
      ports:
        - {name: grpc, containerPort: {{ $worker.grpcPort }}}
        - {name: stream, containerPort: {{ $worker.streamPort }}}
        - {name: loans, containerPort: {{ $worker.loanPort }}}
        - {name: health, containerPort: {{ $worker.healthPort }}}
        - {name: metrics, containerPort: {{ $worker.metricsPort }}}
        {{- range $number := untilStep 1 (int .local) 1 }}
        - {name: grpc-{{ $number }}, containerPort: {{ add $worker.grpcPort $number }}}
        - {name: stream-{{ $number }}, containerPort: {{ add $worker.streamPort $number }}}
        - {name: loans-{{ $number }}, containerPort: {{ add $worker.loanPort $number }}}
        - {name: metrics-{{ $number }}, containerPort: {{ add $worker.metricsPort $number }}}
        {{- end }}
      {{- include "tandem.probes" (dict "port" $worker.healthPort "startupSeconds" $worker.startupSeconds) | nindent 6 }}
      {{- .machine | nindent 6 }}
  volumes:
    - name: config
      configMap: {name: '{{ .full }}'}
    # Compiled kernels, too: HOME is there.
    - name: tmp
      emptyDir: {}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ include "tandem.sharedMemory" (dict "size" $worker.sharedMemory "config" .config "local" .local) | quote }}}
    {{- include "tandem.tlsVolumes" .secrets | nindent 4 }}
    {{- with $worker.kvStore.claimName }}
    - name: kv-store
      persistentVolumeClaim: {claimName: '{{ . }}'}
    {{- end }}
    {{- with $worker.kvStore.signingSecret }}
    - name: kv-store-secret
      secret: {secretName: '{{ . }}', defaultMode: 0440}
    {{- end }}
    {{- with .model.source.hub }}
    {{- include "tandem.hubVolume" (.cache | default (dict "size" "100Gi")) | nindent 4 }}
    {{- end }}
    {{- include "tandem.modelVolume" (dict "model" .model "name" .name) | nindent 4 }}
  {{- with $worker.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $worker.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .affinity }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .spread }}
  topologySpreadConstraints: {{- include "tandem.spread" (dict "constraints" . "labels" $.poolLabels) | nindent 4 }}
  {{- end }}
{{- end -}}

{{- /* Pods that are one worker, or one group of workers, together: a LeaderWorkerSet, or StatefulSets for each group. */ -}}
{{- define "tandem.groups" }}
{{- $pod := .pod }}
{{- $full := printf "%s-g" $pod.full }}
{{- $of := printf "models: %s.%s" $pod.model.name $pod.role }}
{{- $pods := int .pods }}
{{- $isNodes := gt (int .nodes) 1 }}
{{- if .planned }}{{ fail (printf "%s: the planner sizes Deployments, and this pool is of groups of %d pods: set planner.enabled to false" $of $pods) }}{{ end }}
{{- if gt (int (.pool.minAvailable | default 0)) 0 }}{{ fail (printf "%s.minAvailable: a group is lost with any of its pods: leave it out" $of) }}{{ end }}
{{- $pod = merge (dict "group" $full) $pod }}
{{- if eq .kind "LeaderWorkerSet" }}
{{- include "tandem.needs" (dict "root" $pod.root "value" "worker.groupKind" "api" "leaderworkerset.x-k8s.io/v1" "kind" "LeaderWorkerSet" "from" "the LeaderWorkerSet controller") }}
{{- $pod = merge (dict "settings" (include "tandem.memberSettings" (dict "index" "$(LWS_WORKER_INDEX)" "leader" "$(LWS_LEADER_ADDRESS)" "isNodes" $isNodes) | fromJsonArray)) $pod }}
---
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata:
  name: '{{ $full }}'
  labels: {{- include "tandem.labels" $pod.root | nindent 4 }}
    app.kubernetes.io/component: {{ $pod.role }}
    tandem/pool: '{{ $pod.full }}'
spec:
  replicas: {{ int .pool.replicas }}
  startupPolicy: LeaderCreated
  networkConfig: {subdomainPolicy: Shared}
  leaderWorkerTemplate:
    size: {{ $pods }}
    # Programs of a group that lose one of it end by themselves and meet again.
    restartPolicy: None
    {{- if $isNodes }}
    leaderTemplate: {{- include "tandem.workerPod" $pod | nindent 6 }}
    workerTemplate: {{- include "tandem.workerPod" (merge (dict "headless" true) $pod) | nindent 6 }}
    {{- else }}
    workerTemplate: {{- include "tandem.workerPod" $pod | nindent 6 }}
    {{- end }}
{{- else }}
{{- if (.pool.autoscaling | default dict).enabled }}{{ fail (printf "%s.autoscaling: StatefulSets have a group each, so none has a size to scale: set worker.groupKind to LeaderWorkerSet" $of) }}{{ end }}
---
apiVersion: v1
kind: Service
metadata:
  name: '{{ $full }}'
  labels: {{- include "tandem.labels" $pod.root | nindent 4 }}
spec:
  clusterIP: None
  # A group's pods find the first one before it serves.
  publishNotReadyAddresses: true
  selector: {{- include "tandem.selector" $pod.root | nindent 4 }}
    tandem/group: '{{ $full }}'
{{- range $number := until (int .pool.replicas) }}
{{- $set := printf "%s%d" $full $number }}
{{- $settings := include "tandem.memberSettings" (dict "index" "$(POD_INDEX)" "leader" (printf "%s-0.%s" $set $full) "isNodes" $isNodes) | fromJsonArray }}
{{- $member := merge (dict "settings" $settings "set" $set) $pod }}
{{- include "tandem.groupSet" (dict "pod" $member "name" $set "service" $full "first" 0 "count" (ternary 1 $pods $isNodes)) }}
{{- if $isNodes }}
{{- include "tandem.groupSet" (dict "pod" (merge (dict "headless" true "set" (printf "%s-nodes" $set)) $member) "name" (printf "%s-nodes" $set) "service" $full "first" 1 "count" (sub $pods 1)) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "tandem.groupSet" }}
{{- $root := .pod.root }}
---
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: '{{ .name }}'
  labels: {{- include "tandem.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .pod.role }}
spec:
  replicas: {{ .count }}
  serviceName: '{{ .service }}'
  podManagementPolicy: Parallel
  # Pods of unlike settings do not meet, so replacing one after the other would never end: delete all of a group at once.
  updateStrategy: {type: OnDelete}
  ordinals: {start: {{ .first }}}
  selector:
    matchLabels: {{- include "tandem.selector" $root | nindent 6 }}
      tandem/set: '{{ .name }}'
  template: {{- include "tandem.workerPod" .pod | nindent 4 }}
{{- end }}

{{- /* Settings by which a program of a group knows its number and its first pod, as a JSON list. */ -}}
{{- define "tandem.memberSettings" -}}
{{- list (printf "member_index=%s" .index) (printf "%s=%s" (ternary "master_addr" "data_parallel_address" .isNodes) .leader) | toJson -}}
{{- end -}}

{{- /* Network policy of pods with several workers, or several of which are a group: all ports within the group, since vLLM's
process groups choose theirs; and the ports beyond the first workers'. */ -}}
{{- define "tandem.groupPolicy" }}
{{- $root := .root }}
{{- $worker := .worker }}
{{- $more := sub (int .local) 1 }}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: '{{ .full }}'
  labels: {{- include "tandem.labels" $root | nindent 4 }}
spec:
  podSelector:
    matchLabels: {{- include "tandem.selector" $root | nindent 6 }}
      {{ .label }}: '{{ .value }}'
  policyTypes: [Ingress]
  ingress:
    - from:
        - podSelector:
            matchLabels: {{- include "tandem.selector" $root | nindent 14 }}
              {{ .label }}: '{{ .value }}'
    {{- if $more }}
    - from:
        - podSelector:
            matchLabels: {{- include "tandem.selector" $root | nindent 14 }}
      ports:
        - {port: {{ add $worker.grpcPort 1 }}, endPort: {{ add $worker.grpcPort $more }}, protocol: TCP}
        - {port: {{ add $worker.streamPort 1 }}, endPort: {{ add $worker.streamPort $more }}, protocol: TCP}
        - {port: {{ add $worker.loanPort 1 }}, endPort: {{ add $worker.loanPort $more }}, protocol: TCP}
    - ports:
        - {port: {{ add $worker.metricsPort 1 }}, endPort: {{ add $worker.metricsPort $more }}, protocol: TCP}
      from: {{- $root.Values.networkPolicy.monitoring | default (list (dict "podSelector" dict)) | toYaml | nindent 8 }}
    {{- end }}
{{- end }}
