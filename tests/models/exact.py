"""A Llama with an adapter in float64, from the files themselves: what float32 is judged by."""

import json
import math

import numpy as np
from safetensors.numpy import load_file

PREFIX = "base_model.model."


class ExactLlama:
    """Logits of a Hugging Face folder of a Llama, merged with a folder of `peft` or not."""

    def __init__(self, folder, adapter):
        """Read both.

        Args:
            folder: With config.json and model.safetensors.
            adapter: With adapter_config.json and adapter_model.safetensors.
        """
        self.config = json.loads((folder / "config.json").read_text())
        self.form = json.loads((adapter / "adapter_config.json").read_text())
        self.base = wide(load_file(folder / "model.safetensors"))
        self.pairs = {
            name.removeprefix(PREFIX): x
            for name, x in wide(load_file(adapter / "adapter_model.safetensors")).items()
        }

    @property
    def scale(self):
        rank = self.form["r"]
        return self.form["lora_alpha"] / (math.sqrt(rank) if self.form["use_rslora"] else rank)

    def added(self, name):
        """`W + s B A` `[out, in]`."""
        w = self.base[f"{name}.weight"]
        if f"{name}.lora_A.weight" not in self.pairs:
            return w
        b, a = (self.pairs[f"{name}.lora_{which}.weight"] for which in "BA")
        return w + self.scale * b @ a

    def matrix(self, name):
        """`[out, in]`, with its adapter."""
        whole = self.added(name)
        if f"{name}.lora_magnitude_vector" not in self.pairs:
            return whole
        lengths = np.linalg.norm(whole, axis=1)
        return whole * (self.pairs[f"{name}.lora_magnitude_vector"] / lengths)[:, None]

    def logits(self, ids):
        """`[b, s, vocab]`."""
        x = self.base["model.embed_tokens.weight"][ids]
        for layer in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{layer}"
            x = x + self._attention(f"{at}.self_attn", self._norm(f"{at}.input_layernorm", x))
            y = self._norm(f"{at}.post_attention_layernorm", x)
            gate = self._map(f"{at}.mlp.gate_proj", y)
            up = gate / (1 + np.exp(-gate)) * self._map(f"{at}.mlp.up_proj", y)
            x = x + self._map(f"{at}.mlp.down_proj", up)
        return self._norm("model.norm", x) @ self.base["lm_head.weight"].T

    def _map(self, name, x):
        return x @ self.matrix(name).T + self.base.get(f"{name}.bias", 0)

    def _norm(self, name, x):
        square = (x**2).mean(-1, keepdims=True) + self.config["rms_norm_eps"]
        return x / np.sqrt(square) * self.base[f"{name}.weight"]

    def _attention(self, name, x):
        size = self.config["head_dim"]
        q, k, v = (
            self._map(f"{name}.{part}_proj", x).reshape(*x.shape[:2], -1, size) for part in "qkv"
        )
        q, k = self._turned(q), self._turned(k)
        k, v = (np.repeat(one, q.shape[2] // one.shape[2], axis=2) for one in (k, v))
        scores = np.einsum("bsnh,btnh->bnst", q, k) / math.sqrt(size)
        scores = np.where(np.tri(x.shape[1], dtype=bool), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        y = np.einsum("bnst,btnh->bsnh", shares, v)
        return self._map(f"{name}.o_proj", y.reshape(*x.shape[:2], -1))

    def _turned(self, x):
        half = x.shape[-1] // 2
        theta = self.config["rope_parameters"]["rope_theta"]
        angles = np.arange(x.shape[1])[:, None] * theta ** (-np.arange(half) / half)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def wide(tensors):
    return {name: x.astype(np.float64) for name, x in tensors.items()}
