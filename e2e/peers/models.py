"""The demo's model in the forms that peers read, made once: the same weights for everybody."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from e2e.demo_model import model_path
from e2e.peers.catalogue import HOME, Models


def prepare() -> Models:
    """GGUF in float16 and a folder in Hugging Face layout, below the cache; made when they are not there."""
    models = Models(HOME / "models" / "smollm2-f16.gguf", HOME / "models" / "smollm2")
    models.folder.parent.mkdir(parents=True, exist_ok=True)
    if not models.gguf.exists():
        print("bench: writing the model as float16 GGUF", file=sys.stderr)
        _write_gguf(model_path(), models.gguf)
    if not (models.folder / "config.json").exists():
        print("bench: writing the model in Hugging Face layout", file=sys.stderr)
        _write_folder(model_path(), models.folder)
    return models


def _write_gguf(source: Path, target: Path) -> None:
    import gguf
    import numpy

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    partial = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, architecture)
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = entry.types[0]
        inner = entry.types[-1] if kind is gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, entry.contents(), kind, inner)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        # Norms stay in float32, as in every float16 GGUF.
        writer.add_tensor(tensor.name, values.astype(numpy.float32 if values.ndim == 1 else numpy.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)


def _write_folder(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    where, name = str(source.parent), source.name
    config = AutoConfig.from_pretrained(where, gguf_file=name)
    causal: Any = AutoModelForCausalLM
    model = causal.from_config(config, dtype=torch.float32)
    # `from_pretrained` does the same, but only where the package accelerate is.
    read: Any = load_gguf_checkpoint
    content = read(str(source), return_tensors=True, model_to_load=model)
    tensors = {key: torch.as_tensor(value) for key, value in content["tensors"].items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if set(missing) - {"lm_head.weight"} or unexpected:
        raise SystemExit(f"bench: {source} does not fit its architecture: {missing}, {unexpected}")
    model.tie_weights()
    AutoTokenizer.from_pretrained(where, gguf_file=name).save_pretrained(target)
    model.save_pretrained(target)
