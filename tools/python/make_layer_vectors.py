#!/usr/bin/env python3
"""Make tests/data/layer_*.safetensors: the attention layers of the transformers library's DeepSeek-V4.

    python3 -m venv /tmp/venv && /tmp/venv/bin/pip install torch numpy transformers
    /tmp/venv/bin/python tools/python/make_layer_vectors.py [FOLDER]

One file per kind of layer, and one more whose indexer selects all that is visible: random residual rows, weights
under the names of DeepSeek's release, the output of DeepseekV4Attention behind its RMSNorm, its index scores and the
rows that it selected, and the gradients of sum(output * dout) plus the indexer loss by torch's autograd. The library
turns some values to float32 whatever comes in; for the stored numbers those conversions are made ones to float64,
and a plain float32 run must agree.

The library has no indexer loss. Here it is built on the library's attention weights and index scores, by
DeepSeek-V3.2 (arXiv 2512.02556) equation 4: KL, over the selected rows, of the weights summed over heads and
normalized, against the softmax of the scores. The indexer's inputs are detached, and so are the weights.

No parameter keeps its start value: a norm weight of 1, a sink or a position bias of 0 would hide a mistake.
"""
import json
import pathlib
import sys

import torch
import transformers
from torch.overrides import TorchFunctionMode
from transformers.masking_utils import create_sliding_window_causal_mask
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4Attention,
    DeepseekV4RMSNorm,
    DeepseekV4RotaryEmbedding,
)

# Sizes differ wherever they can, so that no exchanged pair of axes fits. Four rotary frequencies: YaRN leaves the
# first alone, blends the second and divides the others.
HIDDEN, HEADS, HEAD_DIM, ROTARY, Q_RANK, GROUPS, O_RANK = 20, 4, 24, 8, 14, 2, 10
WINDOW, INDEX_HEADS, INDEX_DIM = 7, 8, 16
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
THETA, COMPRESS_THETA, EPS = 10000.0, 160000.0, 1e-6
# File: kind of layer, ratio, length (ends inside a group), rows to select.
FILES = {
    "layer_sliding": ("sliding", 0, 45, 5),
    "layer_compressed_sparse": ("compressed_sparse", 4, 75, 5),
    "layer_compressed_all": ("compressed_sparse", 4, 42, 64),
    "layer_heavily_compressed": ("heavily_compressed", 128, 270, 5),
}
LOSS_COEFF = 0.5
MARGIN = 1e-4  # least distance between the last selected and the first other score, relative to the largest

RELEASE_NAMES = {
    "q_a_proj.weight": "wq_a.weight",
    "q_a_norm.weight": "q_norm.weight",
    "q_b_proj.weight": "wq_b.weight",
    "kv_proj.weight": "wkv.weight",
    "kv_norm.weight": "kv_norm.weight",
    "o_a_proj.weight": "wo_a.weight",
    "o_b_proj.weight": "wo_b.weight",
    "sinks": "attn_sink",
    "compressor.kv_proj.weight": "compressor.wkv.weight",
    "compressor.gate_proj.weight": "compressor.wgate.weight",
    "compressor.position_bias": "compressor.ape",
    "compressor.kv_norm.weight": "compressor.norm.weight",
    "compressor.indexer.q_b_proj.weight": "indexer.wq_b.weight",
    "compressor.indexer.scorer.weights_proj.weight": "indexer.weights_proj.weight",
    "compressor.indexer.kv_proj.weight": "indexer.compressor.wkv.weight",
    "compressor.indexer.gate_proj.weight": "indexer.compressor.wgate.weight",
    "compressor.indexer.position_bias": "indexer.compressor.ape",
    "compressor.indexer.kv_norm.weight": "indexer.compressor.norm.weight",
}


class Widen(TorchFunctionMode):
    """Every conversion to float32 becomes one to float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        wide = lambda x: torch.float64 if x is torch.float32 else x
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(wide, args), **{key: wide(x) for key, x in (kwargs or {}).items()})


def library_config(kind, topk):
    config = DeepseekV4Config(
        vocab_size=64,
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        head_dim=HEAD_DIM,
        q_lora_rank=Q_RANK,
        partial_rotary_factor=ROTARY / HEAD_DIM,
        layer_types=[kind + "_attention"],
        mlp_layer_types=["moe"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        o_groups=GROUPS,
        o_lora_rank=O_RANK,
        sliding_window=WINDOW,
        index_n_heads=INDEX_HEADS,
        index_head_dim=INDEX_DIM,
        index_topk=topk,
        rope_theta=THETA,
        compress_rope_theta=COMPRESS_THETA,
        rope_parameters=dict(YARN),
        max_position_embeddings=4096,
        rms_norm_eps=EPS,
        attn_implementation="eager",
    )
    assert config.qk_rope_head_dim == ROTARY
    assert config.rope_parameters["compress"]["attention_factor"] == 1.0
    assert config.rope_parameters["main"]["rope_type"] == "default"
    return config


def scatter(module, generator):
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        if "norm" in name:
            noise = 1 + 0.3 * noise
        elif name.endswith(".weight"):
            noise = noise / parameter.shape[-1] ** 0.5
        parameter.data = noise


def run(config, attention, norm, stream, dtype):
    """Output [S, hidden], attention weights [H, S, S + C], index scores [S, C] and selection [S, K], the last two
    None without an indexer."""
    seen = {}
    if hasattr(attention.compressor, "indexer"):
        indexer = attention.compressor.indexer
        indexer.register_forward_pre_hook(lambda m, args: tuple(x.detach() if torch.is_tensor(x) else x for x in args))
        indexer.scorer.register_forward_hook(lambda m, args, out: seen.update(scores=out[0]))
        indexer.register_forward_hook(lambda m, args, out: seen.update(topk=out[0]))
    rows = stream[None]
    positions = torch.arange(rows.shape[1])[None]
    mask = create_sliding_window_causal_mask(
        config=config, inputs_embeds=rows.detach(), attention_mask=None, cache=None, position_ids=positions
    )
    assert mask.shape == (1, 1, rows.shape[1], rows.shape[1]) and mask.dtype == dtype
    rotary = DeepseekV4RotaryEmbedding(config)
    turns = {table: rotary(rows, positions, table) for table in ("main", "compress")}
    out, weights = attention(norm(rows), turns, positions, mask)
    assert out.dtype == dtype
    return out[0], weights[0], seen.get("scores"), seen.get("topk")


def indexer_loss(weights, scores, topk):
    """Summed over rows; a row that selects nothing adds nothing."""
    length, loss = len(scores), 0
    for t, row in enumerate(topk):
        chosen = row[row >= 0]
        if len(chosen):
            target = weights[:, t, length + chosen].detach().sum(0)
            target = target / target.sum()
            loss = loss + (target * (target.log() - scores[t, chosen].log_softmax(-1))).sum()
    return LOSS_COEFF * loss


def margin(scores, ratio, k):
    """Distance at the cut over all rows that see more than k compressed rows."""
    least = float("inf")
    for t, row in enumerate(scores):
        visible = row[: (t + 1) // ratio].detach().sort(descending=True).values
        if len(visible) > k:
            least = min(least, float(visible[k - 1] - visible[k]) / float(visible.abs().max()))
    return least


def write_safetensors(path, tensors, facts):
    """As the safetensors package does, but equal contents give equal bytes."""
    header, at = {"__metadata__": {key: str(value) for key, value in facts.items()}}, 0
    for name, array in tensors.items():
        dtype = {"float64": "F64", "int32": "I32"}[str(array.dtype)]
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": (at, at := at + array.nbytes)}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(t.tobytes() for t in tensors.values()))


def make(name_of_file, folder):
    kind, ratio, length, k = FILES[name_of_file]
    config = library_config(kind, k)
    for seed in range(1, 100):
        generator = torch.Generator().manual_seed(seed)
        normal = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)
        with Widen():
            attention = DeepseekV4Attention(config, 0).double().eval()
            norm = DeepseekV4RMSNorm(HIDDEN, eps=EPS).double()
            scatter(attention, generator)
            norm.weight.data = 1 + 0.3 * normal(HIDDEN)
            stream = (2 * normal(length, HIDDEN)).requires_grad_()
            out, weights, scores, topk = run(config, attention, norm, stream, torch.float64)
        if scores is None or margin(scores, ratio, k) > MARGIN:
            break
    else:
        raise SystemExit(f"{name_of_file}: no seed keeps the selection clear of rounding")
    dout = normal(*out.shape)
    loss = indexer_loss(weights, scores, topk) if scores is not None else torch.zeros(())
    with Widen():
        ((out * dout).sum() + loss).backward()

    plain, plain_norm = DeepseekV4Attention(config, 0).eval(), DeepseekV4RMSNorm(HIDDEN, eps=EPS)
    plain.load_state_dict(attention.state_dict())
    plain_norm.load_state_dict(norm.state_dict())
    with torch.no_grad():
        narrow, _, _, narrow_topk = run(config, plain, plain_norm, stream.detach().float(), torch.float32)
    difference = float(((narrow - out).abs().max() / out.abs().max()).detach())
    assert difference < 1e-5, difference

    tensors = {"embed.weight": stream, "layers.0.attn_norm.weight": norm.weight}
    for name, parameter in attention.named_parameters():
        tensors["layers.0.attn." + RELEASE_NAMES[name]] = parameter
    file = {name: t.detach().numpy() for name, t in tensors.items()}
    for name, t in tensors.items():
        assert t.grad.abs().max() > 0, name
        file["grad." + name] = t.grad.numpy()
    file["out.attended"], file["in.dout"] = out.detach().numpy(), dout.numpy()
    if topk is not None:
        assert (topk.sort().values == narrow_topk.sort().values).all()
        file["out.scores"] = scores.detach().numpy()
        file["out.indexer_loss"] = loss.detach().numpy().reshape(1)
        file["out.topk"] = topk.to(torch.int32).numpy()
    facts = {  # settings under the names of csagrad's config keys
        "source": f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}, float64",
        "seed": seed,
        "vocab_size": length,
        "num_hidden_layers": 1,
        "compress_ratios": ratio,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "head_dim": HEAD_DIM,
        "qk_rope_head_dim": ROTARY,
        "q_lora_rank": Q_RANK,
        "o_groups": GROUPS,
        "o_lora_rank": O_RANK,
        "sliding_window": WINDOW,
        "index_n_heads": INDEX_HEADS,
        "index_head_dim": INDEX_DIM,
        "index_topk": k,
        "indexer_loss_coeff": LOSS_COEFF,
        "teacher": "full",
        "support": "sparse",
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "compress_rope_theta": COMPRESS_THETA,
        "rope_scaling_factor": YARN["factor"],
        "rope_scaling_original_max_position_embeddings": YARN["original_max_position_embeddings"],
        "rope_scaling_beta_fast": YARN["beta_fast"],
        "rope_scaling_beta_slow": YARN["beta_slow"],
        "difference_of_float32": f"{difference:.1e}",
    }
    if scores is not None:
        facts["margin"] = f"{margin(scores, ratio, k):.1e}"
    path = folder / f"{name_of_file}.safetensors"
    write_safetensors(path, file, facts)
    print(f"{path}: {path.stat().st_size} bytes, seed {seed}, float32 differs by {difference:.1e}")


if __name__ == "__main__":
    if sys.argv[1:] in (["-h"], ["--help"]):
        raise SystemExit(__doc__)
    torch.set_num_threads(1)
    target = pathlib.Path(sys.argv[1]) if sys.argv[1:] else pathlib.Path(__file__).parents[2] / "tests" / "data"
    for file_name in FILES:
        make(file_name, target)
