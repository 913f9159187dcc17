"""The node's bridge and firewall rules, and how to take them away without touching anybody else's."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from .console import ClusterError, run
from .places import BRIDGE, NODE_IP, POD_CIDR

# Chains made by kube-proxy and kubelet, and this program's own.
OUR_CHAINS = re.compile(r"^(KUBE-|FIRSTTOKEN-)")

RULES = f"""\
*filter
:FIRSTTOKEN-FORWARD - [0:0]
-A FIRSTTOKEN-FORWARD -i {BRIDGE} -j ACCEPT
-A FIRSTTOKEN-FORWARD -o {BRIDGE} -j ACCEPT
-I FORWARD -j FIRSTTOKEN-FORWARD
COMMIT
*nat
:FIRSTTOKEN-POSTROUTING - [0:0]
-A FIRSTTOKEN-POSTROUTING -s {POD_CIDR} ! -o {BRIDGE} -j MASQUERADE
-I POSTROUTING -j FIRSTTOKEN-POSTROUTING
COMMIT
"""


def removal(saved: str, ours: Callable[[str], bool]) -> str:
    """From the text of iptables-save to the iptables-restore text that removes our chains.

    First the jumps into them from chains that stay, then the chains themselves; "" when there is
    nothing of ours. Other people's chains and rules are not named in it at all.
    """
    result = []
    table: str = ""
    chains: list[str] = []
    jumps: list[str] = []
    for line in saved.splitlines():
        if line.startswith("*"):
            table, chains, jumps = line, [], []
        elif line.startswith(":") and ours(name := line[1:].split()[0]):
            chains.append(name)
        elif line.startswith("-A "):
            words = line.split()
            target = next((words[i + 1] for i, word in enumerate(words[:-1]) if word in ("-j", "-g")), "")
            if ours(target) and not ours(words[1]):
                jumps.append("-D " + line[3:])
        elif line == "COMMIT" and chains:
            result += [table, *jumps, *(f"-F {c}" for c in chains), *(f"-X {c}" for c in chains), line]
    return "\n".join(result) + "\n" if result else ""


def is_ours(chain: str) -> bool:
    return OUR_CHAINS.match(chain) is not None


def remove_chains() -> bool:
    """Takes our chains out of the IPv4 and IPv6 firewalls; True when there were any."""
    any_removed = False
    for family in ("iptables", "ip6tables"):
        if shutil.which(f"{family}-save") is None:
            continue
        text = removal(run([f"{family}-save"], why="looking for firewall chains"), is_ours)
        if text:
            run([f"{family}-restore", "--noflush"], stdin=text, why="removing firewall chains")
            any_removed = True
    return any_removed


def bridge_exists() -> bool:
    return Path(f"/sys/class/net/{BRIDGE}").exists()


def remove_bridge() -> None:
    """Deletes the bridge and the pods' ends of their cables that hang on it."""
    for port in Path(f"/sys/class/net/{BRIDGE}/brif").glob("*"):
        subprocess.run(["ip", "link", "delete", port.name], capture_output=True, check=False)
    if bridge_exists():
        run(["ip", "link", "delete", BRIDGE], why="removing the bridge")


def set_up() -> None:
    """The bridge with the node's address on it, forwarding, and the rules that let pods out."""
    taken = run(["ip", "-4", "-o", "address", "show"], why="looking at the addresses in use")
    if f" {NODE_IP}/" in taken:
        raise ClusterError(
            f"the address {NODE_IP} is already on another network device of this machine; "
            "stop the cluster or network that uses it (`ip address` shows which)"
        )
    for words in (
        ["link", "add", BRIDGE, "type", "bridge"],
        ["address", "add", f"{NODE_IP}/24", "dev", BRIDGE],
        ["link", "set", BRIDGE, "up"],
    ):
        run(["ip", *words], why="making the bridge")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    run(["iptables-restore", "--noflush"], stdin=RULES, why="adding firewall rules")
