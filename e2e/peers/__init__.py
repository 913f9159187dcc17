"""Other servers, installed side by side, for `python -m e2e.bench --only peers`.

catalogue        which they are, how they are installed and started
install          a virtual environment each, one at a time, under ~/.cache/firsttoken/peers
models           the demo's model in the forms they read
run              one interleaved run, and the ratios of its medians
openvino_server  a thin server around OpenVINO GenAI, run by that peer's own Python
"""
