"""Network namespaces as pods have them: an address, process ids, shared memory and a host name of their own.

One bridge on this machine joins them, by a veth pair each. Needs root and iproute2; dropping packets needs nftables.
"""

import os
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Self

TOOLS = ("ip", "unshare", "nft")
ETC = Path("/etc/netns")
"""Folder whose files `ip netns exec` mounts over those of /etc."""
ISOLATED = ("unshare", "--pid", "--ipc", "--uts", "--mount", "--fork", "--kill-child", "--mount-proc")
ENTER = 'hostname "$0" && mount -t tmpfs -o size=1g tmpfs /dev/shm && exec "$@"'


def missing() -> str:
    """Return why namespaces cannot be made here; empty when they can."""
    if os.geteuid():
        return "network namespaces need root"
    if lacking := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"network namespaces need {', '.join(lacking)} (Debian: iproute2, util-linux, nftables)"
    probe = Namespaces()
    try:
        with probe:
            namespace = probe.add("probe")
            namespace.drop_from(["10.0.0.1"])
            subprocess.run(namespace.command(["true"]), check=True, capture_output=True)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed here: {error.cmd} failed"
    return ""


def run(*command: str, text: str | None = None) -> None:
    """Run a command; raises CalledProcessError with what it printed."""
    subprocess.run(command, check=True, capture_output=True, text=True, input=text)


class Namespace:
    """One namespace, with one address."""

    def __init__(self, name: str, host_name: str, link: str, ip: str, host_ip: str) -> None:
        self.name = name
        self.host_name = host_name
        self.link = link
        """Name of the host's end of its veth pair."""
        self.ip = ip
        self.host_ip = host_ip
        """Address of this machine, as the namespace sees it."""

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` in here, as process 1 with a /proc and a /dev/shm of its own."""
        return ["ip", "netns", "exec", self.name, *ISOLATED, "sh", "-c", ENTER, self.host_name, *command]

    def write_hosts(self, names: Mapping[str, Iterable[str]]) -> None:
        """Write /etc/hosts: addresses by name. Processes that run in here see it at once."""
        lines = ["127.0.0.1 localhost", f"{self.ip} {self.host_name}"]
        lines += [f"{ip} {name}" for name, ips in names.items() for ip in ips]
        # In place, since it is mounted where it is read, and by one write, so that nobody finds it empty.
        with (ETC / self.name / "hosts").open("r+b", buffering=0) as file:
            file.truncate(file.write(("\n".join(lines) + "\n").encode()))

    def set_up(self, up: bool) -> None:
        """Plug the cable in, or out."""
        run("ip", "link", "set", self.link, "up" if up else "down")

    def set_mtu(self, mtu: int) -> None:
        run("ip", "link", "set", self.link, "mtu", str(mtu))
        run("ip", "-n", self.name, "link", "set", "eth0", "mtu", str(mtu))

    def drop_from(self, ips: Sequence[str]) -> None:
        """Drop all packets from these addresses, without a word to their senders; with none, drop nothing more."""
        rules = [f"add rule ip tandem input ip saddr {ip} drop" for ip in ips]
        made = ["add table ip tandem", "flush table ip tandem"]
        made += ["add chain ip tandem input { type filter hook input priority 0; policy accept; }"]
        run("ip", "netns", "exec", self.name, "nft", "-f", "-", text="\n".join([*made, *rules]) + "\n")


class Namespaces:
    """Context manager of namespaces on one bridge; removes them at its end."""

    def __init__(self) -> None:
        self._tag = f"t{os.getpid() % 0xFFFFF:x}"
        """Prefix of all names, of at most 6 letters: interface names have at most 15."""
        self._subnet = f"10.{64 + os.getpid() // 250 % 64}.{os.getpid() % 250}"
        self.namespaces: list[Namespace] = []

    @property
    def host_ip(self) -> str:
        """Address of this machine, as the namespaces see it."""
        return f"{self._subnet}.254"

    def __enter__(self) -> Self:
        run("ip", "link", "add", self._tag, "type", "bridge")
        run("ip", "addr", "add", f"{self.host_ip}/24", "dev", self._tag)
        run("ip", "link", "set", self._tag, "up")
        return self

    def __exit__(self, *error: object) -> None:
        for namespace in self.namespaces:
            self._remove(namespace)
        run("ip", "link", "del", self._tag)

    def add(self, host_name: str) -> Namespace:
        """Make a namespace, whose /etc/hosts knows itself only and which asks no name server."""
        number = len(self.namespaces) + 1
        name = link = f"{self._tag}-{number}"
        namespace = Namespace(name, host_name, link, f"{self._subnet}.{number}", self.host_ip)
        self.namespaces.append(namespace)
        run("ip", "netns", "add", name)
        run("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
        run("ip", "link", "set", link, "master", self._tag, "up")
        run("ip", "-n", name, "link", "set", "lo", "up")
        run("ip", "-n", name, "addr", "add", f"{namespace.ip}/24", "dev", "eth0")
        run("ip", "-n", name, "link", "set", "eth0", "up")
        run("ip", "-n", name, "route", "add", "default", "via", self.host_ip)
        (ETC / name).mkdir(parents=True)
        (ETC / name / "resolv.conf").touch()
        (ETC / name / "hosts").touch()
        namespace.write_hosts({})
        return namespace

    def _remove(self, namespace: Namespace) -> None:
        subprocess.run(["ip", "netns", "del", namespace.name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", namespace.link], check=False, capture_output=True)
        shutil.rmtree(ETC / namespace.name, ignore_errors=True)
