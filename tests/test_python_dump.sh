#!/bin/sh
# tools/python/csagrad_dump.py: its examples, names, dtypes, refusals, atomic writes; what it saves csagrad reads;
# what it makes of frameworks' layers (python_frameworks.py).
# Exit code 77 (skipped) without a python3 that has numpy. CSAGRAD_PYTHON names another interpreter.
#
#     tests/test_python_dump.sh build/csagrad
set -eu
program=$1
tools=$(cd "$(dirname "$0")/../tools/python" && pwd)
python=${CSAGRAD_PYTHON:-python3}
if ! "$python" -c 'import numpy' 2>/dev/null; then
    echo "skipped: $python with numpy is absent"
    exit 77
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export PYTHONPATH="$tools${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
"$python" "$tools/csagrad_dump.py"
"$program" dump --graded "$folder/set" >/dev/null

cat >"$folder/test.py" <<'PYTHON'
import glob, re, subprocess, sys, types, warnings
import csagrad_dump
import numpy
from csagrad_dump import ANSWERS, Dump, GRADIENTS, INPUTS, load, save

folder, program, tools = sys.argv[1:]

# a name that the reader knows is one that before() or after() takes
with open(tools + "/../../models/check/dump.c") as file:
    names = re.findall('"(.*?)"', re.search(r"cg_dump_names\[.*?\] = \{(.*?)NULL", file.read(), re.S).group(1))
assert len(names) > 20 and sorted(names) == sorted(INPUTS + ANSWERS + ["grad." + n for n in GRADIENTS]), names
for name in INPUTS + ANSWERS:
    assert re.search(r"\b%s\b" % name, csagrad_dump.__doc__), name

# every dump of the set goes through and comes out the same
for path in sorted(glob.glob(folder + "/set/*.safetensors")):
    tensors, facts = load(path)
    d = Dump(folder + "/again.safetensors", **facts)
    d.before(**{n: tensors["in." + n] for n in INPUTS if "in." + n in tensors})
    d.after({n: tensors["grad." + n] for n in GRADIENTS},
            **{n: tensors["out." + n] for n in ANSWERS if "out." + n in tensors})
    again, same_facts = load(folder + "/again.safetensors")
    # what went through is what csagrad check finds right; bf16 came back as f32, which is finer than its numbers are
    check = subprocess.run([program, "check", folder + "/again.safetensors"], stdout=subprocess.DEVNULL)
    assert "bf16" in path or check.returncode == 0, path
    assert same_facts == facts and sorted(again) == sorted(tensors), path
    for name in tensors:
        assert tensors[name].dtype == again[name].dtype and tensors[name].shape == again[name].shape, (path, name)
        assert numpy.array_equal(tensors[name], again[name]), (path, name)


class Tensor:
    """As much of a PyTorch tensor as is used, in bfloat16."""
    dtype, requires_grad, is_leaf, grad, retained = "torch.bfloat16", True, False, None, False
    def __init__(self, x): self.x = numpy.asarray(x, "f4")
    def detach(self): return self
    def cpu(self): return self
    def float(self): return self
    def numpy(self): return self.x
    def retain_grad(self): self.retained = True
    def clone(self): return Tensor(self.x)
    def __add__(self, other): return Tensor(self.x + other.x)


# bf16 keeps its values, gradients are found, the caller's later changes are not seen
w = Tensor([[1.0, -2.5], [0.0078125, 3e38]])
k = numpy.ones((2, 3), ">f8")
d = Dump(folder + "/t.safetensors", ratio=4)
d.before(weights=w, k_indexer=k)
assert w.retained
k[:] = 7
w.grad = Tensor([[0.5, 0], [0, -0.0]])
d.after(loss=numpy.float32(2))
tensors, _ = load(folder + "/t.safetensors")
assert tensors["in.weights"][0, 1] == -2.5 and tensors["grad.weights"][0, 0] == 0.5
assert (tensors["in.k_indexer"] == 1).all() and tensors["in.k_indexer"].dtype == numpy.float64
assert tensors["out.loss"].shape == (1,)

# a tensor without a gradient is said, with its reason, in a warning and in the file; one that is given is not
class Leaf(Tensor):
    """Has a gradient of an earlier step; hooks get what is new."""
    is_leaf, grad = True, Tensor([[9.0, 9.0]])
    def register_hook(self, hook):
        self.hook = hook
        return types.SimpleNamespace(remove=lambda: setattr(self, "hook", None))

leaf, view, copy, unread, given = Leaf([[0, 1]]), Tensor([1, 2]), Tensor([3]), Tensor([4]), Tensor([5])
view.requires_grad = copy.requires_grad = given.requires_grad = False
view._base = leaf
d = Dump(folder + "/w.safetensors", sparse=None)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    d.before(weights=leaf, query=view, kv=copy, q_indexer=unread, k_indexer=given, cu_seqlens_q=copy,
             compressed_kv=numpy.ones(3))
    leaf.hook(Tensor([[1.0, 2.0]]))
    leaf.hook(Tensor([[0.5, 0.5]]))
    d.after({"k_indexer": numpy.ones(1)}, loss=1.0)
tensors, facts = load(folder + "/w.safetensors")
assert (tensors["grad.weights"] == [[1.5, 2.5]]).all() and leaf.hook is None
assert len(seen) == 1 and "test.py" in seen[0].filename and facts["no_gradient"] in str(seen[0].message)
query, kv, q_indexer = facts["no_gradient"].split("; ")
assert query.startswith("query: requires_grad is False, but it is a view")
assert "backward never reached it" in q_indexer
assert kv.startswith("kv: requires_grad is False: a detached copy") and "sparse" not in facts

# a scale, rounded to the nearest bf16 as numpy rounds float64 to float32: ties to even
x = numpy.array([1, 1 + 2**-7, 3e38, -7, 0, numpy.nan, numpy.inf], "f4")
for factor in (1 / 3, 0.75, 1.5):
    with numpy.errstate(over="ignore"):
        dtype, bits = csagrad_dump._scaled(csagrad_dump._bf16(x), factor)
        exact = x * numpy.float32(factor)
    back = (bits.astype("<u4") << 16).view("<f4")
    with numpy.errstate(all="ignore"):
        assert dtype == "BF16" and (numpy.isnan(back) == numpy.isnan(x)).all()
        near = abs(back - exact) <= abs(exact) * 2**-8
        assert (numpy.isinf(back) | numpy.isnan(back) | near).all(), (back, exact)
odd = "BF16", numpy.array([0x3F81, 0x3F83], "<u2")  # 1.5 times each lies between two
assert list(csagrad_dump._scaled(odd, 1.5)[1]) == [0x3FC2, 0x3FC4]
assert csagrad_dump._scaled(odd, 1.5, wide=True)[0] == "F32"

# dtypes
for dtype, kept in (("f2", "f2"), ("f4", "f4"), ("f8", "f8"), ("i4", "i4"), ("i8", "i8"), ("i2", "i4"), ("?", "i4"), ("u4", "i8")):
    save(folder + "/d.safetensors", {"x": numpy.zeros((3, 0, 2), dtype), "y": numpy.ones((), dtype)}, {})
    tensors, _ = load(folder + "/d.safetensors")
    assert tensors["x"].dtype == numpy.dtype(kept) and tensors["x"].shape == (3, 0, 2) and tensors["y"] == 1, dtype

# refusals leave the older file alone
def refused(call, part):
    try:
        call()
    except ValueError as error:
        assert part in str(error), error
        return
    raise AssertionError("not refused: " + part)

before = open(folder + "/t.safetensors", "rb").read()
refused(lambda: Dump("x", layout="sbdh"), "sbhd")
refused(lambda: Dump("x", reduction="foo"), "reduction must be one of mean, sum; got 'foo'")
refused(lambda: Dump("x", index=0), "index must be one of local, global; got 0")
for sparse in (1, 0, "yes", 0.5):
    refused(lambda: Dump("x", sparse=sparse), "sparse must be one of True, False; got")
for sparse in (True, False, numpy.bool_(True), "true", "False"):
    assert Dump("x", sparse=sparse, colour="any word").settings["sparse"] is sparse
refused(lambda: d.after(los=1), "loss")
refused(lambda: d.after({"weight": 1}), "weights")
refused(lambda: d.after(loss=1j), "complex128")
try:
    save(folder + "/missing/x.safetensors", {}, {})
    raise AssertionError("a folder that is missing")
except OSError:
    pass
assert open(folder + "/t.safetensors", "rb").read() == before
assert not glob.glob(folder + "/*.tmp*")

try:
    import torch
except ImportError:
    print("torch is absent: bf16 was tried on a stand-in")
else:
    x = torch.randn(4, 3, requires_grad=True)
    y = (2 * x).to(torch.bfloat16)
    d = Dump(folder + "/torch.safetensors", layout="thd")
    w = torch.ones(3, requires_grad=True)
    w.grad = torch.ones(3)
    with torch.no_grad():
        part = x[1:]
    d.before(weights=y, query=part, sink=x.detach(), kv=x.view(-1), q_indexer=w)
    loss = (y.float() ** 2).sum() + (w * 2).sum()
    loss.backward()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        d.after(loss=loss)
    assert len(seen) == 1 and "query: it is a view made under no_grad" in str(seen[0].message)
    assert "sink: requires_grad is False: a detached copy" in str(seen[0].message)
    assert "kv: backward never reached it" in str(seen[0].message)
    tensors, _ = load(folder + "/torch.safetensors")
    assert numpy.array_equal(tensors["in.weights"], y.detach().float().numpy())
    assert numpy.array_equal(tensors["grad.weights"], (2 * y).detach().float().numpy())
    assert (tensors["grad.q_indexer"] == 2).all() and w.grad[0] == 3
    print("torch", torch.__version__)
PYTHON
"$python" "$folder/test.py" "$folder" "$program" "$tools"
"$python" "$(dirname "$0")/python_frameworks.py" "$folder" "$program"
# the last of them, read by the program
"$program" info "$folder/again.safetensors" >/dev/null
"$program" info "$folder/t.safetensors" | grep -q 'in.weights *bf16'
echo "ok"
