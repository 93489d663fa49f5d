"""Resources of Kubernetes that list servers: EndpointSlices of a Service, and pods.

Pure. Other fields of the resources are not read.
"""

from collections.abc import Iterable

import msgspec


class Metadata(msgspec.Struct, rename="camel"):
    """Metadata of a resource, or of a list of resources."""

    name: str = ""
    resource_version: str = ""
    deletion_timestamp: str | None = None


class Resource(msgspec.Struct):
    """One resource of any kind."""

    metadata: Metadata


class Conditions(msgspec.Struct):
    """Conditions of an endpoint; an absent one is None."""

    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None


class Endpoint(msgspec.Struct):
    """Pod behind a Service. All its addresses are of one pod, and the first one is used."""

    addresses: tuple[str, ...] = ()
    conditions: Conditions | None = None


class EndpointSlice(Resource, rename="camel"):
    """Some endpoints of a Service, with addresses of one family."""

    address_type: str
    endpoints: tuple[Endpoint, ...] | None = None


class PodCondition(msgspec.Struct):
    """Condition of a pod."""

    type: str
    status: str


class PodStatus(msgspec.Struct):
    """Address and conditions of a pod."""

    pod_ip: str = msgspec.field(default="", name="podIP")
    conditions: tuple[PodCondition, ...] | None = None


class Pod(Resource):
    """One pod."""

    status: PodStatus = msgspec.field(default_factory=PodStatus)


FAMILIES = "IPv4", "IPv6", "FQDN"
"""Families of addresses, the preferred one first."""


def endpoints_of(slices: Iterable[EndpointSlice]) -> dict[str, bool]:
    """Return the addresses of a Service's serving endpoints, and whether each drains.

    A Service of two families has slices for each, which list the same pods; those of one family are taken.
    """
    known = list(slices)
    families = {each.address_type for each in known}
    taken = next((family for family in FAMILIES if family in families), "")
    found: dict[str, bool] = {}
    for each in known:
        for endpoint in each.endpoints or () if each.address_type == taken else ():
            conditions = endpoint.conditions or Conditions()
            is_ready = conditions.ready is not False
            is_serving = is_ready if conditions.serving is None else conditions.serving
            if is_serving and endpoint.addresses:
                _add(found, endpoint.addresses[0], not is_ready or conditions.terminating is True)
    return found


def addresses_of(pods: Iterable[Pod]) -> dict[str, bool]:
    """Return the addresses of ready pods, and whether each drains: its deletion has begun."""
    found: dict[str, bool] = {}
    for pod in pods:
        if pod.status.pod_ip and PodCondition("Ready", "True") in (pod.status.conditions or ()):
            _add(found, pod.status.pod_ip, pod.metadata.deletion_timestamp is not None)
    return found


def _add(found: dict[str, bool], address: str, drains: bool) -> None:
    """Add an address; where one that drains and one that does not are equal, a new pod has that of an old one."""
    found[address] = drains and found.get(address, True)
