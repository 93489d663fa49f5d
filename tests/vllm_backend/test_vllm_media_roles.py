"""A cluster file with a preprocessor and an encode worker, on vLLM."""

import asyncio
import urllib.request
from pathlib import Path

import yaml

from protos import inference_pb2 as pb
from support.media_files import picture
from support.torchvision_shim import PYTHON
from support.vllm_engines import OPTIONS, need_vllm
from support.vllm_pictures import write_model
from tandem.client import Client
from tandem.cluster_file import read_cluster
from tandem.local.local_cluster import LocalCluster, RoleProcess

pytestmark = need_vllm


def encoded_by(role: RoleProcess) -> dict[str, float]:
    """Items by origin."""
    with urllib.request.urlopen(f"http://{role.metrics_address}/metrics", timeout=10) as said:
        lines = said.read().decode().splitlines()
    counts = [line.split() for line in lines if line.startswith("tandem_encoded_items_total")]
    return {name.split('"')[1]: float(count) for name, count in counts}


async def test_workers_of_a_cluster_file_have_a_picture_encoded_once(tmp_path: Path) -> None:
    """Both keys are nearly empty: they take the workers' settings, also a flag that only vLLM's parser reads."""
    model = write_model("qwen25vl", tmp_path)
    options = {name: value for name, value in OPTIONS.items() if name != "max_model_len"}
    worker = {"engine": "vllm", "vllm_python": str(PYTHON), "vllm_options": options, "kv_memory_mib": 64}
    worker |= {"dtype": "float32", "vllm_args": f"--max-model-len {OPTIONS['max_model_len']}"}
    roles = {"preprocessor": {"processes": 1}, "encoder": {"metrics_port": 0}}
    file = tmp_path / "cluster.yaml"
    file.write_text(yaml.safe_dump({"models": [{"path": str(model), "prefill": 0}], "worker": worker} | roles))
    topology = read_cluster(file, None, 1, 1).plan({"port": 0}, {}, [0, 1], 1)
    shown = {"type": "image", "data": picture(1, 112, 84)}
    sampling = pb.Sampling(max_tokens=4, temperature=0, ignore_eos=True)
    async with LocalCluster(topology) as cluster, Client(cluster.address) as client:
        (encoder,) = cluster.encoders
        for word, expected in (("w30", {"computed": 1, "found": 0}), ("w31", {"computed": 1, "found": 1})):
            stream = client.generate(messages=[("user", [word, shown])], sampling=sampling, timeout_s=60)
            *_, last = [piece async for piece in stream]
            assert last.finish.usage.completion_tokens == 4
            assert await asyncio.to_thread(encoded_by, encoder) == expected, "the picture stands after another word"
