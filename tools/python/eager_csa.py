"""CSA attention, the Lightning-Indexer loss and the toy model in eager PyTorch: what csagrad is timed against.

Written as a framework's unfused path computes them: matrix products, masks, topk, softmax, with autograd for the rest.
Nothing here is compiled and nothing is a kernel of its own. Formulas as in csagrad (ops/csa/csa_attention.c,
models/dsv4/objective.c, models/dsv4/dsv4.c); B sequences of S tokens without padding, so that causality is a rule and not a list.

Forms of the indexer (SCORE_FORMS), which differ in what they keep for backward:
    autograd     all per-head scores [B, S, Hi, C], kept by autograd
    recompute    an autograd.Function that computes them again in backward
    blocks       the same over blocks of rows, with the compressed rows that a block sees and no others: what a careful
                 author gets out of PyTorch without writing a kernel

Forms of the attention (ATTENTION_FORMS), which differ in where the keys come from:
    dense        all keys, masks for window and selection
    band         window keys by blocks of the window's length, all compressed keys, a mask
    band+gather  the same window keys, the chosen compressed keys copied for each row
    gather       the keys of both copied for each row
    blocks       an autograd.Function over blocks of rows, which keeps no probability: the block's stretch of window keys
                 and the compressed rows that it sees

Letters: K places of a selection, n keys, others as in csagrad (T = B * S). A selection is [B, S, K] with -1 for none.
"""

import math

import torch
import torch.nn.functional as F

RATIO = 4
SCORE_FORMS = ("blocks", "autograd", "recompute")
ATTENTION_FORMS = ("blocks", "band", "dense", "band+gather", "gather")
# Rows and heads together that a block has at least, and rows: the fastest of powers of two on an EPYC with 1 MiB of
# second-level cache per core, over heads 8 and 64, rows 256 to 4096.
SCORE_BLOCK, ATTENTION_BLOCK = (1024, 64), (512, 16)
NOT_SEEN = -1e30  # a score that softmax turns into 0, and still 0 when a teacher of 0 is multiplied with its logarithm


# ---- the indexer ----


def head_scores(q, k):
    """relu(q . k): [B, S, Hi, Di], [B, C, Di] -> [B, S, Hi, C]."""
    B, S, H, D = q.shape
    return (q.reshape(B, S * H, D) @ k.transpose(1, 2)).relu_().view(B, S, H, -1)


def weighted(heads, w):
    return (w.unsqueeze(2) @ heads).squeeze(2)


def choose(scores, first, places):
    """The `places` largest of what rows from number `first` on see: [B, S, C] -> [B, S, places]."""
    sees = (torch.arange(first, first + scores.shape[1]) + 1) // RATIO
    hidden = torch.arange(scores.shape[2]) >= sees[:, None]
    n = min(places, scores.shape[2])
    best, index = scores.masked_fill(hidden, -math.inf).topk(n)
    return F.pad(index.masked_fill_(best == -math.inf, -1), (0, places - n), value=-1)


class ScoresAgain(torch.autograd.Function):
    """Chosen scores [B, S, K] and the choice; per-head scores live for one block of rows at a time, in both passes."""

    @staticmethod
    def forward(ctx, q, w, k, given, places, block):
        B, S, _, _ = q.shape
        chosen, index = q.new_zeros(B, S, places), torch.full((B, S, places), -1) if given is None else given
        for a in range(0, S, block):
            rows, n = slice(a, min(a + block, S)), seen_by(min(a + block, S), block, S, k)
            if n == 0:
                continue
            scores = weighted(head_scores(q[:, rows], k[:, :n]), w[:, rows])
            if given is None:
                index[:, rows] = choose(scores, a, places)
            chosen[:, rows] = scores.gather(-1, index[:, rows].clamp(min=0))
        ctx.save_for_backward(q, w, k, index)
        ctx.mark_non_differentiable(index)
        ctx.block = block
        return chosen, index

    @staticmethod
    def backward(ctx, dchosen, _):
        q, w, k, index = ctx.saved_tensors
        B, S, H, D = q.shape
        dq, dw, dk = torch.zeros_like(q), torch.zeros_like(w), torch.zeros_like(k)
        for a in range(0, S, ctx.block):
            rows, n = slice(a, min(a + ctx.block, S)), seen_by(min(a + ctx.block, S), ctx.block, S, k)
            if n == 0:
                continue
            heads, keys = head_scores(q[:, rows], k[:, :n]), k[:, :n]
            dscores = heads.new_zeros(B, heads.shape[1], n)
            dscores.scatter_add_(-1, index[:, rows].clamp(min=0), dchosen[:, rows])  # 0 where nothing was chosen
            dw[:, rows] = (heads @ dscores.unsqueeze(-1)).squeeze(-1)
            # w is one factor per row and head, so it stays out of the products over keys
            dheads = heads.gt_(0).mul_(dscores.unsqueeze(2)).view(B, -1, n)
            dq[:, rows] = (dheads @ keys).view(B, -1, H, D) * w[:, rows].unsqueeze(-1)
            dk[:, :n] += dheads.transpose(1, 2) @ (q[:, rows] * w[:, rows].unsqueeze(-1)).view(B, -1, D)
        return dq, dw, dk, None, None, None


def seen_by(end, block, S, k):
    """Compressed rows that a block of rows needs which ends before `end`; all of them for a block of everything."""
    return min(end // RATIO, k.shape[1]) if block < S else k.shape[1]


def block_rows(block, q, least):
    return block or max(least[0] // q.shape[2], least[1])


def index_rows(q, w, k, places, form, block, given=None):
    """Chosen scores [B, S, K] and the selection [B, S, K], K = min(places, C). A selection may be given. block: rows of a
    block in that form; 0: as many as are fast."""
    places = min(places, k.shape[1])
    given = None if given is None else given[..., :places]
    if form != "autograd":
        block = block_rows(block, q, SCORE_BLOCK) if form == "blocks" else q.shape[1]
        return ScoresAgain.apply(q, w, k, given, places, block)
    scores = weighted(head_scores(q, k), w)
    with torch.no_grad():
        index = choose(scores, 0, places) if given is None else given
    return scores.gather(-1, index.clamp(min=0)), index


def indexer_loss(chosen, index, teacher):
    """KL(teacher || softmax of the chosen scores), summed over rows."""
    log_p = chosen.masked_fill(index < 0, NOT_SEEN).log_softmax(-1)
    return F.kl_div(log_p, teacher[..., : index.shape[-1]], reduction="sum")


# ---- attention ----


def in_window(rows, keys, window):
    """Which of the kv rows a row's window holds: positions [..., R], [..., n] -> [..., R, n]."""
    back = rows.unsqueeze(-1) - keys.unsqueeze(-2)
    return (back >= 0) & (back < window) & (keys.unsqueeze(-2) >= 0)


def selected(index, n):
    """[B, R, K] -> which of n compressed rows are chosen, [B, R, n]."""
    marks = torch.zeros(*index.shape[:2], n + 1, dtype=torch.bool)
    return marks.scatter_(-1, index.masked_fill(index < 0, n).clamp_(max=n), True)[..., :n]


def bias(*allowed):
    """Masks side by side, and the sink's column behind them, as what is added to logits: 0 or -inf."""
    allowed = torch.cat([*allowed, torch.ones_like(allowed[0][..., :1])], -1)
    return torch.zeros(allowed.shape).masked_fill_(~allowed, -math.inf)


def with_sink(keys):
    """A key of zeros behind the others: its logit is replaced by the sink, its value adds nothing."""
    return F.pad(keys, (0, 0, 0, 1))


def probabilities(logits, mask, sink):
    """logits [..., H, n + 1], whose last column is the sink's: one softmax."""
    logits = logits + mask
    logits[..., -1] = sink
    return logits.softmax(-1)


def normalized(shares, index):
    """Probabilities of the chosen rows, summed over heads [B, S, K], to the teacher: a constant."""
    shares = shares.masked_fill(index < 0, 0)
    return shares / shares.sum(-1, keepdim=True).clamp(min=torch.finfo(shares.dtype).tiny)


def dense(q, kv, ckv, sink, index, window):
    B, S, H, D = q.shape
    keys = with_sink(torch.cat([kv, ckv], 1))
    at = torch.arange(S)
    mask = bias(in_window(at, at, window).expand(B, S, S), selected(index, ckv.shape[1])).unsqueeze(2)
    logits = (q.reshape(B, S * H, D) @ keys.transpose(1, 2)).view(B, S, H, -1)
    p = probabilities(logits, mask, sink)
    out = (p.view(B, S * H, -1) @ keys).view(B, S, H, D)
    return out, lambda: p[..., S:-1].detach().sum(2).gather(-1, index.clamp(min=0))


def blocks_of_window(q, kv, window):
    """Rows in blocks of the window's length W and, for each, the kv rows of its own block and the one before:
    [B, N, W, H, D], [B, N, 2W, D], and which of these keys a row sees [N, W, 2W]."""
    B, S, H, D = q.shape
    W = min(window, S)
    N = (S + W - 1) // W
    rows = F.pad(q, (0, 0, 0, 0, 0, N * W - S)).view(B, N, W, H, D)
    kv = F.pad(kv, (0, 0, W, N * W - S))
    keys = torch.cat([kv[:, :-W].view(B, N, W, D), kv[:, W:].view(B, N, W, D)], 2)
    at = torch.arange(N * W).view(N, W)
    return rows, keys, in_window(at, torch.cat([at - W, at], 1), window)


def band(q, kv, ckv, sink, index, window):
    B, S, H, D = q.shape
    rows, keys, sees = blocks_of_window(q, kv, window)
    N, W, C = rows.shape[1], rows.shape[2], ckv.shape[1]
    keys = with_sink(torch.cat([keys, ckv.unsqueeze(1).expand(B, N, C, D)], 2))
    chosen = F.pad(selected(index, C), (0, 0, 0, N * W - S)).view(B, N, W, C)
    mask = bias(sees.expand(B, N, W, 2 * W), chosen).unsqueeze(3)
    logits = (rows.view(B, N, W * H, D) @ keys.transpose(2, 3)).view(B, N, W, H, -1)
    p = probabilities(logits, mask, sink)
    out = (p.view(B, N, W * H, -1) @ keys).view(B, N * W, H, D)[:, :S]
    return out, lambda: p[..., 2 * W : -1].detach().sum(3).view(B, N * W, C)[:, :S].gather(-1, index.clamp(min=0))


def copied(keys, index):
    """Rows of keys [B, N, D] at index [B, S, n] -> [B, S, n, D]."""
    B, N, D = keys.shape
    return F.embedding(index + torch.arange(B).view(B, 1, 1) * N, keys.reshape(B * N, D))


def band_gather(q, kv, ckv, sink, index, window):
    B, S, H, D = q.shape
    rows, keys, sees = blocks_of_window(q, kv, window)
    N, W = rows.shape[1], rows.shape[2]
    chosen = with_sink(copied(with_sink(ckv), index.masked_fill(index < 0, ckv.shape[1])))
    near = (rows.view(B, N, W * H, D) @ keys.transpose(2, 3)).view(B, N * W, H, -1)[:, :S]
    logits = torch.cat([near, q @ chosen.transpose(2, 3)], -1)
    mask = bias(sees.view(N * W, 2 * W)[:S].expand(B, S, 2 * W), index >= 0).unsqueeze(2)
    p = probabilities(logits, mask, sink)
    near = F.pad(p[..., : 2 * W], (0, 0, 0, 0, 0, N * W - S)).view(B, N, W * H, 2 * W)
    out = (near @ keys).view(B, N * W, H, D)[:, :S] + p[..., 2 * W :] @ chosen
    return out, lambda: p[..., 2 * W : -1].detach().sum(2)


def gather(q, kv, ckv, sink, index, window):
    B, S, H, D = q.shape
    W = min(window, S)
    near = torch.arange(S).unsqueeze(1) - torch.arange(W - 1, -1, -1)
    mask = bias((near >= 0).expand(B, S, W), index >= 0).unsqueeze(2)
    places = torch.cat([near.expand(B, S, W), torch.where(index < 0, -1, index + S)], -1)
    keys = with_sink(torch.cat([kv, ckv], 1))
    keys = with_sink(copied(keys, places.masked_fill(places < 0, keys.shape[1] - 1)))
    p = probabilities(q @ keys.transpose(2, 3), mask, sink)
    return p @ keys, lambda: p[..., W:-1].detach().sum(2)


class AttentionAgain(torch.autograd.Function):
    """Attention and the shares of its chosen rows; probabilities live for one block of rows at a time, in both passes."""

    @staticmethod
    def block_of(q, kv, ckv, sink, index, window, a, end):
        """Of the rows from a to end: their keys [B, n + 1, D], probabilities [B, R, H, n + 1], window keys among the n."""
        B, _, H, D = q.shape
        first, n = max(a - window + 1, 0), min(int(index[:, a:end].max()) + 1, ckv.shape[1]) if index.numel() else 0
        keys = with_sink(torch.cat([kv[:, first:end], ckv[:, :n]], 1))
        near = in_window(torch.arange(a, end), torch.arange(first, end), window).expand(B, -1, -1)
        logits = (q[:, a:end].reshape(B, -1, D) @ keys.transpose(1, 2)).view(B, end - a, H, -1)
        logits += bias(near, selected(index[:, a:end], n)).unsqueeze(2)
        logits[..., -1] = sink
        return keys, logits.softmax(-1), first, n

    @staticmethod
    def forward(ctx, q, kv, ckv, sink, index, window, block):
        B, S, H, D = q.shape
        out, shares = torch.empty_like(q), q.new_zeros(index.shape)
        for a in range(0, S, block):
            end = min(a + block, S)
            keys, p, first, n = AttentionAgain.block_of(q, kv, ckv, sink, index, window, a, end)
            out[:, a:end] = (p.view(B, -1, keys.shape[1]) @ keys).view(B, -1, H, D)
            if n:
                shares[:, a:end] = p[..., end - first : -1].sum(2).gather(-1, index[:, a:end].clamp(min=0))
        ctx.save_for_backward(q, kv, ckv, sink, index)
        ctx.mark_non_differentiable(shares)
        ctx.window, ctx.block = window, block
        return out, shares

    @staticmethod
    def backward(ctx, dout, _):
        q, kv, ckv, sink, index = ctx.saved_tensors
        B, S, H, D = q.shape
        dq, dkv, dckv, dsink = torch.empty_like(q), torch.zeros_like(kv), torch.zeros_like(ckv), torch.zeros_like(sink)
        for a in range(0, S, ctx.block):
            end = min(a + ctx.block, S)
            keys, p, first, n = AttentionAgain.block_of(q, kv, ckv, sink, index, ctx.window, a, end)
            rows, drows = q[:, a:end].reshape(B, -1, D), dout[:, a:end].reshape(B, -1, D)
            dp = (drows @ keys.transpose(1, 2)).view_as(p)
            dlogits = torch._softmax_backward_data(dp, p, -1, p.dtype)  # what autograd calls
            dsink += dlogits[..., -1].sum((0, 1))
            p, dlogits = p.view(B, -1, keys.shape[1]), dlogits.view(B, -1, keys.shape[1])
            dq[:, a:end] = (dlogits @ keys).view(B, -1, H, D)
            dkeys = dlogits.transpose(1, 2) @ rows
            dkeys.baddbmm_(p.transpose(1, 2), drows)
            dkv[:, first:end] += dkeys[:, : end - first]
            dckv[:, :n] += dkeys[:, end - first : -1]
        return dq, dkv, dckv, dsink, None, None, None


PLAIN = {"dense": dense, "band": band, "band+gather": band_gather, "gather": gather}


def attention(q, kv, ckv, sink, index, window, form, block, wants_teacher):
    """One softmax over window, chosen rows and sink: q [B, S, H, D], kv [B, S, D], ckv [B, C, D], sink [H],
    index [B, S, K] -> out [B, S, H, D], teacher [B, S, K] (None unless wanted)."""
    q = q * q.shape[-1] ** -0.5
    if form == "blocks":
        out, shares = AttentionAgain.apply(q, kv, ckv, sink, index, window, block_rows(block, q, ATTENTION_BLOCK))
        return out, normalized(shares, index) if wants_teacher else None
    out, shares = PLAIN[form](q, kv, ckv, sink, index, window)
    with torch.no_grad():
        return out, normalized(shares(), index) if wants_teacher else None


# ---- the model ----


def frequencies(config, ratio):
    """f_i of the rotary pairs; YaRN in layers with compressed rows."""
    n, base = config["qk_rope_head_dim"], config["compress_rope_theta"] if ratio else config["rope_theta"]
    f = base ** (-torch.arange(0, n, 2, dtype=torch.float64) / n)
    factor, length = config["rope_scaling_factor"], config["rope_scaling_original_max_position_embeddings"]
    if not ratio or factor <= 1:
        return f
    at = lambda turns: n * math.log(length / (2 * math.pi * turns)) / (2 * math.log(base))
    low = max(math.floor(at(config["rope_scaling_beta_fast"])), 0)
    high = min(math.ceil(at(config["rope_scaling_beta_slow"])), n - 1)
    ramp = ((torch.arange(n // 2) - low) / ((high - low) or 0.001)).clamp(0, 1).double()
    return f * (1 - ramp) + f / factor * ramp


def rotate(x, turns):
    """The last channels of x [B, S, D] or [B, S, H, D], pairs of neighbours, by turns [S, pairs] (complex)."""
    n = 2 * turns.shape[-1]
    tail = torch.view_as_complex(x[..., -n:].unflatten(-1, (-1, 2))) * (turns.unsqueeze(1) if x.dim() == 4 else turns)
    return torch.cat([x[..., :-n], torch.view_as_real(tail).flatten(-2)], -1)


def hadamard(n, dtype):
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < n:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return (h / n**0.5).to(dtype)


class Model:
    """The toy model over parameters under their checkpoint names (name -> tensor)."""

    def __init__(self, config, parameters, seq_len, form, block):
        self.config, self.p, self.form, self.block = config, parameters, form, block
        dtype = parameters["embed.weight"].dtype
        to_complex = torch.complex128 if dtype == torch.float64 else torch.complex64
        at = torch.arange(seq_len, dtype=torch.float64)
        self.turns, self.entry_turns, self.all_visible = {}, {}, {}
        for ratio in set(config["compress_ratios"]):
            angle = at[:, None] * frequencies(config, ratio)
            self.turns[ratio] = torch.polar(torch.ones_like(angle), angle).to(to_complex)
            C = seq_len // ratio if ratio else 0
            if ratio:
                self.entry_turns[ratio] = self.turns[ratio][: C * ratio : ratio].contiguous()
            list_all = torch.arange(C).expand(seq_len, C)
            self.all_visible[ratio] = list_all.masked_fill(
                list_all >= ((torch.arange(seq_len) + 1) // max(ratio, 1))[:, None], -1
            )
        self.seen = None  # a dict gets queries, head weights and keys of the indexers by layer
        self.hadamard = hadamard(config["index_head_dim"], dtype) if config["index_hadamard"] else None

    def norm(self, x, name=None):
        weight = self.p[name] if name else None
        return F.rms_norm(x, x.shape[-1:], weight, self.config["rms_norm_eps"])

    def compress(self, x, at, ratio, width):
        """Gated pooling of groups of `ratio` rows; at ratio 4 the group before adds its first half of the columns."""
        B, S, _ = x.shape
        C = S // ratio
        split = lambda y: y[:, : C * ratio].view(B, C, ratio, -1)
        content = split(F.linear(x, self.p[at + "wkv.weight"]))
        gate = split(F.linear(x, self.p[at + "wgate.weight"])) + self.p[at + "ape"]
        if ratio == RATIO:
            before = lambda y, first: torch.cat(
                [y.new_full((B, min(C, 1), ratio, width), first), y[:, :-1, :, :width]], 1
            )
            content = torch.cat([before(content, 0), content[..., width:]], 2)
            gate = torch.cat([before(gate, -math.inf), gate[..., width:]], 2)
        pooled = (gate.softmax(2) * content).sum(2)
        return rotate(self.norm(pooled, at + "norm.weight"), self.entry_turns[ratio])

    def index(self, x, latent, at, given):
        c, (B, S, _) = self.config, x.shape
        heads, width = c["index_n_heads"], c["index_head_dim"]
        x, latent = x.detach(), latent.detach()
        q = rotate(F.linear(latent, self.p[at + "wq_b.weight"]).view(B, S, heads, width), self.turns[RATIO])
        k = self.compress(x, at + "compressor.", RATIO, width)
        if self.hadamard is not None:
            q, k = q @ self.hadamard, k @ self.hadamard
        w = F.linear(x, self.p[at + "weights_proj.weight"]) * (heads * width) ** -0.5
        if self.seen is not None:
            self.seen[int(at.split(".")[1])] = q, w, k
        form = "blocks" if self.form == "blocks" else "autograd"
        return index_rows(q, w, k, c["index_topk"], form, self.block, given)

    def attend(self, x, at, ratio, given):
        """Attention half of a layer, its indexer loss summed over rows (None without) and its selection."""
        c, p, (B, S, _) = self.config, self.p, x.shape
        heads, width, groups = c["num_attention_heads"], c["head_dim"], c["o_groups"]
        turns = self.turns[ratio]
        latent = self.norm(F.linear(x, p[at + "wq_a.weight"]), at + "q_norm.weight")
        q = rotate(self.norm(F.linear(latent, p[at + "wq_b.weight"]).view(B, S, heads, width)), turns)
        kv = rotate(self.norm(F.linear(x, p[at + "wkv.weight"]), at + "kv_norm.weight"), turns)
        chosen = None
        if ratio:
            ckv = self.compress(x, at + "compressor.", ratio, width)
        else:
            ckv = x.new_zeros(B, 0, width)
        if ratio == RATIO:
            chosen, index = self.index(x, latent, at + "indexer.", given)
        else:
            index = self.all_visible[ratio].expand(B, S, -1)
        wants_loss = chosen is not None and c["indexer_loss_coeff"] != 0
        out, teacher = attention(
            q, kv, ckv, p[at + "attn_sink"], index, c["sliding_window"], self.form, self.block, wants_loss
        )
        loss = indexer_loss(chosen, index, teacher) * c["indexer_loss_coeff"] if wants_loss else None
        out = rotate(out, turns.conj().resolve_conj()).view(B, S, groups, -1)
        out = torch.einsum("bsgi,gri->bsgr", out, p[at + "wo_a.weight"].view(groups, c["o_lora_rank"], -1))
        return F.linear(out.flatten(2), p[at + "wo_b.weight"]), loss, index if chosen is not None else None

    def feed(self, x, at):
        limit = self.config["swiglu_limit"]
        gate, up = F.linear(x, self.p[at + "w1.weight"]), F.linear(x, self.p[at + "w3.weight"])
        if limit > 0:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return F.linear(F.silu(gate) * up, self.p[at + "w2.weight"])

    def __call__(self, tokens, targets, lm_scale, row_scale, given):
        """Losses of language model and indexers, and the selections by layer. given: selections by layer, or empty."""
        x, row_losses, selections = F.embedding(tokens, self.p["embed.weight"]), [], {}
        for i, ratio in enumerate(self.config["compress_ratios"]):
            at = f"layers.{i}."
            attended, loss, index = self.attend(
                self.norm(x, at + "attn_norm.weight"), at + "attn.", ratio, given.get(i)
            )
            x = x + attended
            x = x + self.feed(self.norm(x, at + "ffn_norm.weight"), at + "ffn.")
            if loss is not None:
                row_losses.append(loss)
            if index is not None:
                selections[i] = index
        logits = F.linear(self.norm(x, "norm.weight"), self.p["head.weight"])
        lm_loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="sum") * lm_scale
        return lm_loss, sum(row_losses) * row_scale if row_losses else None, selections


def adamw(config, parameters, lr):
    """Matrices decay; norms, sinks, position biases and the embedding do not."""
    decays = lambda name: parameters[name].dim() == 2 and not name.endswith("ape") and name != "embed.weight"
    groups = [
        {
            "params": [p for name, p in parameters.items() if decays(name) == yes],
            "weight_decay": config["weight_decay"] if yes else 0.0,
        }
        for yes in (True, False)
    ]
    return torch.optim.AdamW(
        groups, lr=lr, betas=(config["beta1"], config["beta2"]), eps=config["adam_eps"], fused=True
    )
