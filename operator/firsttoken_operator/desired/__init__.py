"""Pure functions from an InferenceService to the manifests that serve it.

names.py     names, labels, ownership         workload.py  the Deployment, and what may never change it
pod.py       the pod inside it                 access.py    Service, ServiceAccount, Secret
switches.py  the switches ConfigMap            network.py   NetworkPolicy        disruption.py  budget
"""
