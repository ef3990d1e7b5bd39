"""Save what your CSA layer and its indexer loss computed, for `csagrad check`. Needs numpy and nothing else.

One call before the loss with the inputs, one after it with the answers; whatever you do not have, leave out:

    from csagrad_dump import Dump
    d = Dump("mine.safetensors", layout="sbhd", ratio=4, window=128, topk=512, softmax_scale=512 ** -0.5,
             loss_coeff=0.01, sparse=True, reduction="mean")
    d.before(q_indexer=q_i, weights=w, k_indexer=k_i, query=q, kv=kv, compressed_kv=ckv, sink=sink)
    loss = ...                                     # your code
    loss.backward()
    d.after(loss=loss, topk=indices, target=target)     # gradients are found in the tensors of before()

    csagrad check mine.safetensors

Layers of two frameworks are found out by themselves, see megatron.md and transformers.md beside this file:

    with csagrad_dump.from_megatron(layer, "mine.safetensors"):       # or from_transformers
        ...                                                           # forward, loss, backward

Arrays may be numpy's or PyTorch's (bf16 and devices included). Letters: S positions, B sequences, T packed
rows, n compressed rows, H D attention heads and size, G E indexer heads and size, K chosen. Shapes by layout:

    name                       sbhd       thd (packed)    bshd is sbhd with B first
    q_indexer                  S B G E    T G E
    weights                    S B G      T G             all scales in them: score = sum over G of w relu(q.k)
    k_indexer                  n B E      n E
    query, dout, output        S B H D    T H D           dout: gradient of output; H D may be one size
    kv, compressed_kv          S B D, n B D    T D, n D   before attention, rotated; key and value at once
    sink                       H          H               logits, no scale on them
    topk                       B S K      T K             the loss's and the indexer's list; -1: none
    attn_topk                  B S K      T K             attention's own list, where it is another one
    index_scores               B S n      T n
    target, log_predict, predict    B S n      T n        or B S K: one for each entry of topk
    kl                         B S        T               of each row, without coefficient
    lse, non_compressed_lse    B H S      H T             all keys and sink; window and sink
    query_valid_rows           B S        T               1: real, 0: padding, which stands behind the real rows
    cu_seqlens_q               thd: B+1 offsets at which segments physically start, 0 first, padding counted
    cu_seqlens_q_real          thd: running sums of real lengths, where there is padding: one entry for one
    cu_seqlens_compressed      thd: offsets in the compressed rows, (physical length) // ratio for each segment

Settings, each optional but ratio: layout; ratio, tokens of a compressed row; window, tokens, the query's own
included; topk, as asked for; softmax_scale, what query.kv is multiplied by; loss_coeff, what the loss is
multiplied by; sparse, True: target and prediction are over the selected keys, False: over all visible ones;
reduction, "mean": the sum over rows is divided by the number of real rows, "sum": it is not; index, "local":
lists count from the segment's (the sequence's) first compressed row, "global": from the array's. Any other name
is kept as a remark.

A tensor of before() that gets no gradient is said in a warning, and with the reason in the file's setting
no_gradient.

>>> import numpy, os, tempfile
>>> path = os.path.join(tempfile.mkdtemp(), "tiny.safetensors")
>>> d = Dump(path, layout="thd", ratio=4, window=2, topk=1)
>>> d.before(sink=numpy.zeros(2, "f4"), weights=numpy.ones((8, 1)), cu_seqlens_q=numpy.array([0, 8]))
>>> d.after(loss=0.25, grads={"weights": numpy.zeros((8, 1))})
>>> tensors, facts = load(path)
>>> sorted(tensors)
['grad.weights', 'in.cu_seqlens_q', 'in.sink', 'in.weights', 'out.loss']
>>> float(tensors["out.loss"][0]), facts["ratio"]
(0.25, '4')
>>> d.before(wieghts=numpy.ones((8, 1)))
Traceback (most recent call last):
    ...
ValueError: unknown tensor "wieghts", did you mean "weights"? Known: q_indexer weights k_indexer query kv compressed_kv sink dout cu_seqlens_q cu_seqlens_q_real cu_seqlens_compressed
>>> Dump(path, reduction="foo")
Traceback (most recent call last):
    ...
ValueError: reduction must be one of mean, sum; got 'foo'
"""
import difflib
import inspect
import json
import os
import struct
import sys
import warnings

import numpy

INPUTS = ("q_indexer weights k_indexer query kv compressed_kv sink dout "
          "cu_seqlens_q cu_seqlens_q_real cu_seqlens_compressed").split()
ANSWERS = ("loss topk attn_topk target log_predict predict kl index_scores output lse non_compressed_lse "
           "query_valid_rows").split()
GRADIENTS = "q_indexer weights k_indexer query kv compressed_kv sink".split()

# settings whose words are known; text is what load() gives back
_WORDS = {
    "layout": ("sbhd", "bshd", "thd"),
    "index": ("local", "global"),
    "reduction": ("mean", "sum"),
    "sparse": ("True", "False", "true", "false"),
}

# safetensors name -> numpy dtype; BF16 is kept as its bits
_DTYPES = {"F64": "<f8", "I64": "<i8", "F32": "<f4", "I32": "<i4", "F16": "<f2", "BF16": "<u2", "U8": "|u1"}


def _stored(x):
    """(dtype name, array) of an array, a tensor or a number."""
    if hasattr(x, "detach"):  # PyTorch
        x = x.detach().cpu()
        if "bfloat16" in str(x.dtype):
            return _bf16(x.float().numpy())
        x = x.float().numpy() if "float8" in str(x.dtype) else x.numpy()
    x = numpy.array(x)  # a copy: the caller may change his own in place
    if x.dtype.name == "bfloat16":
        return _bf16(x.astype("<f4"))
    x = x.astype(x.dtype.newbyteorder("="))
    if x.dtype == bool:
        x = x.astype("<i4")
    if x.dtype.kind == "u" and x.dtype.itemsize > 1:
        x = x.astype("<i8")
    if x.dtype.kind == "i" and x.dtype.itemsize < 4:
        x = x.astype("<i4")
    for name, dtype in _DTYPES.items():
        if name != "BF16" and x.dtype == numpy.dtype(dtype):
            return name, numpy.ascontiguousarray(x.astype(dtype)).reshape(x.shape)
    raise ValueError("dtype %s cannot be stored" % x.dtype)


def _bf16(x):
    """float32 values that are bf16 values: the upper half of their bits."""
    return "BF16", (numpy.ascontiguousarray(x, "<f4").reshape(x.shape).view("<u4") >> 16).astype("<u2")


def _scaled(stored, factor, wide=False):
    """(dtype name, array) times a number, in the same dtype; wide: in float32 at least."""
    dtype, x = stored
    if factor == 1:
        return stored
    if dtype == "F64":
        return dtype, x * factor
    x = (x.astype("<u4") << 16).view("<f4") if dtype == "BF16" else x.astype("<f4")
    x = x * numpy.float32(factor)
    if wide or dtype == "F32":
        return "F32", x
    if dtype == "F16":
        return dtype, x.astype("<f2")
    bits = x.view("<u4").astype("<u8")  # to the nearest, ties to even; a NaN keeps a bit of its fraction
    bits = numpy.where(numpy.isnan(x), bits | 1 << 22, bits + 0x7FFF + (bits >> 16 & 1))
    return dtype, (bits >> 16).astype("<u2")


def _known(name, names):
    if name in names:
        return
    near = difflib.get_close_matches(name, names, 1)
    raise ValueError('unknown tensor "%s"%s Known: %s' %
                     (name, ', did you mean "%s"?' % near[0] if near else ".", " ".join(names)))


def _words(name, given):
    if given is not None and name in _WORDS and str(given) not in _WORDS[name]:
        words = ("True", "False") if name == "sparse" else _WORDS[name]
        raise ValueError("%s must be one of %s; got %r" % (name, ", ".join(words), given))


def _same(x):
    return x


class _Source:
    """An input tensor, and the gradient that reaches it from now on. What is stored is view(it) * scale."""

    def __init__(self, x, view, scale):
        self.x, self.view, self.scale, self.sum, self.hook = x, view, scale, None, None
        if x.requires_grad and not x.is_leaf:
            x.retain_grad()
        elif x.requires_grad and hasattr(x, "register_hook"):
            # a leaf's .grad may hold sums of earlier steps, or be taken away by a trainer that keeps its own
            self.hook = x.register_hook(self.add)

    def add(self, gradient):
        gradient = gradient.detach()
        self.sum = gradient.clone() if self.sum is None else self.sum + gradient

    def gradient(self):
        return self.sum if self.hook else self.x.grad if self.x.requires_grad else None

    def release(self):
        if self.hook:
            self.hook.remove()

    def reason(self):
        """Why there is no gradient."""
        base = getattr(self.x, "_base", None)
        if self.x.requires_grad and self.x.is_leaf and base is not None:
            return "it is a view made under no_grad, which backward does not reach"
        if self.x.requires_grad:
            return ("backward never reached it: the code used another tensor, a view of it perhaps, "
                    "or backward was not run")
        if base is not None and base.requires_grad:
            return "requires_grad is False, but it is a view of a tensor that has one: made under no_grad"
        return "requires_grad is False: a detached copy, or a view made under no_grad?"


class Dump:
    """A dump being made. Settings: see above, and whatever else is worth noting."""

    depth = 2  # calls between a warning and the caller's line

    def __init__(self, path, layout=None, **settings):
        settings["layout"] = layout
        for name, given in settings.items():
            _words(name, given)
        self.path, self.tensors, self.sources = path, {}, {}
        self.settings = {name: given for name, given in settings.items() if given is not None}
        self.reasons = {}  # name -> why it has no gradient, where more is known than _Source.reason()
        self.not_found = {}  # name -> what was looked for, by a framework's adapter

    def before(self, **inputs):
        """The inputs, copied now. Tensors that need a gradient are remembered for after()."""
        for name in inputs:
            _known(name, INPUTS)
        for name, x in inputs.items():
            if x is not None:
                self._take(name, x)

    def _take(self, name, x, view=_same, scale=1, wide=True):
        dtype, array = _stored(x)
        self.tensors["in." + name] = _scaled((dtype, view(array)), scale, wide)
        if name in self.sources:
            self.sources.pop(name).release()
        if name in GRADIENTS and hasattr(x, "requires_grad"):
            self.sources[name] = _Source(x, view, 1 / scale)

    def answer(self, **answers):
        """Some answers, copied now."""
        for name in answers:
            _known(name, ANSWERS)
        for name, x in answers.items():
            if x is not None:
                dtype, x = _stored(x)
                self.tensors["out." + name] = dtype, x.reshape(1) if name == "loss" else x

    def after(self, grads=None, **answers):
        """The answers and gradients (by name; those of before()'s tensors when not given); writes the file."""
        grads = dict(grads or {})
        for name in grads:
            _known(name, GRADIENTS)
        self.answer(**answers)
        for name, x in grads.items():
            if x is not None:
                self.tensors["grad." + name] = _stored(x)
        without = {}
        for name, source in self.sources.items():
            source.release()
            if grads.get(name) is not None:
                continue
            gradient = source.gradient()
            if gradient is None:
                without[name] = self.reasons.get(name) or source.reason()
            else:
                dtype, array = _stored(gradient)
                self.tensors["grad." + name] = _scaled((dtype, source.view(array)), source.scale)
        facts = dict(self.settings)
        for fact, says, names in (("no_gradient", "no gradient of", without),
                                  ("not_found", "not found", self.not_found)):
            if names:
                facts[fact] = "; ".join("%s: %s" % pair for pair in names.items())
                warnings.warn("%s: %s %s" % (self.path, says, facts[fact]), stacklevel=self.depth)
        save(self.path, self.tensors, facts)


def save(path, tensors, settings):
    """Write a safetensors file, whole or not at all. tensors: name -> array, or (dtype name, array)."""
    tensors = {name: x if isinstance(x, tuple) else _stored(x) for name, x in tensors.items()}
    order = sorted(tensors, key=lambda name: (-tensors[name][1].itemsize, name))
    header = {"__metadata__": {key: str(value) for key, value in settings.items()}}
    end = 0
    for name in order:
        dtype, x = tensors[name]
        header[name] = {"dtype": dtype, "shape": list(x.shape), "data_offsets": [end, end + x.nbytes]}
        end += x.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    temporary = "%s.tmp%d" % (path, os.getpid())
    try:
        with open(temporary, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for name in order:
                file.write(tensors[name][1].tobytes())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def load(path):
    """(name -> array, settings as text) of a file, maybe one of `csagrad dump`. bf16 comes as float32."""
    with open(path, "rb") as file:
        data = file.read()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])
    settings, tensors = header.pop("__metadata__", {}), {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        x = numpy.frombuffer(data[start + begin:start + end], _DTYPES[entry["dtype"]])
        if entry["dtype"] == "BF16":
            x = (x.astype("<u4") << 16).view("<f4")
        tensors[name] = x.reshape(entry["shape"])
    return tensors, settings


# ---- frameworks ----
#
# What a framework computes inside one forward is met at the modules and functions that it calls by name:
# modules have hooks, and a function is met by its name in the framework's module. All is put back at the end.


def from_megatron(layer, path, **settings):
    """A dump of Megatron-LM's CompressedSparseAttention, or of the one inside; see megatron.md."""
    return _Megatron(layer, path, settings)


def from_transformers(module, path, **settings):
    """A dump of transformers' DeepseekV4Attention of a CSA layer, or of the one in it; see transformers.md."""
    return _Transformers(module, path, settings)


def _at(x, dotted):
    for name in dotted.split("."):
        x = getattr(x, name, None)
    return x


def _find(root, what, needs):
    """The one module in root that has all attributes of `needs`."""
    def lacks(x):
        return [need for need in needs if _at(x, need) is None]

    if not lacks(root):
        return root
    fits = [(name, x) for name, x in getattr(root, "named_modules", list)() if not lacks(x)]
    if len(fits) == 1:
        return fits[0][1]
    if fits:
        raise ValueError("%s holds %d modules like %s, give one of them: %s" %
                         (type(root).__name__, len(fits), what, ", ".join(name for name, _ in fits)))
    raise ValueError("expected %s or a module that holds one, but %s has no %s" %
                     (what, type(root).__name__, ", no ".join(lacks(root))))


class _Stand:
    """Stands for an object that a framework calls by name: one attribute is ours, the others are its own."""

    def __init__(self, original, name, mine):
        self.__dict__.update({"_original": original, name: mine})

    def __getattr__(self, name):
        return getattr(self._original, name)


def _by_name(function, values, named):
    """Arguments of a call by the names that `function` gives them."""
    bound = inspect.signature(function).bind_partial(*values, **named)
    bound.apply_defaults()
    return bound.arguments


class _Watch(Dump):
    """A dump that fills itself while a layer runs in a `with` block, and is written at its end."""

    what, needs, depth = None, (), 4

    def __init__(self, root, path, settings):
        self.layer = _find(root, self.what, self.needs)
        super().__init__(path, **settings)
        self.namespace = sys.modules[type(self.layer).__module__]
        self.undo, self.running, self.passes, self.output, self.problems = [], False, 0, None, []

    def __enter__(self):
        self.undo.append(self.layer.register_forward_pre_hook(self._start).remove)
        try:
            self.install()
            self._on(self.layer, self._end)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, kind, *_):
        self._remove()
        if kind is None:
            self.finish()
        for source in self.sources.values():
            source.release()

    def _remove(self):
        while self.undo:
            self.undo.pop()()

    def _on(self, module, seen):
        """seen(arguments by name, result) behind each call of a module, while the layer runs."""
        def hook(_, values, named, result):
            if self.running:
                seen(_by_name(module.forward, values, named), result)
        self.undo.append(module.register_forward_hook(hook, with_kwargs=True).remove)

    def _replace(self, name, make, namespace=None):
        """Puts make(what the name stands for) in its place in the framework's module; None: no such name."""
        namespace = namespace or self.namespace
        original = getattr(namespace, name, None)
        if original is not None:
            setattr(namespace, name, make(original))
            self.undo.append(lambda: setattr(namespace, name, original))
        return original

    def _start(self, *_):
        torch = sys.modules.get("torch")
        with_grad = torch is None or torch.is_grad_enabled()
        # the first pass that gradients can reach; a checkpointed layer runs without them before
        self.running = self.passes == 0
        self.passes += with_grad
        if self.running:
            for source in self.sources.values():
                source.release()
            self.tensors, self.sources, self.output, self.problems = {}, {}, None, []

    def _end(self, call, result):
        self.running = False
        self.ended(call, result)

    def _fact(self, name, value):
        """A setting, unless the caller gave it."""
        if value is not None:
            self.settings.setdefault(name, value)

    def _watch_output(self, output, view):
        """The attention's output; its gradient is dout."""
        dtype, array = _stored(output)
        self.tensors["out.output"] = dtype, view(array)
        if getattr(output, "requires_grad", False):
            self.output = _Source(output, view, 1)

    def finish(self):
        if "in.query" not in self.tensors and not self.problems:
            self.problems.append("%s.forward was not seen in the block: did another layer run, or a compiled "
                                 "one?" % type(self.layer).__name__)
        if not self.problems:
            dout = self.output.gradient() if self.output else None
            if dout is None:
                self.not_found["dout"] = "a gradient of the attention's output: was backward run in the block?"
            else:
                dtype, array = _stored(dout)
                self.tensors["in.dout"] = dtype, self.output.view(array)
            if self.passes > 1:
                text = "the layer ran %d times in the block, the first of them is dumped" % self.passes
                self.not_found["one run"] = text
                self.sources["sink"].sum = None
                self.reasons["sink"] = text + ", and the gradient is the sum of all"
            self.found()
        if self.problems:
            raise ValueError("%s is not written: %s" % (self.path, "; ".join(self.problems)))
        for name in [name for name in self.not_found if "out." + name in self.tensors]:
            del self.not_found[name]
        self.after()


class _Megatron(_Watch):
    what = "Megatron-LM's CompressedSparseAttention with an indexer"
    needs = ("attn_sink", "softmax_scale", "window_size", "compress_ratio", "compressor", "indexer.index_topk",
             "indexer.softmax_scale")

    def install(self):
        layer, calls = self.layer, []
        self.divisor = None
        self._fact("framework", "Megatron-LM")
        for name, value in (("ratio", layer.compress_ratio), ("window", layer.window_size),
                            ("topk", layer.indexer.index_topk), ("softmax_scale", layer.softmax_scale)):
            self._fact(name, value)
        for name in ("tp", "cp"):
            group = _at(layer, "pg_collection." + name)
            if group is not None and group.size() > 1:
                raise ValueError("%s parallel size is %d, expected 1: a rank holds a part of the %s alone" %
                                 (name, group.size(), "heads" if name == "tp" else "rows"))
        self._on(layer.compressor, self.compressed)
        if self._replace("FusedDSAIndexerLoss",
                         lambda f: _Stand(f, "apply", self._around(f.apply, self.lost, f.forward))):
            calls.append("FusedDSAIndexerLoss.apply")
        fused = self._replace("fused_csa_indexer_sparse_attn", lambda f: self._around(f, self.fused))
        if fused:
            calls.append(fused.__name__)
            inside = sys.modules[fused.__module__]
            if self._replace("_indexer_topk_core", lambda f: self._around(f, self.chosen), inside):
                calls.append("_indexer_topk_core")
        self._replace("unfused_compressed_sparse_attn", lambda f: self._around(f, self.attended))
        looked_for = "a call of %s in training" % " or ".join(calls)
        self.unseen = dict.fromkeys(("q_indexer", "weights", "k_indexer", "loss", "topk"), looked_for)

    def _around(self, function, seen, named_by=None):
        """The function, with its calls shown to seen(arguments by name, result) while the layer runs."""
        named_by = named_by or function
        takes_context = next(iter(inspect.signature(named_by).parameters)) == "ctx"

        def call(*values, **named):
            result = function(*values, **named)
            if self.running:
                seen(_by_name(named_by, (None,) * takes_context + values, named), result)
            return result
        return call

    def compressed(self, call, result):
        if isinstance(result, tuple):  # packed: rows and their offsets
            result, offsets = result
            self._take("cu_seqlens_compressed", offsets)
        if result is not None:
            self._take("compressed_kv", result)

    def lost(self, call, result):
        """FusedDSAIndexerLoss: every scale is in its weights."""
        self._indexer(call, call["q"], call["k"], 1)
        self.answer(topk=result[0], loss=result[1], non_compressed_lse=call.get("non_compressed_lse"))
        self._fact("index", "global" if call.get("varlen_starts") is not None else "local")

    def fused(self, call, result):
        """fused_csa_indexer_sparse_attn: multiplies weights by their scale inside, rounded to their type."""
        self._indexer(call, call["q_indexer"], call["k_indexer"], call["indexer_softmax_scale"])
        self.answer(loss=result[1])

    def chosen(self, call, result):
        """_indexer_topk_core: the list of the fused kernels."""
        self.answer(topk=result[0])
        self._fact("index", "local")

    def _indexer(self, call, q, k, scale):
        self._take("q_indexer", q)
        self._take("k_indexer", k)
        self._take("weights", call["weights"], scale=scale, wide=False)
        self._fact("loss_coeff", call["loss_coeff"])
        self._fact("sparse", call["sparse_loss"])
        self._fact("reduction", "sum" if call["calculate_per_token_loss"] else "mean")

    def attended(self, call, result):
        """Attention's own list, window rows first, compressed rows counted from behind the window's."""
        if "out.topk" not in self.tensors or len(call["query"].shape) != 4:
            return
        topk = self.tensors["out.topk"][1]
        mine = _stored(call["topk_indices"])[1][..., -topk.shape[-1]:].astype("<i8")
        mine = numpy.where(mine < 0, -1, mine - call["query"].shape[0])
        if not numpy.array_equal(numpy.sort(mine, -1), numpy.sort(topk, -1)):
            self.answer(attn_topk=mine)

    def ended(self, call, output):
        query, key, packed = call["query"], call["key"], call.get("packed_seq_params")
        shape = tuple(query.shape)
        thd = getattr(packed, "qkv_format", None) == "thd"
        self.settings["layout"] = "thd" if thd else "sbhd"
        if thd:
            physical, real = packed.cu_seqlens_q_padded, packed.cu_seqlens_q
            self._take("cu_seqlens_q", real if physical is None else physical)
            if physical is not None:
                self._take("cu_seqlens_q_real", real)
        self._take("query", query)
        self._take("kv", key, lambda x: x.reshape(shape[:-2] + shape[-1:]))
        self._take("sink", self.layer.attn_sink)
        self._watch_output(output, lambda x: x.reshape(shape))

    def found(self):
        for name, looked_for in self.unseen.items():
            if "in." + name not in self.tensors and "out." + name not in self.tensors:
                self.not_found.setdefault(name, looked_for)
        if "in.compressed_kv" not in self.tensors:
            self.not_found["compressed_kv"] = "a result of layer.compressor"
        if "in.q_indexer" not in self.tensors:
            return
        scaler = getattr(self.namespace, "DSAIndexerLossAutoScaler", None)
        if scaler is None:
            self.not_found["scale of the loss in backward"] = (
                "DSAIndexerLossAutoScaler in %s; gradients are as they came" % self.namespace.__name__)
            return
        scale = getattr(scaler, "main_loss_backward_scale", None)
        scale = 1.0 if scale is None else float(_stored(scale)[1].reshape(()))
        if scale not in (0.0, 1.0):
            self.settings["indexer_gradients_divided_by"] = scale
            for name in ("q_indexer", "weights", "k_indexer"):
                self.sources[name].scale /= scale


class _Transformers(_Watch):
    what = "transformers' DeepseekV4Attention of a compressed_sparse_attention layer"
    needs = ("sinks", "scaling", "sliding_window", "compressor.compress_rate", "compressor.indexer.index_topk",
             "compressor.indexer.scorer.softmax_scale", "compressor.indexer.scorer.weights_scaling",
             "compressor.indexer.scorer.weights_proj")

    def install(self):
        layer, indexer = self.layer, self.layer.compressor.indexer
        self._fact("framework", "transformers")
        for name, value in (("ratio", layer.compressor.compress_rate), ("window", layer.sliding_window),
                            ("topk", indexer.index_topk), ("softmax_scale", layer.scaling)):
            self._fact(name, value)
        self.settings.update(layout="bshd", index="local")
        self._on(indexer.scorer, self.scored)
        self._on(indexer.scorer.weights_proj, self.weighed)
        self._on(indexer, lambda call, topk: self.answer(topk=topk))
        self._on(layer.compressor, self.compressed)
        if not self._replace("ALL_ATTENTION_FUNCTIONS",
                             lambda f: _Stand(f, "get_interface", self._interface(f))):
            raise ValueError("%s has no ALL_ATTENTION_FUNCTIONS, so its attention cannot be met" %
                             self.namespace.__name__)

    def _interface(self, functions):
        def get(*values, **named):
            function = functions.get_interface(*values, **named)

            def attend(module, query, key, value, attention_mask=None, **rest):
                result = function(module, query, key, value, attention_mask, **rest)
                if self.running and module is self.layer:
                    self.attended(query, key, attention_mask, rest, result)
                return result
            return attend
        return get

    def scored(self, call, scores):
        self._take("q_indexer", call["q"])
        self._take("k_indexer", call["compressed_kv"])
        self.answer(index_scores=scores)

    def weighed(self, call, weights):
        scorer = self.layer.compressor.indexer.scorer
        self._take("weights", weights, scale=scorer.softmax_scale * scorer.weights_scaling)

    def compressed(self, call, result):
        self.n_compressed = result[0].shape[2]
        positions = _stored(call["position_ids"])[1]
        if (positions != numpy.arange(positions.shape[-1])).any():
            self.problems.append("position_ids are not 0, 1, 2, ... in each sequence: packed or cached tokens "
                                 "have no place in a dump of this layer")

    def attended(self, query, key, mask, rest, result):
        rows = query.shape[2]
        if key.shape[2] - self.n_compressed != rows:
            self.problems.append("attention has %d window rows for %d queries: run without a cache" %
                                 (key.shape[2] - self.n_compressed, rows))
            return
        if rest.get("dropout"):
            self.problems.append("attention_dropout is %g: no formula gives its output" % rest["dropout"])
        if mask is not None:
            self._real_rows(_stored(mask), query.shape[0], rows)
        self._take("query", query, lambda x: x.swapaxes(1, 2))
        self._take("kv", key, lambda x: x[:, 0, :rows])
        self._take("compressed_kv", key, lambda x: x[:, 0, rows:])
        self._take("sink", self.layer.sinks)
        self._watch_output(result[0], _same)

    def _real_rows(self, stored, batch, rows):
        """The mask must be the window's, for the first tokens of each sequence; behind them is padding."""
        dtype, mask = stored
        allowed = mask != 0 if dtype == "I32" else mask == 0  # true and false, or added to logits
        window = numpy.broadcast_to(allowed[:, 0, :, :rows], (batch, rows, rows))
        row = numpy.arange(rows)
        band = (row <= row[:, None]) & (row > row[:, None] - self.layer.sliding_window)
        real = window[:, row, row]
        if (real[:, 1:] > real[:, :-1]).any() or (window != (band & real[:, None]))[real].any():
            self.problems.append("attention_mask is not that of a causal window of %d tokens with padding "
                                 "behind the real ones" % self.layer.sliding_window)
        elif not real.all():
            self.answer(query_valid_rows=real.astype("<i4"))

    def ended(self, call, result):
        pass

    def found(self):
        for name in ("q_indexer", "weights", "k_indexer"):
            self.reasons[name] = "transformers has no indexer loss, and none of yours reached it"
        self.not_found["loss"] = "transformers has no indexer loss; give yours by answer(loss=...)"
        if "out.query_valid_rows" in self.tensors and "in.dout" in self.tensors:
            dout, real = self.tensors["in.dout"][1], self.tensors["out.query_valid_rows"][1]
            if dout[real == 0].any():
                self.problems.append("a gradient reaches padding rows: give them the label -100")


if __name__ == "__main__":
    import doctest
    sys.exit(1 if doctest.testmod().failed else 0)
