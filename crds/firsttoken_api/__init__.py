"""The contract: what a user writes, what the operator and the runtime agree on.

optimizations.py  the catalogue every switch, field, label and docs table comes from
switches.py       precedence and the message that carries switches to a pod
resources/        InferenceService and KillSwitch as pydantic models, and their CRDs
cli.py            the `firsttoken` command line
"""
