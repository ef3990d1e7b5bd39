"""Save what your CSA layer and its indexer loss computed, for `csagrad check`. Needs numpy and nothing else.

One call before the loss with the inputs, one after it with the answers; whatever you do not have, leave out:

    from csagrad_dump import Dump
    d = Dump("mine.safetensors", layout="sbhd", ratio=4, window=128, topk=512, softmax_scale=d ** -0.5, loss_coeff=0.01)
    d.before(q_indexer=q_i, weights=w, k_indexer=k_i, query=q, kv=kv, compressed_kv=ckv, sink=sink)
    loss = ...                                     # your code
    loss.backward()
    d.after(loss=loss, topk=indices, target=target)     # gradients are found in the tensors of before()

    csagrad check mine.safetensors

Arrays may be numpy's or PyTorch's (bf16 and devices included). Letters: S positions, B sequences, T packed rows, n
compressed rows, H D attention heads and size, G E indexer heads and size, K chosen. Shapes by layout:

    name                       sbhd       thd (packed)    bshd is sbhd with B first
    q_indexer                  S B G E    T G E
    weights                    S B G      T G             every scale multiplied in
    k_indexer                  n B E      n E
    query, dout, output        S B H D    T H D           dout: gradient of output
    kv, compressed_kv          S B D, n B D    T D, n D   before attention, rotated; key and value at once
    sink                       H          H
    topk                       B S K      T K             counted from the segment's first compressed row; -1: none
    target, log_predict        B S n      T n
    lse, non_compressed_lse    B H S      H T             all keys and sink; window and sink
    cu_seqlens_q, cu_seqlens_q_real, cu_seqlens_compressed    thd: physical offsets, running sums of real lengths, offsets

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
"""
import difflib
import json
import os
import struct

import numpy

INPUTS = ("q_indexer weights k_indexer query kv compressed_kv sink dout "
          "cu_seqlens_q cu_seqlens_q_real cu_seqlens_compressed").split()
ANSWERS = ("loss topk target log_predict kl index_scores output lse non_compressed_lse query_valid_rows").split()
GRADIENTS = "q_indexer weights k_indexer query kv compressed_kv sink".split()

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


def _known(name, names):
    if name in names:
        return
    near = difflib.get_close_matches(name, names, 1)
    raise ValueError('unknown tensor "%s"%s Known: %s' %
                     (name, ', did you mean "%s"?' % near[0] if near else ".", " ".join(names)))


class Dump:
    """A dump being made. Settings: ratio, window, topk, softmax_scale, loss_coeff and whatever else is worth noting."""

    def __init__(self, path, layout=None, **settings):
        if layout not in (None, "sbhd", "bshd", "thd"):
            raise ValueError('layout must be "sbhd", "bshd" or "thd", got %r' % (layout,))
        self.path, self.settings, self.tensors, self.sources = path, settings, {}, {}
        if layout:
            settings["layout"] = layout

    def before(self, **inputs):
        """The inputs, copied now. Tensors that need a gradient are remembered for after()."""
        for name in inputs:
            _known(name, INPUTS)
        for name, x in inputs.items():
            if x is None:
                continue
            self.tensors["in." + name] = _stored(x)
            if getattr(x, "requires_grad", False):
                self.sources[name] = x
                if not x.is_leaf:
                    x.retain_grad()

    def after(self, grads=None, **answers):
        """The answers and gradients (by name; those of before()'s tensors when not given); writes the file."""
        grads = dict(grads or {})
        for name in answers:
            _known(name, ANSWERS)
        for name in grads:
            _known(name, GRADIENTS)
        for name, x in self.sources.items():
            if name in GRADIENTS and grads.get(name) is None:
                grads[name] = x.grad
        for prefix, group in (("out.", answers), ("grad.", grads)):
            for name, x in group.items():
                if x is not None:
                    self.tensors[prefix + name] = _stored(x)
        if "out.loss" in self.tensors:
            dtype, loss = self.tensors["out.loss"]
            self.tensors["out.loss"] = dtype, loss.reshape(1)
        save(self.path, self.tensors, self.settings)


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
    """(name -> array, settings as text) of a file, for example one that `csagrad dump` wrote. bf16 comes as float32."""
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


if __name__ == "__main__":
    import doctest
    import sys
    sys.exit(1 if doctest.testmod().failed else 0)
