"""The LLM server that runs in the pod."""
