"""What csagrad_dump.from_megatron and from_transformers make of a layer: of stand-ins, and of real ones if there.

A stand-in has the modules, functions, argument names and shapes of the framework's layer (megatron.md and
transformers.md name them) and no formulas: it plays a dump of `csagrad dump`, which must come out again and be
found right. The real layers compute; csagrad check must find what they compute right.

    python3 tests/python_frameworks.py FOLDER build/csagrad
"""
import importlib
import subprocess
import sys
import types
import warnings

import numpy

import csagrad_dump
from csagrad_dump import load

folder, program = sys.argv[1:]


def check(path):
    return subprocess.run([program, "check", path], stdout=subprocess.DEVNULL).returncode


def refused(call, part):
    try:
        call()
    except ValueError as error:
        assert part in str(error), error
        return
    raise AssertionError("not refused: " + part)


def watched(watch, run):
    """The texts of the warnings of a block."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with watch as d:
            run(d)
    assert all(w.filename == __file__ for w in seen), seen
    return "\n".join(str(w.message) for w in seen)


# ---- stand-ins ----


class Tensor:
    dtype = "torch.float32"

    def __init__(self, x, grad=None, leaf=False):
        self.x, self.shape, self.given, self.is_leaf = numpy.asarray(x), numpy.shape(x), grad, leaf
        self.requires_grad, self.grad, self.kept, self.hooks = grad is not None, None, False, []
    def detach(self): return self
    def cpu(self): return self
    def clone(self): return self
    def numpy(self): return self.x
    def retain_grad(self): self.kept = True
    def register_hook(self, hook):
        self.hooks.append(hook)
        return types.SimpleNamespace(remove=self.hooks.clear)
    def backward(self):
        if self.given is not None and self.is_leaf:
            for hook in self.hooks:
                hook(Tensor(self.given))
            self.grad = Tensor(numpy.full(self.shape, 7.0))  # sums of earlier steps
        elif self.given is not None and self.kept:
            self.grad = Tensor(self.given)


class Module:
    def __init__(self): self.before, self.behind = [], []
    def register_forward_pre_hook(self, hook): return self.hook(self.before, hook)
    def register_forward_hook(self, hook, with_kwargs=False): return self.hook(self.behind, hook)
    def hook(self, hooks, hook):
        hooks.append(hook)
        return types.SimpleNamespace(remove=lambda: hooks.remove(hook))
    def __call__(self, *values, **named):
        for hook in self.before: hook(self, values)
        result = self.forward(*values, **named)
        for hook in self.behind: hook(self, values, named, result)
        return result
    def named_modules(self, name=""):
        yield name, self
        for key, x in vars(self).items():
            if isinstance(x, Module): yield from x.named_modules((name + "." + key).strip("."))


class Result(Module):
    """A module whose result is known."""
    def __init__(self, result, **attributes):
        super().__init__()
        self.result = result
        vars(self).update(attributes)


class Play:
    """The tensors of a dump by name, with their gradients."""

    def __init__(self, path):
        self.tensors, self.facts = load(path)
        self.made = []

    def __call__(self, name, view=lambda x: x, scale=1, leaf=False):
        x = self.tensors[name]
        x = x.copy() if x.dtype.kind == "i" else x / scale
        gradient = self.tensors.get({"out.output": "in.dout"}.get(name, "grad." + name[3:]))
        self.made.append(Tensor(view(x), None if gradient is None else view(gradient * scale), leaf))
        return self.made[-1]

    def backward(self):
        for x in self.made: x.backward()


def same(path, play, but=()):
    """The file that was written has what was played, and is found right."""
    tensors, facts = load(path)
    expected = dict(play.tensors)
    for name in ("out.target", "out.log_predict", "out.lse", "out.query_valid_rows") + tuple(but):
        expected.pop(name, None)
    for name, x in expected.items():
        assert name in tensors, name
        assert x.size == tensors[name].size and (x.reshape(-1) == tensors[name].reshape(-1)).all(), name
    assert sorted(tensors) == sorted(expected), sorted(set(tensors) ^ set(expected))
    for name in "layout ratio window topk softmax_scale loss_coeff sparse reduction index".split():
        mine = str(facts.get(name)).lower()
        assert name in but or mine == play.facts[name] or float(mine) == float(play.facts[name]), (name, mine)
    assert check(path) == 0, subprocess.run([program, "check", path], capture_output=True, text=True).stdout
    return facts


# -- Megatron-LM --


class Function:
    """As FusedDSAIndexerLoss: apply takes what forward takes behind ctx."""
    @staticmethod
    def forward(ctx, q, weights, k, query, key, softmax_scale, topk, loss_coeff, mask, sparse_loss,
                pg_collection, varlen_starts=None, varlen_ends=None, key_positions=None, query_valid_rows=None,
                calculate_per_token_loss=False, use_relu=True, non_compressed_lse=None): pass
    @staticmethod
    def apply(*values): return playing("out.topk"), playing("out.loss", lambda x: x.reshape(()))


def fused_csa_indexer_sparse_attn(query, kv_full, attn_sink, window_idxs, q_indexer, k_indexer, weights,
                                  indexer_topk, ratio, softmax_scale, indexer_softmax_scale=1.0, loss_coeff=0.0,
                                  sparse_loss=False, kv_offset=0, calculate_per_token_loss=False, *,
                                  cu_seqlens_q=None, compressed_kv=None):
    if "_indexer_topk_core" in globals(): _indexer_topk_core(q_indexer, k_indexer, weights, indexer_topk, ratio)
    return None, playing("out.loss", lambda x: x.reshape(()))


def _indexer_topk_core(q, k, w, topk, ratio=4, *, cu_seqlens_q=None):
    return playing("out.topk"), None, None


FusedDSAIndexerLoss = Function
DSAIndexerLossAutoScaler = types.SimpleNamespace(main_loss_backward_scale=None)


def unfused_compressed_sparse_attn(query, kv_full, attn_sink, topk_indices, softmax_scale): pass


class CompressedSparseAttention(Module):
    use_fused_kernels, training, ranks, swap = False, True, 1, False

    def __init__(self, play):
        super().__init__()
        facts = play.facts
        self.attn_sink = play("in.sink", leaf=True)
        self.softmax_scale, self.window_size = float(facts["softmax_scale"]), int(facts["window"])
        self.compress_ratio = int(facts["ratio"])
        self.compressor = Result(None)
        self.compressor.forward = lambda x, packed_seq_params=None: self.compressed(packed_seq_params)
        self.indexer = Result(None, index_topk=int(facts["topk"]), softmax_scale=0.25)
        group = types.SimpleNamespace(size=lambda: self.ranks)
        self.pg_collection = types.SimpleNamespace(tp=group, cp=None)

    def compressed(self, packed):
        rows = playing("in.compressed_kv")
        return rows if packed is None else (rows, playing("in.cu_seqlens_compressed"))

    def forward(self, query, key, value, attention_mask, x=None, qr=None, packed_seq_params=None):
        p, thd, scale = playing, packed_seq_params is not None, self.indexer.softmax_scale
        self.compressor(x, packed_seq_params=packed_seq_params)
        coeff, sparse = float(p.facts["loss_coeff"]), p.facts["sparse"] == "true"
        if self.training and self.use_fused_kernels:
            fused_csa_indexer_sparse_attn(query, None, self.attn_sink, None, p("in.q_indexer"),
                                          p("in.k_indexer"), p("in.weights", scale=scale),
                                          self.indexer.index_topk, 4, self.softmax_scale, scale, coeff,
                                          sparse_loss=sparse)
        elif self.training:
            topk, _ = FusedDSAIndexerLoss.apply(
                p("in.q_indexer"), p("in.weights"), p("in.k_indexer"), query, None, self.softmax_scale, 3,
                coeff, None, sparse, self.pg_collection, 1 if thd else None, None, None, None, False, True,
                p("out.non_compressed_lse"))
            if not thd:
                chosen = topk.x[..., ::-1] if self.swap else numpy.roll(topk.x, 1, -1)
                chosen = numpy.where(chosen < self.swap, -1, chosen + query.shape[0])  # swap drops row 0 too
                window = numpy.zeros(topk.shape[:2] + (self.window_size,), "i4")
                both = Tensor(numpy.concatenate([window, chosen], -1))
                unfused_compressed_sparse_attn(query, None, None, both, 1)
        return p("out.output", lambda x: x.reshape((len(x), 1, -1) if thd else x.shape[:2] + (-1,)))


def megatron(path, name, run=1, **attributes):
    global playing
    playing = Play(name)
    layer = CompressedSparseAttention(playing)
    vars(layer).update(attributes)
    packed = None
    if playing.facts["layout"] == "thd":
        packed = types.SimpleNamespace(qkv_format="thd", cu_seqlens_q=playing("in.cu_seqlens_q_real"),
                                       cu_seqlens_q_padded=playing("in.cu_seqlens_q"))

    def go(d):
        for _ in range(run):
            ones = (1,) if packed is None else (1, 1)
            kv = playing("in.kv", lambda x: x.reshape(x.shape[:-1] + ones + x.shape[-1:]))
            layer(playing("in.query"), kv, kv, None, packed_seq_params=packed)
        playing.backward()

    outer = Module()
    outer.attention = layer
    said = watched(csagrad_dump.from_megatron(outer, path), go)
    assert not layer.before and not layer.behind and not layer.compressor.behind
    assert FusedDSAIndexerLoss is Function
    return said


path = folder + "/watched.safetensors"
sizes = ["--batch", "2", "--seq", "56", "--set", "index_topk=5"]
for form in ("sbhd", "bshd", "thd"):
    extra = ["--padded", "--index", "global", "--segments", "30,0,41,7"] if form == "thd" else []
    subprocess.run([program, "dump", *sizes, *extra, "--layout", form, "--out", folder + "/" + form + ".st"],
                   check=True, stdout=subprocess.DEVNULL)
playing = None
for form in ("sbhd", "thd"):
    said = megatron(path, folder + "/" + form + ".st")
    assert not said, said
    facts = same(path, playing)
    assert "no_gradient" not in facts and "not_found" not in facts, facts

# the loss's scale in backward is taken out of the indexer's gradients alone
DSAIndexerLossAutoScaler.main_loss_backward_scale = Tensor([2.0])
megatron(path, folder + "/sbhd.st")
tensors, facts = load(path)
assert facts["indexer_gradients_divided_by"] == "2.0"
assert (tensors["grad.weights"] == playing.tensors["grad.weights"] / 2).all()
assert (tensors["grad.query"] == playing.tensors["grad.query"]).all()
DSAIndexerLossAutoScaler.main_loss_backward_scale = None

# fused kernels: weights come without the scale and leave with it
said = megatron(path, folder + "/sbhd.st", use_fused_kernels=True)
assert not said
same(path, playing, but=("out.non_compressed_lse",))

core = _indexer_topk_core
del _indexer_topk_core
said = megatron(path, folder + "/sbhd.st", use_fused_kernels=True)
assert "topk: a call of FusedDSAIndexerLoss.apply or fused_csa_indexer_sparse_attn in training" in said, said
_indexer_topk_core = core

# attention that follows another list than the loss
megatron(path, folder + "/sbhd.st", swap=True)
tensors, _ = load(path)
assert tensors["out.attn_topk"].shape == tensors["out.topk"].shape and not (tensors["out.attn_topk"] == 0).any()
assert check(path) == 1

# what is not there is named, with what was looked for
said = megatron(path, folder + "/sbhd.st", training=False)
for name in ("q_indexer", "weights", "k_indexer", "loss", "topk"):
    assert name + ": a call of FusedDSAIndexerLoss.apply" in said, said
said = megatron(path, folder + "/sbhd.st", run=2)
assert "ran 2 times" in said and "sink" in load(path)[1]["no_gradient"] and "grad.sink" not in load(path)[0]
refused(lambda: megatron(path, folder + "/sbhd.st", ranks=2), "tp parallel size is 2")
refused(lambda: megatron(path, folder + "/sbhd.st", run=0), "forward was not seen")
refused(lambda: csagrad_dump.from_megatron(Module(), path), "Module has no attn_sink")
both = Module()
both.a, both.b = CompressedSparseAttention(playing), CompressedSparseAttention(playing)
refused(lambda: csagrad_dump.from_megatron(both, path), "give one of them: a, b")


# -- transformers --


class AttentionInterface:
    def get_interface(self, name, default): return default


ALL_ATTENTION_FUNCTIONS = AttentionInterface()


def eager_attention_forward(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **rest):
    return playing("out.output"), None


class DeepseekV4Attention(Module):
    cached, dropout, first, mask = 0, 0.0, 0, None

    def __init__(self, play):
        super().__init__()
        facts = play.facts
        self.sinks, self.scaling = play("in.sink", leaf=True), float(facts["softmax_scale"])
        self.sliding_window = int(facts["window"])
        scorer = Result(None, softmax_scale=0.5, weights_scaling=0.25, weights_proj=Result(None))
        indexer = Result(None, scorer=scorer, index_topk=int(facts["topk"]))
        self.compressor = Result(None, indexer=indexer, compress_rate=int(facts["ratio"]))
        scorer.weights_proj.forward = lambda input: playing("in.weights", scale=0.125)
        scorer.forward, indexer.forward = self.score, self.select
        self.compressor.forward = self.compress

    def score(self, q, compressed_kv, hidden_states):
        self.compressor.indexer.scorer.weights_proj(hidden_states)
        dots = numpy.einsum("bsge,bne->bsgn", q.x.astype("f8"), compressed_kv.x.astype("f8"))
        weights = playing.tensors["in.weights"][..., None]
        return Tensor((numpy.maximum(dots, 0) * weights).sum(2).astype("f4"))

    def select(self, hidden_states, q_residual, position_ids, cache, layer_idx):
        self.compressor.indexer.scorer(playing("in.q_indexer"), playing("in.k_indexer"), hidden_states)
        return playing("out.topk")

    def compress(self, hidden_states, q_residual, position_ids, cache, layer_idx):
        self.compressor.indexer(hidden_states, q_residual, position_ids, cache, layer_idx)
        return Tensor(playing.tensors["in.compressed_kv"][:, None]), None

    def forward(self, hidden_states, position_embeddings, position_ids, attention_mask, cache=None):
        self.compressor(hidden_states, None, position_ids, cache, 0)
        both = [playing.tensors[name] for name in ("in.kv", "in.compressed_kv")]
        slopes = [playing.tensors[name] for name in ("grad.kv", "grad.compressed_kv")]
        old = numpy.zeros((both[0].shape[0], self.cached, both[0].shape[2]))
        key = Tensor(numpy.concatenate([old] + both, 1)[:, None], numpy.concatenate([old] + slopes, 1)[:, None])
        playing.made.append(key)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface("eager", eager_attention_forward)
        return attend(self, playing("in.query", lambda x: x.swapaxes(1, 2)), key, key, attention_mask,
                      dropout=self.dropout, scaling=self.scaling)


def transformers(path, mask=None, backward=True, **attributes):
    global playing
    playing = Play(folder + "/bshd.st")
    layer = DeepseekV4Attention(playing)
    vars(layer).update(attributes)
    batch, rows = playing.tensors["in.kv"].shape[:2]
    positions = Tensor(numpy.arange(rows)[None] + layer.first)

    def go(d):
        layer(None, None, positions, None if mask is None else Tensor(mask(batch, rows)))
        if backward: playing.backward()
        d.answer(loss=playing.tensors["out.loss"])

    watch = csagrad_dump.from_transformers(layer, path, loss_coeff=float(playing.facts["loss_coeff"]),
                                           reduction="mean", sparse=True)
    said = watched(watch, go)
    assert isinstance(ALL_ATTENTION_FUNCTIONS, AttentionInterface) and not layer.compressor.indexer.behind
    return said


def window(batch, rows, real=None, ahead=0):
    """A mask as transformers adds it to the logits; compressed columns behind."""
    s, size = numpy.arange(rows), int(playing.facts["window"])
    see = (s <= s[:, None] + ahead) & (s > s[:, None] - size)
    see = numpy.broadcast_to(see, (batch, 1, rows, rows)).copy()
    if real is not None: see[1, :, :, real] = False
    return numpy.concatenate([numpy.where(see, 0, -3e38), numpy.zeros((batch, 1, rows, 3))], 3).astype("f4")


for mask in (None, window):
    said = transformers(path, mask)
    assert not said, said
    tensors, _ = load(path)
    tensors.pop("out.index_scores")
    csagrad_dump.save(folder + "/unscored.st", tensors, load(path)[1])
    assert check(path) == 0
    facts = same(folder + "/unscored.st", playing, but=("out.non_compressed_lse",))
said = transformers(path, backward=False)
assert "no gradient of" in said and "dout: a gradient" in said and "in.dout" not in load(path)[0]
assert "query: backward never reached it" in load(path)[1]["no_gradient"]
refused(lambda: transformers(path, lambda b, s: window(b, s, range(s - 9, s))), "label -100")
refused(lambda: transformers(path, lambda b, s: window(b, s, range(9))), "attention_mask is not")
refused(lambda: transformers(path, lambda b, s: window(b, s, None, 1)), "attention_mask is not")
refused(lambda: transformers(path, cached=3), "59 window rows for 56 queries")
refused(lambda: transformers(path, dropout=0.1), "attention_dropout is 0.1")
refused(lambda: transformers(path, first=4), "position_ids")
transformers(path, lambda b, s: window(b, s, range(s - 9, s)), backward=False)
assert load(path)[0]["out.query_valid_rows"].sum() == 2 * 56 - 9
refused(lambda: csagrad_dump.from_transformers(Result(None, compressor=None), path), "Result has no sinks")
print("stand-ins of Megatron-LM and transformers: ok")


# ---- the real ones ----


def right(path, said="", but=()):
    """No warning but those of these names, and what csagrad check finds is right."""
    assert not said or but and all(name in said for name in but), said
    result = subprocess.run([program, "check", path], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return load(path)


def real_transformers(torch):
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4
    torch.manual_seed(3)
    kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    config = v4.DeepseekV4Config(
        vocab_size=32, hidden_size=20, num_hidden_layers=3, num_attention_heads=4, head_dim=24, q_lora_rank=14,
        qk_rope_head_dim=8, o_groups=2, o_lora_rank=10, sliding_window=7, index_n_heads=8, index_head_dim=16,
        index_topk=5, moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, layer_types=kinds,
        max_position_embeddings=128, attn_implementation="eager")
    model = v4.DeepseekV4ForCausalLM(config).train()
    with torch.no_grad():
        for p in model.parameters(): p.normal_(1.0 * (p.ndim == 1), 0.3)
    tokens, path, coeff = torch.randint(0, 32, (2, 45)), folder + "/transformers.safetensors", 0.25
    labels, mask, seen = tokens.clone(), torch.ones_like(tokens), {}
    labels[1, 30:], mask[1, 30:] = -100, 0
    layer = model.model.layers[1].self_attn
    index = layer.compressor.indexer
    index.register_forward_hook(lambda _, values, topk: seen.update(topk=topk))
    index.scorer.register_forward_hook(lambda _, values, scores: seen.update(scores=scores))
    layer.register_forward_hook(lambda _, values, result: seen.update(weights=result[1]))

    def indexer_loss():
        """Over the selected rows, summed: the library has none."""
        n = seen["scores"].shape[-1]
        chosen = torch.zeros_like(seen["scores"], dtype=torch.bool)
        chosen = torch.cat([chosen, chosen[..., :1]], -1).scatter(-1, seen["topk"] % (n + 1), True)[..., :n]
        target = seen["weights"][..., -n:].detach().sum(1) * chosen
        target = target / target.sum(-1, keepdim=True).clamp_min(1e-30)
        logits = seen["scores"].masked_fill(~chosen, -1e30).log_softmax(-1)
        return coeff * (target * (target.clamp_min(1e-30).log() - logits)).sum()

    def plain(d): model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()

    def padded(d): model(input_ids=tokens, attention_mask=mask, labels=labels, use_cache=False).loss.backward()

    def with_loss(d):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        mine = indexer_loss()
        (loss + mine).backward()
        d.answer(loss=mine)

    for run in (plain, padded):
        said = watched(csagrad_dump.from_transformers(model, path), run)
        tensors, _ = right(path, said, ("weights", "q_indexer", "k_indexer", "has no indexer loss"))
        assert {"out.index_scores", "out.topk", "in.dout", "grad.kv", "grad.sink"} <= set(tensors)
        assert ("out.query_valid_rows" in tensors) == (run == padded)
    watch = csagrad_dump.from_transformers(model, path, loss_coeff=coeff, reduction="sum", sparse=True)
    tensors, _ = right(path, watched(watch, with_loss))
    assert {"out.loss", "grad.weights", "grad.q_indexer", "grad.k_indexer"} <= set(tensors)

    def padded_left(d): model(input_ids=tokens, attention_mask=mask.flip(1), use_cache=False)

    refused(lambda: watched(csagrad_dump.from_transformers(model, path), padded_left), "attention_mask is not")


def real_megatron(torch):
    """CompressedSparseAttention as it is, with pooling by means in the place of its compressors."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.experimental_attention_variant import csa
    nn, H, D, G, E, hidden, ratio = torch.nn, 4, 16, 8, 8, 20, 4
    csa.DSAIndexerLossLoggingHelper.save_loss_to_tracker = staticmethod(lambda **_: None)
    csa.use_fused_dsa_kernels = lambda config: False
    group = types.SimpleNamespace(size=lambda: 1)
    groups = types.SimpleNamespace(tp=group, cp=group)

    class Compressor(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.project = nn.Linear(hidden, size)
        def forward(self, x, packed_seq_params=None):
            cu = [0, len(x)] if packed_seq_params is None else packed_seq_params.cu_seqlens_q_padded.tolist()
            pieces = [x[a:b - (b - a) % ratio] for a, b in zip(cu, cu[1:])]
            rows = self.project(torch.cat([p.unflatten(0, (-1, ratio)).mean(1) for p in pieces]))
            offsets = numpy.cumsum([0] + [len(p) // ratio for p in pieces])
            return rows if packed_seq_params is None else (rows, torch.tensor(offsets, dtype=torch.int32))

    class Indexer(nn.Module):
        def __init__(self):
            super().__init__()
            self.pg_collection, self.index_topk, self.softmax_scale = groups, 3, E ** -0.5
            self.compressor, self.q, self.w = Compressor(E), nn.Linear(hidden, G * E), nn.Linear(hidden, G)
        def forward_before_topk(self, x, qr, packed_seq_params=None):
            k = self.compressor(x, packed_seq_params)
            k, offsets = k if packed_seq_params is not None else (k, None)
            q, w = self.q(qr).unflatten(-1, (G, E)), self.w(x) * G ** -0.5
            return (q, k, w) if packed_seq_params is None else (q, k, w, offsets)

    runs = (0, False, True, None), (1, True, False, None), (2, False, True, (13, 11, 2))
    for seed, per_token, sparse, lengths in runs:
        torch.manual_seed(seed)
        config = types.SimpleNamespace(
            csa_window_size=5, v_head_dim=D, num_attention_heads=H, csa_dense_mode=False, num_layers=1,
            mtp_num_layers=0, dsa_indexer_loss_coeff=0.5, dsa_indexer_use_sparse_loss=sparse,
            calculate_per_token_loss=per_token)
        parts = csa.CompressedSparseAttentionSubmodules()
        layer = csa.CompressedSparseAttention(config, parts, 1, None, "self", pg_collection=groups,
                                              compress_ratio=ratio).train()
        layer.compressor, layer.indexer = Compressor(D), Indexer()
        nn.init.normal_(layer.attn_sink)
        packed, rows, batch = None, 33, 2
        if lengths:  # each in 16 rows
            real, physical = numpy.cumsum((0,) + lengths), 16 * numpy.arange(len(lengths) + 1)
            real, physical = (torch.tensor(x, dtype=torch.int32) for x in (real, physical))
            packed = PackedSeqParams(qkv_format="thd", cu_seqlens_q=real, cu_seqlens_kv=real,
                                     cu_seqlens_q_padded=physical, cu_seqlens_kv_padded=physical,
                                     max_seqlen_q=16, max_seqlen_kv=16)
            rows, batch = 16 * len(lengths), 1

        def run(d):
            query, key = (torch.randn(rows, batch, heads, D, requires_grad=True) for heads in (H, 1))
            x = torch.randn(rows, batch, hidden)
            query = query.squeeze(1) if packed else query
            output = layer(query, key, key, None, x=x, qr=x, packed_seq_params=packed)
            slope = torch.randn_like(output)
            for s, length in enumerate(lengths or ()):
                slope[16 * s + length:16 * s + 16] = 0
            (output * slope).sum().backward()

        path = folder + "/megatron.safetensors"
        csa.DSAIndexerLossAutoScaler.set_loss_scale(torch.tensor(4.0))
        tensors, facts = right(path, watched(csagrad_dump.from_megatron(layer, path), run))
        assert facts["indexer_gradients_divided_by"] == "4.0"
        assert facts["index"] == ("global" if lengths else "local")
        assert facts["reduction"] == ("sum" if per_token else "mean") and facts["sparse"] == str(sparse)
        assert {"grad." + name for name in csagrad_dump.GRADIENTS} | {"out.loss", "out.topk"} <= set(tensors)


for name, test in (("transformers.models.deepseek_v4", real_transformers), ("megatron.core", real_megatron)):
    try:
        import torch
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)
    except ImportError as error:
        print("not run: the real layer of %s (%s)" % (name.split(".")[0], error))
    else:
        test(torch)
        print("the real layer of %s: ok" % name.split(".")[0])
