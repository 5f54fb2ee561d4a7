"""What the chart's values are, beside the fleet's own settings: types, defaults and the comments of `values.yaml`.

`scripts/chart_files.py` writes `values.yaml` and `values.schema.json` from here and from `weightsync.config`.
A field's docstring is its comment.

Not covered: what several values must be together; `templates/_sizing.tpl` refuses that.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

CORE = "io.k8s.api.core.v1"


def _kubernetes(name: str) -> Any:
    """A Kubernetes type, checked as strictly as the API server does; `chart_files.py` puts its schema in."""
    return Annotated[dict[str, Any], WithJsonSchema({"x-kubernetes": name})]


Affinity = _kubernetes(f"{CORE}.Affinity")
Egress = _kubernetes("io.k8s.api.networking.v1.NetworkPolicyEgressRule")
EnvVar = _kubernetes(f"{CORE}.EnvVar")
Peer = _kubernetes("io.k8s.api.networking.v1.NetworkPolicyPeer")
Toleration = _kubernetes(f"{CORE}.Toleration")
TopologySpread = _kubernetes(f"{CORE}.TopologySpreadConstraint")

Strings = dict[str, str]
Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|Ki|Mi|Gi|Ti|M|G|T)?$")]
Duration = Annotated[str, Field(pattern=r"^([0-9]+(ms|s|m|h))+$")]
Name = Annotated[str, Field(pattern=r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?$")]


class Strict(BaseModel):
    """Knows no other keys."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class Image(Strict):
    """Image of all pods: weightsync with the extra `cuda`, bash, and what KubeRay's probes call (wget)."""

    repository: str = Field(default="weightsync", min_length=1)
    """Where it lies."""
    tag: str = ""
    """Its tag; the chart's appVersion when empty."""
    digest: str = Field(default="", pattern=r"^(sha256:[0-9a-f]{64})?$")
    """Its digest (sha256:…), which goes before the tag."""
    pullPolicy: Literal["Always", "IfNotPresent", "Never"] = "IfNotPresent"
    """When it is pulled."""
    pullSecrets: list[Name] = []
    """Names of Secrets to pull it with."""


class Auth(Strict):
    """The bearer token of the API and of the engines."""

    existingSecret: Name = ""
    """Secret that holds it. When empty the chart makes one and keeps it over upgrades; what renders without a cluster (helm template,
    GitOps) can't see the one it made, so give one there."""
    existingSecretKey: str = Field(default="token", pattern=r"^[-._a-zA-Z0-9]+$")
    """Its key in that Secret."""
    token: str = Field(default="", pattern=r"^[!-~]*$")
    """The token itself, for the Secret that the chart makes; a random one when empty."""


class Ray(Strict):
    """Ray, which asks for a token of its own."""

    version: str = Field(default="2.60.0", pattern=r"^[0-9]+\.[0-9]+\.[0-9]+$")
    """Ray in the image. Token authentication needs 2.52."""
    existingSecret: Name = ""
    """Secret with Ray's token under the key auth_token (KubeRay's name for it); one is made when empty, as with auth.existingSecret."""
    objectStoreMiB: int = Field(default=256, ge=76)
    """Shared memory of each node's object store, MiB. Weights never pass through it."""


class Pod(Strict):
    """Where a pod runs and what it gets."""

    nodeSelector: Strings = {}
    """Labels of nodes it may run on."""
    tolerations: list[Toleration] = []  # type: ignore[valid-type]
    """Taints it bears."""
    affinity: Affinity = {}  # type: ignore[valid-type]
    """Nodes and pods it is drawn to, or keeps away from."""
    topologySpreadConstraints: list[TopologySpread] = []  # type: ignore[valid-type]
    """How pods of this kind are spread; without a labelSelector among those of their kind and release."""
    priorityClassName: Name = ""
    """Its priority class."""
    annotations: Strings = {}
    """Further annotations."""
    env: list[EnvVar] = []  # type: ignore[valid-type]
    """Further variables, such as NCCL_SOCKET_IFNAME."""
    ephemeralGiB: int = Field(default=10, ge=0)
    """Disk of the node for logs, /tmp and the home, GiB, request and limit: a pod that takes more is evicted. 0 sets neither."""


class Api(Pod):
    """The pod that runs `weightsync serve`: API, controller and rendezvous store."""

    cpu: Quantity = "2"
    """Cores, request and limit."""
    memory: Quantity = "8Gi"
    """Memory, request and limit."""
    verbose: bool = True
    """Log what happens."""
    startSeconds: int = Field(default=600, ge=0)
    """How long Ray's pods may take to come (scheduling, pulling the image), on top of fleet.engine.start_timeout_seconds: the start-up
    probe gives up behind both."""
    livenessSeconds: int = Field(default=30, ge=5)
    """Period of the liveness probe (/livez); three failures restart the API, not the engines."""
    readinessSeconds: int = Field(default=5, ge=1)
    """Period of the readiness probe (/readyz): enough engines serve the committed version."""


class Head(Pod):
    """Ray's head: no engine, no GPU."""

    cpu: Quantity = "2"
    """Cores, request and limit."""
    memory: Quantity = "8Gi"
    """Memory, request and limit."""


class Rdma(Strict):
    """RDMA for NCCL."""

    enabled: bool = False
    """Give workers an RDMA device."""
    resource: str = Field(default="rdma/ib", pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$")
    """Name of the resource, as the device plugin gives it."""
    count: int = Field(default=1, ge=1)
    """How many of it each pod gets."""
    ipcLock: bool = False
    """Add the capability IPC_LOCK, which the pod security standard `restricted` forbids. As the user is not root it counts only for
    programs that carry it; else the container runtime must leave locked memory (memlock) unlimited, so that drivers can register it."""


class Workers(Pod):
    """Pods with GPUs. An engine lives in one pod; a pod takes as many engines as its GPUs hold."""

    tolerations: list[Toleration] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]  # type: ignore[valid-type]
    """Taints it bears."""
    gpusPerNode: int = Field(default=8, ge=1)
    """GPUs that a node has. The number of pods follows from it and from the fleet: engines x tensor x pipeline x data parallel."""
    gpus: int | None = Field(default=None, ge=1)
    """GPUs of each pod; as many as its engines need when null. More leaves some to a trainer that runs as a Ray job in the pods."""
    gpuResource: str = Field(default="nvidia.com/gpu", pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$")
    """Name of the GPU resource."""
    runtimeClassName: Name = ""
    """Runtime class, such as nvidia where it is not the default."""
    cpu: int = Field(default=32, ge=1)
    """Cores, request and limit; Ray gives each engine fleet.engine.cpus of them."""
    memoryGiB: int = Field(default=128, ge=1)
    """Memory of a pod's processes, GiB; what /dev/shm may hold comes on top. Updates staged on the host take a copy of the weights for each
    engine, as does fleet.sync.rollback=host."""
    ephemeralGiB: int = Field(default=40, ge=0)
    """Disk of the node for logs, /tmp and the home, GiB, request and limit: a pod that takes more is evicted. Without cache.enabled what
    engines compile lies there, too. 0 sets neither."""
    weightsGiB: int = Field(default=16, ge=1)
    """One copy of the weights as the trainer sends them, GiB, rounded up: engines keep two in /dev/shm during an update."""
    ncclShmGiB: int = Field(default=1, ge=1)
    """Part of /dev/shm for NCCL and vLLM, GiB for each GPU."""
    shmGiB: int | None = Field(default=None, ge=1)
    """Size of /dev/shm, GiB; NCCL, the object store and twice the weights of engines that keep them when null."""
    rdma: Rdma = Rdma()


class Models(Strict):
    """Folder with checkpoints, which fleet.engine.model lies in; every pod reads it."""

    existingClaim: Name = ""
    """Claim that holds it (ReadOnlyMany or ReadWriteMany where there are several nodes)."""
    hostPath: str = Field(default="", pattern=r"^(/.*)?$")
    """Or a folder of every node, which the pod security standard `restricted` forbids. With neither, the model must be in the image."""
    mountPath: str = Field(default="/models", pattern=r"^/.+")
    """Where it is mounted."""


class Cache(Strict):
    """What engines compile: kept, so that the next start is shorter."""

    enabled: bool = True
    """Keep it in a volume; without, each pod compiles for itself and forgets."""
    existingClaim: Name = ""
    """Claim to use; one is made when empty."""
    size: Quantity = "50Gi"
    """Size of the claim that is made."""
    storageClass: str = ""
    """Its storage class; the cluster's default when empty."""
    accessModes: list[Literal["ReadWriteOnce", "ReadWriteMany", "ReadWriteOncePod"]] = Field(default=["ReadWriteMany"], min_length=1)
    """Its access modes; several worker pods need ReadWriteMany."""


class Service(Strict):
    """Address of the API. It leads there before the first update, too: it is the trainer's call that makes the fleet ready."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"
    """Its type. Engines are called at their pods' own addresses, which /v1/engines tells."""
    annotations: Strings = {}
    """Its annotations."""
    loadBalancerSourceRanges: list[str] = []
    """Whom a load balancer lets in, as CIDR."""


class ServiceAccount(Strict):
    """Account of all pods. It needs no rights, and its token is not mounted."""

    create: bool = True
    """Make one."""
    name: Name = ""
    """Its name; the release's when empty and made, else default."""
    annotations: Strings = {}
    """Its annotations."""


class Monitor(Strict):
    """One monitor of the Prometheus Operator."""

    enabled: bool = False
    """Make it; its custom resource definition must be there."""
    interval: Duration = "15s"
    """How often it is scraped."""
    labels: Strings = {}
    """Labels by which the operator finds it."""


class Rules(Strict):
    """Alerts, as the Prometheus Operator's PrometheusRule; they judge every fleet that it scrapes, so one release makes them."""

    enabled: bool = False
    """Make it; its custom resource definition must be there."""
    labels: Strings = {}
    """Labels by which the operator finds it."""
    runbook: str = Field(default="docs/operations.md", min_length=1)
    """Where docs/operations.md can be read; links to each alert's part of it begin so."""


class Dashboard(Strict):
    """Grafana's dashboard, in a ConfigMap."""

    enabled: bool = False
    """Make it."""
    labels: Strings = {"grafana_dashboard": "1"}
    """Labels by which Grafana's sidecar finds it."""
    annotations: Strings = {}
    """Its annotations, such as grafana_folder."""


class Metrics(Strict):
    """Prometheus and Grafana."""

    serviceMonitor: Monitor = Monitor()
    """weightsync's own metrics: the API's /metrics."""
    podMonitor: Monitor = Monitor()
    """Ray's, of head and workers."""
    rules: Rules = Rules()
    dashboard: Dashboard = Dashboard()


class NetworkPolicy(Strict):
    """Who may connect, and where to. Inside the release all ports are open, as Ray and NCCL take any; nothing else is that is not named
    here."""

    enabled: bool = True
    """Make it. Pods in the host's network are not subject to it, so with hostNetwork it must be off."""
    clients: list[Peer] = []  # type: ignore[valid-type]
    """Who may call the API and the engines: routers, rollout workers."""
    trainers: list[Peer] = []  # type: ignore[valid-type]
    """Who may also meet engines by NCCL or gloo, on any port and from either side: pods of trainers outside the release."""
    monitoring: list[Peer] = []  # type: ignore[valid-type]
    """Who may read metrics, of the API and of Ray."""
    restrictEgress: bool = True
    """Let the pods connect to each other, to trainers, to DNS (port 53 anywhere; OpenShift's wants a rule for 5353) and to what `egress`
    says, and to nothing else."""
    egress: list[Egress] = []  # type: ignore[valid-type]
    """Further rules of where to, such as a store of checkpoints or of traces."""


class Disruption(Strict):
    """Pod disruption budgets of Ray's head and of the workers."""

    enabled: bool = True
    """Make them. The head's lets no drain pass: without the head the fleet starts anew."""
    workersUnavailable: int = Field(default=1, ge=0)
    """Workers that a drain may take away at a time; with one worker pod none."""


class Security(Strict):
    """User of all pods; engines, and trainers in their pods, must be of one user to share memory."""

    runAsUser: int = Field(default=10001, ge=1)
    """User id."""
    runAsGroup: int = Field(default=10001, ge=1)
    """Group id."""
    fsGroup: int = Field(default=10001, ge=1)
    """Group of volumes."""


class Values(Strict):
    """All values but `fleet`."""

    nameOverride: Name = ""
    """Stands for the chart's name in names and labels."""
    fullnameOverride: str = Field(default="", pattern=r"^([a-z]([a-z0-9-]{0,38}[a-z0-9])?)?$")
    """Name of everything; 40 characters at most, as KubeRay adds to it. Needed where the release's begins with a digit or has a dot."""
    image: Image = Image()
    auth: Auth = Auth()
    ray: Ray = Ray()
    api: Api = Api()
    head: Head = Head()
    workers: Workers = Workers()
    models: Models = Models()
    cache: Cache = Cache()
    service: Service = Service()
    serviceAccount: ServiceAccount = ServiceAccount()
    metrics: Metrics = Metrics()
    networkPolicy: NetworkPolicy = NetworkPolicy()
    podDisruptionBudget: Disruption = Disruption()
    security: Security = Security()
    hostNetwork: bool = False
    """Run all pods in their hosts' network: for trainers that can't reach pods' addresses. Then no two pods of the release share a node."""
