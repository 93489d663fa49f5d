{{- define "tandem.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- /* A model's name where Kubernetes allows no dots. */ -}}
{{- define "tandem.slug" -}}
{{- .name | replace "." "-" -}}
{{- end -}}

{{- define "tandem.cluster" -}}
{{- .Values.clusterName | default .Release.Name -}}
{{- end -}}

{{- define "tandem.labels" -}}
app.kubernetes.io/name: tandem
app.kubernetes.io/instance: '{{ .Release.Name }}'
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
tandem/cluster: {{ include "tandem.cluster" . | quote }}
{{- end -}}

{{- define "tandem.selector" -}}
app.kubernetes.io/name: tandem
app.kubernetes.io/instance: '{{ .Release.Name }}'
{{- end -}}

{{- define "tandem.image" -}}
{{- $tag := .root.Values.image.tag | default .root.Chart.AppVersion -}}
{{- if eq $tag "latest" }}{{ fail "image.tag: \"latest\" is no version" }}{{ end -}}
{{- .root.Values.image.registry }}{{ .name }}:{{ .tag | default $tag -}}
{{- end -}}

{{- define "tandem.redisUrl" -}}
{{- $url := .Values.redis.url | default "" -}}
{{- if and .Values.redis.enabled $url }}{{ fail "redis: either enabled or url" }}{{ end -}}
{{- if regexMatch "//[^@]*:.*@|[?&]password=" $url -}}
{{- fail "redis.url: has a password in it, which everybody who may read ConfigMaps would see: it belongs in a secret, with the key `password`, which redis.passwordSecret names" -}}
{{- end -}}
{{- if .Values.redis.enabled -}}
redis://{{ include "tandem.name" . }}-redis:6379/0
{{- else -}}
{{ $url }}
{{- end -}}
{{- end -}}

{{- /* Values that Kubernetes or a process would refuse later, in a pod: refused here by their names. */ -}}
{{- define "tandem.checks" -}}
{{- $router := .Values.router -}}
{{- $worker := .Values.worker -}}
{{- include "tandem.distinct" (dict "of" "router" "values" $router "ports" (list "grpcPort" "internalPort" "healthPort" "httpPort" "metricsPort")) -}}
{{- include "tandem.distinct" (dict "of" "worker" "values" $worker "ports" (list "grpcPort" "streamPort" "loanPort" "healthPort" "metricsPort")) -}}
{{- include "tandem.distinct" (dict "of" "preprocessor" "values" .Values.preprocessor "ports" (list "grpcPort" "metricsPort" "healthPort")) -}}
{{- include "tandem.distinct" (dict "of" "encoder" "values" .Values.encoder "ports" (list "grpcPort" "metricsPort" "healthPort")) -}}
{{- include "tandem.distinct" (dict "of" "planner" "values" .Values.planner "ports" (list "metricsPort" "healthPort")) -}}
{{- if gt (int $worker.ucxPortFirst) (int $worker.ucxPortLast) -}}
{{- fail (printf "worker.ucxPortFirst: %d is above worker.ucxPortLast, %d" (int $worker.ucxPortFirst) (int $worker.ucxPortLast)) -}}
{{- end -}}
{{- range $port := list "grpcPort" "streamPort" "loanPort" "healthPort" "metricsPort" -}}
{{- $number := int (get $worker $port) -}}
{{- if and (ge $number (int $worker.ucxPortFirst)) (le $number (int $worker.ucxPortLast)) -}}
{{- fail (printf "worker.%s: %d is one of UCX's ports, worker.ucxPortFirst to worker.ucxPortLast" $port $number) -}}
{{- end -}}
{{- end -}}
{{- $security := .Values.podSecurityContext | default dict -}}
{{- if and $security.runAsNonRoot (hasKey $security "runAsUser") (eq (int $security.runAsUser) 0) -}}
{{- fail "podSecurityContext.runAsUser: 0 is root, which podSecurityContext.runAsNonRoot refuses: set another user, or runAsNonRoot to false" -}}
{{- end -}}
{{- end -}}

{{- define "tandem.distinct" -}}
{{- $taken := dict -}}
{{- range $port := .ports -}}
{{- $number := toString (int (get $.values $port)) -}}
{{- if hasKey $taken $number -}}
{{- fail (printf "%s.%s: %s is %s.%s too: a pod has each port once" $.of $port $number $.of (get $taken $number)) -}}
{{- end -}}
{{- $_ := set $taken $number $port -}}
{{- end -}}
{{- end -}}

{{- /* Size of a Deployment or StatefulSet. A size that somebody set since the last install or upgrade stays: any size where
a planner or autoscaler (`scaled`) owns it, else one that replaced the size in the values while these did not change. A size
of 0 stays with a planner only (`planned`): nothing else would ever start the pool again, also no HorizontalPodAutoscaler.
Without a cluster, as in `helm template`, and at the first install it is the values' size, within the scaler's bounds. */ -}}
{{- define "tandem.size" -}}
{{- $live := lookup "apps/v1" .kind .root.Release.Namespace .name -}}
{{- $size := int .size -}}
{{- if and .scaled (gt (int .least) (int .most)) -}}
{{- fail (printf "%s: %d is more than %s, %d" .leastName (int .least) .mostName (int .most)) -}}
{{- end -}}
{{- if or (not $live) (and (not .planned) (eq (int (dig "spec" "replicas" 1 $live)) 0)) -}}
{{- if .scaled }}{{ $size = max (int .least) (min $size (int .most)) }}{{ end -}}
{{- else if or .scaled (eq (dig "metadata" "annotations" "tandem/values-replicas" "" $live) (toString $size)) -}}
{{- $size = int $live.spec.replicas -}}
{{- end -}}
{{- $size -}}
{{- end -}}

{{- /* Size of a worker pool of single pods. */ -}}
{{- define "tandem.poolSize" -}}
{{- $scaler := .pool.autoscaling | default dict -}}
{{- $names := dict "leastName" (printf "models: %s.%s.autoscaling.minReplicas" .model.name .role) "mostName" "maxReplicas" -}}
{{- $planned := and .root.Values.planner.enabled (not .suffix) -}}
{{- if $planned -}}
{{- $bounds := get (.root.Values.planner.config | default dict) .role | default dict -}}
{{- $names = dict "leastName" (printf "planner.config.%s.min_workers" .role) "mostName" "max_workers" -}}
{{- $scaler = dict "enabled" true "minReplicas" (include "tandem.plannerLeast" $bounds) "maxReplicas" (include "tandem.plannerMost" $bounds) -}}
{{- end -}}
{{- include "tandem.size" (merge $names (dict "root" .root "kind" "Deployment" "name" .full "size" .pool.replicas "scaled" $scaler.enabled "planned" $planned "least" $scaler.minReplicas "most" $scaler.maxReplicas)) -}}
{{- end -}}

{{- /* A planner's bounds of a pool: the defaults are those of planner/config.py. */ -}}
{{- define "tandem.plannerLeast" -}}
{{- ternary .min_workers 1 (hasKey . "min_workers") | int -}}
{{- end -}}

{{- define "tandem.plannerMost" -}}
{{- ternary .max_workers 8 (hasKey . "max_workers") | int -}}
{{- end -}}

{{- define "tandem.routerSize" -}}
{{- $scaler := .Values.router.autoscaling -}}
{{- include "tandem.size" (dict "root" . "kind" "StatefulSet" "name" (printf "%s-router" (include "tandem.name" .)) "size" .Values.router.replicas "scaled" $scaler.enabled "least" $scaler.minReplicas "most" $scaler.maxReplicas "leastName" "router.autoscaling.minReplicas" "mostName" "maxReplicas") -}}
{{- end -}}

{{- /* Stable names of the routers' pods: workers join each of them. */ -}}
{{- define "tandem.routers" -}}
{{- $name := include "tandem.name" . -}}
{{- $port := int .Values.router.internalPort -}}
{{- $routers := list -}}
{{- range $number := until (max (int .Values.router.replicas) (int (include "tandem.routerSize" .)) | int) -}}
{{- $routers = append $routers (printf "%s-router-%d.%s-routers:%d" $name $number $name $port) -}}
{{- end -}}
{{- $routers | toJson -}}
{{- end -}}

{{- /* Addresses of a model's preprocessors, as its entry in the router's settings has them; empty without any. */ -}}
{{- define "tandem.preprocessors" -}}
{{- include "tandem.mediaAddresses" (merge (dict "role" "preprocessor") .) | fromJsonArray | join "," -}}
{{- end -}}

{{- /* Addresses of a model's encode workers, as a JSON list. */ -}}
{{- define "tandem.encoders" -}}
{{- include "tandem.mediaAddresses" (merge (dict "role" "encoder") .) -}}
{{- end -}}

{{- define "tandem.mediaAddresses" -}}
{{- $full := printf "%s-%s-%s" (include "tandem.name" .root) (include "tandem.slug" .model) .role -}}
{{- $port := int (get .root.Values .role).grpcPort -}}
{{- $addresses := list -}}
{{- range $number := until (int ((get .model .role | default dict).replicas | default 0)) -}}
{{- $addresses = append $addresses (printf "%s-%d.%ss:%d" $full $number $full $port) -}}
{{- end -}}
{{- $addresses | toJson -}}
{{- end -}}

{{- /* Of a PodDisruptionBudget: where as many must stay as there may be, no node is ever drained. */ -}}
{{- define "tandem.drainable" -}}
{{- if ge (int .minAvailable) (int .pods) -}}
{{- fail (printf "%s.minAvailable: %d is not below %s, %d: no node with one of these pods could ever be drained" .of (int .minAvailable) .value (int .pods)) -}}
{{- end -}}
{{- end -}}

{{- /* Of a list of topology spread constraints: each with the labels of the pods, where it selects none itself. */ -}}
{{- define "tandem.spread" -}}
{{- $spread := list -}}
{{- range $constraint := .constraints -}}
{{- if not (hasKey . "labelSelector") }}{{ $constraint = merge (dict "labelSelector" (dict "matchLabels" $.labels)) . }}{{ end -}}
{{- $spread = append $spread $constraint -}}
{{- end -}}
{{- toYaml $spread -}}
{{- end -}}

{{- /* Fail where a cluster lacks the kind of an object that `value` asks for. Only a cluster that was asked names its kinds:
without one, as in `helm template`, everything is rendered. */ -}}
{{- define "tandem.needs" -}}
{{- $known := .root.Capabilities.APIVersions -}}
{{- if and ($known.Has "apps/v1/Deployment") (not ($known.Has (printf "%s/%s" .api .kind))) -}}
{{- fail (printf "%s: the cluster has no %s (%s), which %s brings: install that first, or unset %s" .value .kind .api .from .value) -}}
{{- end -}}
{{- end -}}

{{- define "tandem.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{- define "tandem.redisPassword" -}}
{{- with .Values.redis.passwordSecret }}
- name: TANDEM_REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: '{{ . }}', key: password}}
{{- end }}
{{- end -}}

{{- /* Settings of TLS that routers and workers have, as JSON; and the files they name. */ -}}
{{- define "tandem.tlsConfig" -}}
{{- $tls := .Values.tls -}}
{{- $config := dict -}}
{{- if $tls.memberSecret -}}
{{- $config = dict "tls_cert" "/etc/tandem-tls/member/tls.crt" "tls_key" "/etc/tandem-tls/member/tls.key" "tls_ca" "/etc/tandem-tls/member/ca.crt" "tls_server_name" $tls.serverName -}}
{{- with $tls.metricsCaSecret }}{{ $_ := set $config "tls_metrics_ca" "/etc/tandem-tls/metrics/ca.crt" }}{{ end -}}
{{- else if $tls.metricsCaSecret -}}
{{- fail "tls.metricsCaSecret: means nothing without tls.memberSecret" -}}
{{- end -}}
{{- $config | toJson -}}
{{- end -}}

{{- /* Of secrets: a list of {name, secret}, by where they are mounted below /etc/tandem-tls. */ -}}
{{- define "tandem.tlsSecrets" -}}
{{- $secrets := list -}}
{{- with .Values.tls.memberSecret }}{{ $secrets = append $secrets (dict "name" "member" "secret" .) }}{{ end -}}
{{- with .Values.tls.metricsCaSecret }}{{ $secrets = append $secrets (dict "name" "metrics" "secret" .) }}{{ end -}}
{{- $secrets | toJson -}}
{{- end -}}

{{- define "tandem.tlsMounts" -}}
{{- range . }}
- {name: 'tls-{{ .name }}', mountPath: '/etc/tandem-tls/{{ .name }}', readOnly: true}
{{- end }}
{{- end -}}

{{- define "tandem.tlsVolumes" -}}
{{- range . }}
- name: 'tls-{{ .name }}'
  secret: {secretName: '{{ .secret }}', defaultMode: 0440}
{{- end }}
{{- end -}}

{{- define "tandem.podEnv" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: HOME
  value: /tmp
{{- end -}}

{{- /* Alive: the loop turns. Started: it serves. Ready: new work would be done here; not while draining or cut off. */ -}}
{{- define "tandem.probes" -}}
startupProbe:
  grpc: {port: {{ .port }}}
  periodSeconds: 2
  failureThreshold: {{ div .startupSeconds 2 }}
readinessProbe:
  grpc: {port: {{ .port }}, service: readiness}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: 2
livenessProbe:
  grpc: {port: {{ .port }}, service: liveness}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}

{{- /* Where a model's files are: a volume and its mount, or an image that has them; or a repository, fetched at start. */ -}}
{{- define "tandem.modelPath" -}}
{{- with .source.hub -}}
{{ .repository }}{{ with .revision }}@{{ . }}{{ end }}
{{- else -}}
/models/{{ .name }}
{{- end -}}
{{- end -}}

{{- /* Of pods whose models, in a list, come from the Hugging Face Hub; nothing where none does. A process takes one token. */ -}}
{{- define "tandem.hubEnv" -}}
{{- $token := dict -}}
{{- range .models }}
{{- with (.source.hub | default dict).tokenSecret }}
{{- $named := dict "name" .name "key" (.key | default "token") }}
{{- if and $token (ne (toJson $named) (toJson $token)) }}{{ fail "models: source.hub.tokenSecret: a router fetches all models with one token: name the same secret and key everywhere" }}{{ end }}
{{- $token = $named }}
{{- end }}
{{- end }}
- name: HF_HOME
  value: /var/cache/huggingface
{{- with $token }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: '{{ .name }}', key: '{{ .key }}'}}
{{- end }}
{{- end -}}

{{- define "tandem.hubMount" -}}
- {name: hub-cache, mountPath: /var/cache/huggingface}
{{- end -}}

{{- define "tandem.hubVolume" -}}
- name: hub-cache
{{- if .claimName }}
  persistentVolumeClaim: {claimName: '{{ .claimName }}'}
{{- else }}
  emptyDir: {sizeLimit: {{ .size | quote }}}
{{- end }}
{{- end -}}

{{- define "tandem.modelVolume" -}}
{{- $model := .model -}}
{{- $source := $model.source -}}
{{- if ne (len $source) 1 }}{{ fail (printf "models: %s: source must be exactly one of pvc, hostPath, image, download, hub, configMap" $model.name) }}{{ end -}}
{{- if not (hasKey $source "hub") }}
- name: 'model-{{ include "tandem.slug" $model }}'
{{- if hasKey $source "pvc" }}
  persistentVolumeClaim: {claimName: '{{ $source.pvc.claimName }}', readOnly: true}
{{- else if hasKey $source "hostPath" }}
  hostPath: {path: '{{ $source.hostPath.path }}', type: Directory}
{{- else if hasKey $source "image" }}
  image: {reference: {{ $source.image.reference | quote }}, pullPolicy: IfNotPresent}
{{- else if hasKey $source "download" }}
  emptyDir: {sizeLimit: {{ $source.download.size | quote }}}
{{- else }}
  configMap: {name: '{{ .name }}-model-{{ include "tandem.slug" $model }}'}
{{- end }}
{{- end }}
{{- end -}}

{{- define "tandem.modelMount" -}}
{{- $source := .source -}}
{{- if not (hasKey $source "hub") -}}
- name: 'model-{{ include "tandem.slug" . }}'
  mountPath: '{{ include "tandem.modelPath" . }}'
  readOnly: true
  {{- $sub := "" }}
  {{- if hasKey $source "pvc" }}{{ $sub = $source.pvc.path }}{{ end }}
  {{- with $sub }}
  subPath: '{{ . }}'
  {{- end }}
{{- end -}}
{{- end -}}

{{- define "tandem.modelDownload" -}}
{{- $source := .model.source -}}
{{- if hasKey $source "download" }}
- name: 'download-{{ include "tandem.slug" .model }}'
  image: {{ $source.download.image | quote }}
  command: {{ toJson $source.download.command }}
  env:
    - name: MODEL_DIR
      value: {{ include "tandem.modelPath" .model }}
    {{- with $source.download.secret }}
  envFrom: [{secretRef: {name: '{{ . }}'}}]
    {{- end }}
  securityContext: {{- include "tandem.containerSecurity" . | nindent 4 }}
  resources:
    requests: {cpu: 100m, memory: 128Mi}
    limits: {cpu: "2", memory: 2Gi}
  volumeMounts:
    - {name: 'model-{{ include "tandem.slug" .model }}', mountPath: {{ include "tandem.modelPath" .model }}}
    - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end -}}

{{- /* What mounting the token of a pod's account would give, and in no other pod. */ -}}
{{- define "tandem.accountVolume" -}}
- name: account
  projected:
    sources:
      - serviceAccountToken: {path: token, expirationSeconds: 3600}
      - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
      - downwardAPI: {items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]}
{{- end -}}

{{- define "tandem.accountMount" -}}
- {name: account, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
{{- end -}}

{{- /* Seconds to start of a router or picker, which may wait for the first server of the fleet to load its model. */ -}}
{{- define "tandem.startSeconds" -}}
{{- ternary 120 .Values.worker.startupSeconds (not (empty .Values.models)) -}}
{{- end -}}

{{- /* Settings of the stock servers, as JSON; and the files they name. */ -}}
{{- define "tandem.fleet" -}}
{{- $fleet := deepCopy (.Values.router.fleet | default dict) -}}
{{- if .Values.router.fleetKeySecret }}{{ $_ := set $fleet "api_key_file" "/etc/tandem-tls/fleet-key/key" }}{{ end -}}
{{- if .Values.router.fleetCaSecret }}{{ $_ := set $fleet "ca_file" "/etc/tandem-tls/fleet-ca/ca.crt" }}{{ end -}}
{{- $fleet | toJson -}}
{{- end -}}

{{- define "tandem.fleetSecrets" -}}
{{- $secrets := list -}}
{{- with .Values.router.fleetKeySecret }}{{ $secrets = append $secrets (dict "name" "fleet-key" "secret" .) }}{{ end -}}
{{- with .Values.router.fleetCaSecret }}{{ $secrets = append $secrets (dict "name" "fleet-ca" "secret" .) }}{{ end -}}
{{- $secrets | toJson -}}
{{- end -}}

{{- /* Resources that list servers of the fleet, as JSON by namespace; empty where Kubernetes is not asked. */ -}}
{{- define "tandem.fleetReads" -}}
{{- $reads := dict -}}
{{- range $server := (.Values.router.fleet | default dict).servers -}}
{{- range $kind, $resource := dict "service" "endpointslices" "pods" "pods" -}}
{{- with get $server $kind -}}
{{- $namespace := .namespace | default $.Release.Namespace -}}
{{- $_ := set $reads $namespace (append (get $reads $namespace | default list) $resource | uniq | sortAlpha) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- $reads | toJson -}}
{{- end -}}

{{- define "tandem.fleetAccount" -}}
{{- include "tandem.name" . -}}
{{- if include "tandem.fleetReads" . | fromJson }}-fleet{{ end -}}
{{- end -}}
