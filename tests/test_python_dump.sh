#!/bin/sh
# tools/python/csagrad_dump.py: its examples, dtypes, refusals, atomic writes; what it saves is what csagrad reads.
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
export PYTHONPATH="$tools" PYTHONDONTWRITEBYTECODE=1
"$python" "$tools/csagrad_dump.py"
"$program" dump --graded "$folder/set" >/dev/null

cat >"$folder/test.py" <<'PYTHON'
import glob, subprocess, sys
import numpy
from csagrad_dump import ANSWERS, Dump, GRADIENTS, INPUTS, load, save

folder, program = sys.argv[1:]

# every dump of the set goes through and comes out the same
for path in sorted(glob.glob(folder + "/set/*.safetensors")):
    tensors, facts = load(path)
    d = Dump(folder + "/again.safetensors", **facts)
    d.before(**{n: tensors["in." + n] for n in INPUTS if "in." + n in tensors})
    d.after({n: tensors["grad." + n] for n in GRADIENTS}, **{n: tensors["out." + n] for n in ANSWERS if "out." + n in tensors})
    again, same_facts = load(folder + "/again.safetensors")
    # what went through is what csagrad check finds right; bf16 came back as f32, which is finer than its numbers are
    assert "bf16" in path or subprocess.run([program, "check", folder + "/again.safetensors"], stdout=subprocess.DEVNULL).returncode == 0, path
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
    y, z = (2 * x).to(torch.bfloat16), torch.randn(5, dtype=torch.float16)
    d = Dump(folder + "/torch.safetensors", layout="thd")
    d.before(weights=y, sink=z)
    loss = (y.float() ** 2).sum()
    loss.backward()
    d.after(loss=loss)
    tensors, _ = load(folder + "/torch.safetensors")
    assert numpy.array_equal(tensors["in.weights"], y.detach().float().numpy())
    assert numpy.array_equal(tensors["grad.weights"], (2 * y).detach().float().numpy())
    assert numpy.array_equal(tensors["in.sink"], z.numpy())
    print("torch", torch.__version__)
PYTHON
"$python" "$folder/test.py" "$folder" "$program"
# the last of them, read by the program
"$program" info "$folder/again.safetensors" >/dev/null
"$program" info "$folder/t.safetensors" | grep -q 'in.weights *bf16'
echo "ok"
