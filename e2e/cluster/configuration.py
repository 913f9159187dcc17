"""Options and configuration files of the node's seven daemons."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from . import containerd
from .certificates import kubeconfig, write_private
from .places import (
    API_PORT,
    BRIDGE,
    CGROUP,
    CONTAINERD_SOCKET,
    ETCD_PEER_PORT,
    ETCD_PORT,
    KUBELET_PORT,
    NETWORK_NAME,
    NODE_IP,
    NODE_NAME,
    POD_CIDR,
    PROXY_HEALTH_PORT,
    PROXY_METRICS_PORT,
    SERVICE_CIDR,
    Places,
)


def daemon_options(where: Places, name: str) -> list[str]:
    """The command line of a daemon. Nothing listens beyond loopback and the node's own bridge."""
    run, pki = where.volatile, where.volatile / "pki"
    etcd = f"http://127.0.0.1:{ETCD_PORT}"
    peer = f"http://127.0.0.1:{ETCD_PEER_PORT}"
    options: dict[str, dict[str, Any]] = {
        "etcd": {
            "data-dir": run / "etcd",
            "listen-client-urls": etcd,
            "advertise-client-urls": etcd,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": f"default={peer}",
            # Its data does not outlive the node, and the disk is slow.
            "unsafe-no-fsync": "true",
        },
        "containerd": {"config": run / "containerd.toml"},
        "kube-apiserver": {
            "bind-address": NODE_IP,
            "advertise-address": NODE_IP,
            "secure-port": API_PORT,
            "etcd-servers": etcd,
            "service-cluster-ip-range": SERVICE_CIDR,
            "authorization-mode": "Node,RBAC",
            "enable-admission-plugins": "NodeRestriction",
            "allow-privileged": "true",
            "client-ca-file": pki / "ca.crt",
            "tls-cert-file": pki / "apiserver.crt",
            "tls-private-key-file": pki / "apiserver.key",
            "kubelet-client-certificate": pki / "apiserver-to-kubelet.crt",
            "kubelet-client-key": pki / "apiserver-to-kubelet.key",
            "kubelet-certificate-authority": pki / "ca.crt",
            # Else exec, logs and port-forward would look the node's name up in DNS.
            "kubelet-preferred-address-types": "InternalIP",
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-key-file": pki / "service-account.pub",
            "service-account-signing-key-file": pki / "service-account.key",
            "requestheader-client-ca-file": pki / "front-proxy-ca.crt",
            "requestheader-allowed-names": "front-proxy",
            "requestheader-username-headers": "X-Remote-User",
            "requestheader-group-headers": "X-Remote-Group",
            "requestheader-extra-headers-prefix": "X-Remote-Extra-",
            "proxy-client-cert-file": pki / "front-proxy.crt",
            "proxy-client-key-file": pki / "front-proxy.key",
        },
        "kube-controller-manager": {
            "kubeconfig": run / "kube-controller-manager.kubeconfig",
            "leader-elect": "false",
            "secure-port": 0,
            # With the default of 20 requests a second its forty controllers start one after the other.
            "kube-api-qps": 200,
            "kube-api-burst": 400,
            "use-service-account-credentials": "true",
            "service-account-private-key-file": pki / "service-account.key",
            "root-ca-file": pki / "ca.crt",
            "cluster-signing-cert-file": pki / "ca.crt",
            "cluster-signing-key-file": pki / "ca.key",
            "flex-volume-plugin-dir": run / "volume-plugins",
        },
        "kube-scheduler": {
            "kubeconfig": run / "kube-scheduler.kubeconfig",
            "leader-elect": "false",
            "secure-port": 0,
        },
        "kubelet": {
            "config": run / "kubelet.json",
            "kubeconfig": run / "kubelet.kubeconfig",
            "hostname-override": NODE_NAME,
            "node-ip": NODE_IP,
            "root-dir": run / "kubelet",
            "cert-dir": run / "kubelet-pki",
        },
        "kube-proxy": {"config": run / "kube-proxy.json"},
    }
    return [f"--{option}={value}" for option, value in options[name].items()]


def _kubelet(where: Places) -> dict[str, Any]:
    pki = where.volatile / "pki"
    return {
        "kind": "KubeletConfiguration",
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "address": NODE_IP,
        "port": KUBELET_PORT,
        "healthzPort": 0,
        "readOnlyPort": 0,
        "tlsCertFile": str(pki / "kubelet.crt"),
        "tlsPrivateKeyFile": str(pki / "kubelet.key"),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": f"unix://{CONTAINERD_SOCKET}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{CGROUP}",
        "failSwapOn": False,
        "makeIPTablesUtilChains": False,
        "podLogsDir": str(where.logs / "pods"),
        "volumePluginDir": str(where.volatile / "volume-plugins"),
        "configMapAndSecretChangeDetectionStrategy": "Watch",
        "evictionHard": {
            "memory.available": "100Mi",
            "nodefs.available": "1%",
            "imagefs.available": "1%",
            "nodefs.inodesFree": "1%",
        },
        # The images are not to be had again from anywhere: never collect them.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
    }


def _kube_proxy(where: Places) -> dict[str, Any]:
    return {
        "kind": "KubeProxyConfiguration",
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "clientConnection": {"kubeconfig": str(where.volatile / "kube-proxy.kubeconfig")},
        "clusterCIDR": POD_CIDR,
        "hostnameOverride": NODE_NAME,
        "mode": "iptables",
        # Pods of one bridge answer each other past the node unless the node stands in between.
        "iptables": {"masqueradeAll": True, "localhostNodePorts": False, "minSyncPeriod": "100ms"},
        # Zero leaves the machine's connection tracking limits as they are.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        "healthzBindAddress": f"127.0.0.1:{PROXY_HEALTH_PORT}",
        "metricsBindAddress": f"127.0.0.1:{PROXY_METRICS_PORT}",
    }


def _cni(where: Places) -> dict[str, Any]:
    return {
        "cniVersion": "1.0.0",
        "name": NETWORK_NAME,
        "plugins": [
            {
                "type": "bridge",
                "bridge": BRIDGE,
                "isGateway": True,
                "hairpinMode": True,
                "ipam": {
                    "type": "host-local",
                    "dataDir": str(where.volatile / "cni-addresses"),
                    "ranges": [[{"subnet": POD_CIDR, "gateway": NODE_IP}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            },
        ],
    }


def write_configuration(where: Places, cni_directory: Path, pause_image: str) -> None:
    """All files the daemons read, into the node's volatile directory; makes the node's cgroup too."""
    run, pki = where.volatile, where.volatile / "pki"
    cni_configuration = run / "cni"
    cni_configuration.mkdir()
    (cni_configuration / "firsttoken.conflist").write_text(json.dumps(_cni(where)))
    (run / "containerd.toml").write_text(
        containerd.configuration(
            where,
            pause_image=pause_image,
            cni_directory=cni_directory,
            cni_configuration=cni_configuration,
        )
    )
    (run / "kubelet.json").write_text(json.dumps(_kubelet(where)))
    (run / "kube-proxy.json").write_text(json.dumps(_kube_proxy(where)))
    for user in ("kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy"):
        write_private(run / f"{user}.kubeconfig", kubeconfig(pki, user))
    _make_cgroup()


def _make_cgroup() -> None:
    """kubelet wants the root of its cgroups to be there, in every hierarchy."""
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():  # version 2: one hierarchy
        (root / CGROUP).mkdir(exist_ok=True)
        return
    for controller in (entry for entry in root.iterdir() if entry.is_dir() and not entry.is_symlink()):
        directory = controller / CGROUP
        directory.mkdir(exist_ok=True)
        for setting in ("cpuset.cpus", "cpuset.mems"):  # empty in a new group, and then nothing may run in it
            if (controller / setting).exists():
                (directory / setting).write_text((controller / setting).read_text())
