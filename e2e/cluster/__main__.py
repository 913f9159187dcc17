"""The command line: `python -m e2e.cluster COMMAND` from the top of the repository."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from . import images, node, tools
from .console import ClusterError, say
from .dump import dump
from .gpu import fake_gpu
from .kind import Kind, chosen_kind
from .places import BIN, NODE_NAME, Places, places


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster", description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    up = commands.add_parser("up", help="start a Kubernetes node; does nothing when one is up")
    up.add_argument(
        "--node",
        choices=("auto", "bare", "kind"),
        default="auto",
        help="bare: real Kubernetes processes on this machine; kind: in Docker; auto: kind if it is there",
    )
    commands.add_parser("down", help="stop it and leave nothing behind but the cache")
    status = commands.add_parser("status", help="say whether it serves; exit code 1 when it does not")
    status.add_argument("--json", action="store_true", help="paths, processes and problems as JSON")
    commands.add_parser("kubeconfig", help="print the path of the kubeconfig")
    commands.add_parser("images", help="build and import both images; print their references as JSON")
    commands.add_parser("helm", help="build helm if it is not there yet, and print its path; needs no root")
    commands.add_parser("prepare", help="build what up and images need, without starting anything")
    dumping = commands.add_parser("dump", help="write pods, events and logs to a directory")
    dumping.add_argument("directory", type=Path)
    gpu = commands.add_parser(
        "fake-gpu", help="let the scheduler see GPUs that are not there; 0 takes them back"
    )
    gpu.add_argument("count", type=int)
    gpu.add_argument("type", nargs="?", default="NVIDIA-H100-80GB-HBM3", help="label nvidia.com/gpu.product")
    commands.add_parser("install-tools", help="install missing Debian packages and build the Go programs")
    return parser


def _status(where: Places, kind: Kind | None, as_json: bool) -> int:
    state = kind.health(where) if kind else node.health(where)
    helm = tools.built_helm(where)
    facts = {
        "serving": state.serves,
        "node": "kind" if kind else "bare",
        "nodeName": kind.node_name if kind else NODE_NAME,
        "problems": state.problems,
        "processes": state.running,
        "kubeconfig": str(where.kubeconfig),
        "kubectl": str(BIN / "kubectl"),
        "helm": str(helm) if helm else None,
        "volumes": str(where.volumes),
        "logs": str(where.logs),
        "cache": str(where.cache),
        "images": json.loads(where.images.read_text()) if where.images.exists() else {},
    }
    if as_json:
        print(json.dumps(facts, indent=1))
    else:
        print("serving" if state.serves else "not serving: " + "; ".join(state.problems))
    return 0 if state.serves else 1


def _run(arguments: argparse.Namespace, where: Places) -> int:
    kind = chosen_kind(where, getattr(arguments, "node", None))
    match arguments.command:
        case "up":
            kind.up(where) if kind else node.up(where)
        case "down":
            kind.down(where) if kind else node.down(where)
        case "status":
            return _status(where, kind, arguments.json)
        case "kubeconfig":
            print(where.kubeconfig)
        case "images":
            built = kind.build_images(where) if kind else _images_on_bare_node(where)
            print(json.dumps(built, indent=1))
        case "helm":
            print(tools.helm(where))
        case "prepare":
            tools.install_tools(where)
            images.prepare(where)
        case "dump":
            dump(where, arguments.directory)
        case "fake-gpu":
            fake_gpu(where, arguments.count, arguments.type, kind.node_name if kind else NODE_NAME)
        case "install-tools":
            tools.install_tools(where)
    return 0


def _images_on_bare_node(where: Places) -> dict[str, str]:
    state = node.health(where)
    if not state.serves:
        raise ClusterError(f"the node is not up ({'; '.join(state.problems)}); say `up` first")
    return images.build_images(where)


def main() -> int:
    """Exit code 0 when done, 1 with one line of explanation when not, 130 when interrupted."""
    arguments = _parser().parse_args()
    try:
        return _run(arguments, places())
    except (ClusterError, OSError) as error:  # an OSError names the file; the disk may be full, say
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130


if __name__ == "__main__":
    sys.exit(main())
