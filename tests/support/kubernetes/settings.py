"""Settings of the suite, from environment variables."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from cluster.errors import StartError


@dataclass(frozen=True)
class Settings:
    """Settings of the suite; the variable of `image_tag` is TANDEM_IMAGE_TAG, and so on."""

    image_registry: str = ""
    """Registry and path before the images' names, with a slash at the end."""
    image_tag: str = ""
    """Tag of the images; empty: the chart's appVersion."""
    router_image: str = "tandem-router"
    worker_image: str = "tandem-worker"
    redis_image: str = ""
    """Whole reference of Redis' image; empty: the chart's."""
    pull_policy: str = "IfNotPresent"
    pull_secret: str = ""
    """Secret for the registry as NAMESPACE/NAME, copied to each namespace of the suite."""
    namespace_prefix: str = "tandem-test"
    """Beginning of the names of the namespaces that the suite makes and deletes."""
    storage_class: str = ""
    """StorageClass for a model on a volume; empty: that is not tried."""
    load_s: str = "20"
    """Seconds of load before, between and after faults."""
    wait_s: str = "300"
    """Longest wait for pods, in seconds."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Read the settings.

        Raises StartError that names the variable at fault.
        """
        names = {field.name: f"TANDEM_{field.name.upper()}" for field in fields(cls)}
        settings = cls(**{name: environment[key] for name, key in names.items() if environment.get(key)})
        for name in ("load_s", "wait_s"):
            if not getattr(settings, name).isdigit():
                raise StartError(names[name], f"{getattr(settings, name)!r} is no whole number of seconds")
        if settings.pull_secret and settings.pull_secret.count("/") != 1:
            raise StartError(names["pull_secret"], f"{settings.pull_secret!r} is not NAMESPACE/NAME")
        return settings

    @property
    def pull_secrets(self) -> list[str]:
        """Names of the secrets for the registry within a namespace of the suite."""
        return [self.pull_secret.partition("/")[2]] if self.pull_secret else []

    @property
    def router_reference(self) -> str:
        """Whole reference of the routers' image, which the suite's own pods use, too."""
        return f"{self.image_registry}{self.router_image}:{self.image_tag or APP_VERSION}"

    def values(self) -> dict[str, Any]:
        """Return the chart's values that these settings are."""
        image = {
            "registry": self.image_registry,
            "tag": self.image_tag,
            "router": self.router_image,
            "worker": self.worker_image,
            "pullPolicy": self.pull_policy,
            "pullSecrets": self.pull_secrets,
        }
        return {"image": image} | ({"redis": {"image": self.redis_image}} if self.redis_image else {})


APP_VERSION = "0.1.0"
"""The chart's appVersion, which is the default tag."""
