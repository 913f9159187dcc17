"""Keys, certificates and kubeconfig files of one start of the cluster; made by openssl, P-256."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from .console import run
from .places import API_PORT, NODE_IP, NODE_NAME, SERVICE_IP

DAYS = "365"
SERVER = f"https://{NODE_IP}:{API_PORT}"

# file name -> (subject, extensions). Kubernetes reads user from CN and groups from O.
_CLIENT = "extendedKeyUsage=clientAuth"
_SERVED = f"IP:{NODE_IP},IP:{SERVICE_IP},IP:127.0.0.1"
_NAMES = "DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc"
LEAVES = {
    "apiserver": (
        "/CN=kube-apiserver",
        f"extendedKeyUsage=serverAuth\nsubjectAltName={_SERVED},{_NAMES}",
    ),
    "apiserver-to-kubelet": ("/O=system:masters/CN=kube-apiserver-kubelet-client", _CLIENT),
    "admin": ("/O=system:masters/CN=admin", _CLIENT),
    "kube-controller-manager": ("/CN=system:kube-controller-manager", _CLIENT),
    "kube-scheduler": ("/CN=system:kube-scheduler", _CLIENT),
    "kube-proxy": ("/CN=system:kube-proxy", _CLIENT),
    "kubelet": (
        f"/O=system:nodes/CN=system:node:{NODE_NAME}",
        f"extendedKeyUsage=clientAuth,serverAuth\nsubjectAltName=IP:{NODE_IP},DNS:{NODE_NAME}",
    ),
}


def _issue(pki: Path, name: str, subject: str, extensions: str, issuer: str | None) -> None:
    """Writes name.key and name.crt, signed by the issuer's key, or by its own when there is none."""
    signing = ["-CA", pki / f"{issuer}.crt", "-CAkey", pki / f"{issuer}.key"] if issuer else []
    constraint = "basicConstraints=critical,CA:" + ("FALSE" if issuer else "TRUE")
    usage = "keyUsage=critical," + ("digitalSignature" if issuer else "keyCertSign,cRLSign,digitalSignature")
    added = [("-addext", line) for line in (constraint, usage, *extensions.split("\n")) if line]
    empty = pki / "openssl.cnf"  # the machine's own file would add extensions of its own
    empty.write_text("[req]\ndistinguished_name = subject\n[subject]\n")
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc", "-keyout", pki / f"{name}.key"]
    certificate = ["-days", DAYS, "-subj", subject, *(word for pair in added for word in pair), *signing]
    output = ["-out", pki / f"{name}.crt"]
    command = ["openssl", "req", "-x509", "-config", empty, *key, *certificate, *output]
    run(command, why=f"making the certificate {name}")


def make_certificates(pki: Path) -> None:
    """CA, front-proxy CA, service-account key pair, and one certificate per part, into `pki`."""
    pki.mkdir(parents=True, mode=0o700)
    _issue(pki, "ca", "/CN=firsttoken-ca", "", None)
    for name, (subject, extensions) in LEAVES.items():
        _issue(pki, name, subject, extensions, "ca")
    # Aggregated APIs (metrics servers) trust this one, and only this one, to name the user.
    _issue(pki, "front-proxy-ca", "/CN=firsttoken-front-proxy-ca", "", None)
    _issue(pki, "front-proxy", "/CN=front-proxy", _CLIENT, "front-proxy-ca")
    service_account = pki / "service-account"
    run(
        [
            *("openssl", "genpkey", "-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:2048", "-out"),
            f"{service_account}.key",
        ],
        why="making the service-account key",
    )
    run(
        ["openssl", "pkey", "-in", f"{service_account}.key", "-pubout", "-out", f"{service_account}.pub"],
        why="making the service-account key",
    )


def kubeconfig(pki: Path, user: str) -> str:
    """A self-contained kubeconfig (JSON, which is YAML) for the certificate `user`."""

    def data(name: str) -> str:
        return base64.b64encode((pki / name).read_bytes()).decode()

    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "firsttoken",
            "contexts": [{"name": "firsttoken", "context": {"cluster": "firsttoken", "user": user}}],
            "clusters": [
                {
                    "name": "firsttoken",
                    "cluster": {"server": SERVER, "certificate-authority-data": data("ca.crt")},
                }
            ],
            "users": [
                {
                    "name": user,
                    "user": {
                        "client-certificate-data": data(f"{user}.crt"),
                        "client-key-data": data(f"{user}.key"),
                    },
                }
            ],
        },
        indent=1,
    )


def write_private(path: Path, text: str) -> None:
    """Readable by the owner only from the first byte on, and never half-written."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.unlink(missing_ok=True)
    unfinished.touch(mode=0o600)
    unfinished.write_text(text)
    unfinished.rename(path)
