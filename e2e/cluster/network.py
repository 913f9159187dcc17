"""The node's bridge and firewall rules, and how to take them away without touching anybody else's."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

from . import kernel
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


def saved_firewalls() -> dict[str, str]:
    """The text of both firewalls by the name of their programs, where those are installed."""
    families = [family for family in ("iptables", "ip6tables") if shutil.which(f"{family}-save")]
    return {family: run([f"{family}-save"], why="looking for firewall chains") for family in families}


def remove_chains(node_was_here: bool) -> bool:
    """Takes our chains out of the IPv4 and IPv6 firewalls; True when there were any.

    KUBE- chains may belong to another Kubernetes that this machine is a node of. They go only when
    a node of ours was here; our FIRSTTOKEN- chains are older than its KUBE- chains and show it, too.
    """
    saved = saved_firewalls()
    if not node_was_here and not any(":FIRSTTOKEN-" in text for text in saved.values()):
        return False
    removals = {family: removal(text, is_ours) for family, text in saved.items()}
    for family, text in removals.items():
        if text:
            run([f"{family}-restore", "--noflush"], stdin=text, why="removing firewall chains")
    return any(removals.values())


def refuse_another_kubernetes() -> None:
    """ClusterError when KUBE- chains are there although no node of ours is: two would share them."""
    if any("\n:KUBE-" in text for text in saved_firewalls().values()):
        raise ClusterError(
            "the firewall has KUBE- chains of another Kubernetes: this machine seems to be a node of one, "
            "and a second would break it. Take another machine, or `--node kind`; when none runs here any "
            "more, remove the chains (`iptables-save | grep KUBE-` shows them; a restart does it)"
        )


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
    forwarding = kernel.ROOT / kernel.FORWARDING
    if forwarding.read_text().strip() != "1":
        forwarding.write_text("1")
    run(["iptables-restore", "--noflush"], stdin=RULES, why="adding firewall rules")
