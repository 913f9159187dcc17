"""A real Kubernetes node on this machine, without Docker: `python -m e2e.cluster up`.

node.py starts and clears it, tools.py builds what it is made of, images.py makes the two images,
dump.py collects evidence when a test fails; kind.py does the same on kind where Docker is there.
"""
