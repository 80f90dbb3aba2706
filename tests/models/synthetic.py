"""Folders of large models that take no room: their numbers are holes in a file."""

import json
import math
import struct

from colossax.models.hf_folder import by_path, conversion_of
from colossax.models.registry import maker
from colossax.nn import describe


def sparse_folder(folder, **settings):
    """Write a folder with bfloat16 zeros for every tensor; returns the bytes of each."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings))
    table = conversion_of(settings)
    config = table.config_from(settings)
    tensors = table.tensors(by_path(describe(maker(config))), config.decoder().layer_kinds)
    header, position = {}, 0
    for tensor in tensors:
        end = position + 2 * math.prod(tensor.shape)
        header[tensor.name] = {
            "dtype": "BF16",
            "shape": tensor.shape,
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + position)
    return {name: e["data_offsets"][1] - e["data_offsets"][0] for name, e in header.items()}
