"""The example of two Deployments of stock vLLM: its manifests, and the connector's settings in them."""

import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tandem_connector.settings import ConnectorSettings

FOLDER = Path(__file__).parents[2] / "examples" / "connector"
KUBERNETES = "1.33"


def manifests() -> list[Any]:
    return [each for file in sorted(FOLDER.glob("*.yaml")) for each in yaml.safe_load_all(file.read_text())]


def transfer_of(name: str) -> dict[str, Any]:
    """Return what a Deployment of this name gives as `--kv-transfer-config`."""
    (deployment,) = [each for each in manifests() if each["kind"] == "Deployment" and each["metadata"]["name"] == name]
    arguments = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    found: dict[str, Any] = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    return found


@pytest.mark.parametrize("manifest", manifests(), ids=lambda each: f"{each['kind']} {each['metadata']['name']}")
def test_a_manifest_is_valid(manifest: Any) -> None:
    kubernetes_validate.validate(manifest, KUBERNETES, strict=True)


def test_the_connectors_settings_fit_together() -> None:
    prefill, decode = transfer_of("prefill"), transfer_of("decode")
    assert (prefill["kv_role"], decode["kv_role"]) == ("kv_producer", "kv_consumer")
    lending = ConnectorSettings.read(prefill["kv_connector_extra_config"])
    borrowing = ConnectorSettings.read(decode["kv_connector_extra_config"])
    assert lending.is_guarded
    assert lending.secret_file == borrowing.secret_file
    (service,) = [each for each in manifests() if each["kind"] == "Service" and each["metadata"]["name"] == "prefill"]
    ports = {each["name"]: each["port"] for each in service["spec"]["ports"]}
    assert service["spec"]["clusterIP"] == "None"
    assert borrowing.lenders == (f"http://prefill:{ports['http']}",)
    assert lending.loan_port == ports["loans"]
