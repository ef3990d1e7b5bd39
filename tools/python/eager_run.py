#!/usr/bin/env python3
"""Run one part in one form of tools/python/eager_csa.py: compare it with csagrad, take its memory and its time.

    csagrad bench --parts attention --dims flash --seqs 512 --save DIR
    tools/python/eager_run.py DIR/attention-flash-512-f32.safetensors --form band

Prints one JSON object. tools/bench-torch runs this for many; by itself it serves to look at one. Needs torch and numpy.

Three phases in one process, behind a small run of the same kind:
    memory   one run with the heap as it is by default, big tensors mapped and unmapped: peak_bytes is the growth of the
             kernel's high-water mark of the process from before the inputs were made, the inputs' own bytes left out
    check    one run over csagrad's selection: relative errors of loss, outputs and each gradient. The selection that the
             form makes itself is compared as sets; a row may differ where scores at the cut are closer than rounding
    time     with freed memory kept in the heap (or page faults of fresh mappings would be most of the time): one run to
             warm up, then the median of the others. --seconds ends them early, but not before three; --give-up US ends
             them behind the second, if both took longer
"""

import argparse
import ctypes
import gc
import json
import pathlib
import resource
import statistics
import sys
import time

import numpy
import torch

import csagrad_dump
import eager_csa as eager

MIB = 1 << 20
TIE = {torch.float32: 1e-5, torch.float64: 1e-13}  # of a row's largest score: what two orders of summing may differ by
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4  # malloc.h
WARM_UP_ROWS = 256


# ---- memory of this process ----


def heap(keep):
    """Let malloc keep freed memory, or give big blocks back at once. Only glibc has the switches."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        raise SystemExit("this C library has no mallopt: times would be those of page faults")
    settings = (
        {M_MMAP_MAX: 0, M_TRIM_THRESHOLD: -1, M_TOP_PAD: 64 * MIB} if keep else {M_MMAP_THRESHOLD: 128 << 10}
    )
    for name, value in settings.items():
        libc.mallopt(name, value)
    if not keep:
        libc.malloc_trim(0)


def status_bytes(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key + ":")) * 1024


def forget_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def limit_memory(limit):
    """Beyond it an allocation fails, which torch turns into an error, where the kernel would end the process."""
    with open("/proc/meminfo") as file:
        available = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable:")) * 1024
    limit = limit or available * 9 // 10
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # should the machine's memory end all the same, this process shall go and no other
    resource.setrlimit(resource.RLIMIT_DATA, (status_bytes("VmData") + limit,) * 2)
    return limit


# ---- parts: inputs of a file, a run, its results under the file's names ----


class Layer:
    """indexer-loss, attention, attention+loss: one sequence of one layer."""

    def __init__(self, tensors, config, form, block):
        self.tensors, self.config, self.form, self.block = tensors, config, form, block
        self.names = [name[3:] for name in tensors if name.startswith("in.layer0/")]
        self.input_bytes = sum(tensors["in." + name].nbytes for name in self.names)
        self.tokens = len(tensors["in.layer0/attn/" + ("q" if "in.layer0/attn/q" in tensors else "indexer/q")])

    def inputs(self, rows=None):
        """Fresh tensors, for the first rows only when so many are given."""
        x, C = {}, (rows or 0) // eager.RATIO
        for name in self.names:
            a = self.tensors["in." + name]
            if rows and a.shape[0] > 1 and not name.endswith("/sink"):
                a = a[:C] if name.endswith(("/k", "/ckv")) else a[:rows]
            t = torch.from_numpy(a.copy())
            t = t.unsqueeze(0) if t.dim() > 1 else t  # one sequence
            t = t if t.is_floating_point() else t.long()
            x[name] = t.requires_grad_("grad." + name in self.tensors)
        return x

    def forward(self, x, given=None):
        at, ix, c = "layer0/attn/", "layer0/attn/indexer/", self.config
        out, heads = {}, {}
        index = x.get(ix + "topk")
        attends, indexes = at + "q" in x, ix + "q" in x
        if indexes:
            form = self.form if self.form in eager.SCORE_FORMS else "autograd"
            chosen, index = eager.index_rows(
                x[ix + "q"], x[ix + "w"], x[ix + "k"], c["index_topk"], form, self.block, given
            )
            out[ix + "topk"] = index
        teacher = x.get(ix + "teacher")
        if attends:
            out[at + "out"], teacher = eager.attention(
                x[at + "q"],
                x[at + "kv"],
                x[at + "ckv"],
                x[at + "sink"],
                index,
                c["sliding_window"],
                self.form,
                self.block,
                True,
            )
            heads[at + "out"] = x[at + "dout"]
            out[at + "teacher"] = teacher
        if indexes:
            loss = eager.indexer_loss(chosen, index, teacher) * c["indexer_loss_coeff"]
            out[ix + "loss"], heads[ix + "loss"] = loss.reshape(1), x[at + "seed"]
        return out, heads

    def backward(self, x, out, heads):
        for t in x.values():
            t.grad = None
        torch.autograd.backward([out[name] for name in heads], list(heads.values()))

    def optimize(self):
        pass

    def given(self):
        name = "out.layer0/attn/indexer/topk"
        return torch.from_numpy(self.tensors[name].copy()).long().unsqueeze(0) if name in self.tensors else None

    def results(self, x, out):
        got = {"out." + name: t.detach() for name, t in out.items()}
        got.update({"grad." + name: t.grad for name, t in x.items() if t.requires_grad})
        return got

    def selections(self, x, out):
        """By layer: what this form chose, what csagrad did, and a function that gives the scores of rows."""
        ix = "layer0/attn/indexer/"
        if ix + "topk" not in out:
            return []
        scores = lambda t: eager.weighted(eager.head_scores(x[ix + "q"][:, t], x[ix + "k"]), x[ix + "w"][:, t])[0]
        return [(out[ix + "topk"][0], self.given()[0], scores)]


class Step:
    """layer, step: a whole model over packed sequences of one length, with or without its optimizer."""

    def __init__(self, tensors, config, form, block, optimizes):
        self.tensors, self.config, self.form, self.block, self.optimizes = tensors, config, form, block, optimizes
        self.names = [name for name in tensors if "grad." + name in tensors]
        self.B, self.S = config["batch_size"], config["seq_len"]
        self.input_bytes = sum(tensors[name].nbytes for name in [*self.names, "in.tokens", "in.targets"])
        self.tokens = self.B * self.S

    def inputs(self, rows=None):
        B, S = (1, min(rows, self.S)) if rows else (self.B, self.S)
        tokens = {
            name: torch.from_numpy(self.tensors["in." + name].reshape(self.B, self.S)[:B, :S].astype("i8")).contiguous()
            for name in ("tokens", "targets")
        }
        p = {name: torch.from_numpy(self.tensors[name].copy()).requires_grad_() for name in self.names}
        self.model = eager.Model(self.config, p, S, self.form, self.block)
        self.optimizer = eager.adamw(self.config, p, float(self.tensors["in.schedule"][0])) if self.optimizes else None
        self.p = p
        return {**p, **tokens}

    def forward(self, x, given=None):
        scale = [float(self.tensors["in." + name][0]) for name in ("lm_scale", "row_scale")]
        lm_loss, row_loss, self.chosen = self.model(x["tokens"], x["targets"], *scale, given or {})
        out = {"lm_loss": lm_loss} if row_loss is None else {"lm_loss": lm_loss, "indexer_loss": row_loss}
        return out, out

    def backward(self, x, out, heads):
        for t in self.p.values():
            t.grad = None
        sum(out.values()).backward()

    def optimize(self):
        if self.optimizer:
            self.norm = torch.nn.utils.clip_grad_norm_(
                self.p.values(), self.config["max_grad_norm"] or float("inf"), foreach=True
            )
            self.optimizer.step()

    def given(self):
        C = self.S // eager.RATIO
        chosen = {}
        for i in range(len(self.config["compress_ratios"])):
            name = f"out.layer{i}/attn/indexer/topk"
            if name in self.tensors:
                packed = torch.from_numpy(self.tensors[name].copy()).long().view(self.B, self.S, -1)
                chosen[i] = torch.where(packed < 0, packed, packed - C * torch.arange(self.B).view(-1, 1, 1))
        return chosen

    def results(self, x, out):
        got = {"out." + name: t.detach().reshape(1) for name, t in out.items()}
        got.update({"grad." + name: t.grad.clone() for name, t in self.p.items()})
        # AdamW begins with the sign of a gradient, also of one that is rounding and nothing else: from csagrad's own
        # gradients the step must be the same
        for name, t in self.p.items():
            t.grad = torch.from_numpy(self.tensors["grad." + name].copy())
        self.optimize()
        if self.optimizer:
            got["out.grad_norm"] = self.norm.reshape(1)
            with torch.no_grad():
                for name, t in self.forward(x)[0].items():
                    got["out.next_" + name] = t.reshape(1)
        return got

    def selections(self, x, out):
        x = self.inputs()  # the run changed the parameters
        self.model.seen = {}
        with torch.no_grad():
            self.forward(x, self.given())  # so that a tie in one layer does not change what the next ones see
        found, packed = [], lambda t: t.reshape(self.B * self.S, -1)
        for i, (q, w, k) in self.model.seen.items():
            scores = eager.weighted(eager.head_scores(q, k), w)
            chosen = eager.choose(scores, 0, min(self.config["index_topk"], k.shape[1]))
            found.append((packed(chosen), packed(self.given()[i]), packed(scores).__getitem__))
        self.model.seen = None
        return found


def part_of(path, form, block):
    tensors, facts = csagrad_dump.load(path)
    config = json.loads(facts["config"])
    if config["teacher"] != "full" or config["support"] != "sparse":
        raise SystemExit(
            f"{path}: expected teacher full and support sparse, got {config['teacher']} and {config['support']}"
        )
    if "in.tokens" in tensors:
        return Step(tensors, config, form, block, "out.grad_norm" in tensors)
    return Layer(tensors, config, form, block)


# ---- phases ----


def run(part, x, given=None, clock=None):
    start = time.perf_counter()
    out, heads = part.forward(x, given)
    middle = time.perf_counter()
    part.backward(x, out, heads)
    end = time.perf_counter()
    if clock is not None:
        part.optimize()
        clock.append(
            [1e6 * t for t in (middle - start, end - middle, time.perf_counter() - end, time.perf_counter() - start)]
        )
    return out


def take_memory(part):
    """(bytes beyond the inputs, inputs, outputs)."""
    gc.collect()
    heap(keep=False)
    forget_peak()
    before = status_bytes("VmRSS")
    x = part.inputs()
    out = run(part, x, clock=[])
    input_bytes = sum(t.numel() * t.element_size() for t in x.values())
    return status_bytes("VmHWM") - before - input_bytes, x, out


def relative(got, expected):
    got, expected = got.double().reshape(-1), torch.from_numpy(expected.astype("f8").reshape(-1))
    return float((got - expected).norm() / expected.norm().clamp(min=1e-300))


def compare_selections(part, x, out):
    """Rows whose selections differ: in places whose scores are so close that rounding can turn them round, or not."""
    ties = wrong = total = 0
    for chosen, given, scores in part.selections(x, out):
        a, b = chosen.sort(-1).values, given[:, : chosen.shape[1]].sort(-1).values
        total += len(a)
        for t in (a != b).any(-1).nonzero().flatten().tolist():
            one, two = (set(row[t][row[t] >= 0].tolist()) for row in (a, b))
            s = scores(slice(t, t + 1))[0].detach()
            swapped = s[list(one ^ two)]
            is_tie = (
                len(one) == len(two)
                and len(swapped) > 0
                and float(swapped.max() - swapped.min()) <= TIE[s.dtype] * float(s.abs().max())
            )
            ties, wrong = ties + is_tie, wrong + (not is_tie)
    return {"rows": total, "near_ties": ties, "wrong": wrong}


def check(part, x):
    given = part.given()
    out = run(part, x, given)
    got = part.results(x, out)
    errors = {}
    for name, t in got.items():
        if name.endswith("/topk") or name not in part.tensors:
            continue
        expected = part.tensors[name]
        if name.endswith("/teacher"):
            expected = expected[:, : t.shape[-1]]
        errors[name] = relative(t, expected)
    missing = [
        name
        for name in part.tensors
        if name.startswith(("out.", "grad.")) and not name.endswith("/topk") and name not in got
    ]
    if missing and missing != ["out.next_indexer_loss"]:
        raise SystemExit("not computed: " + " ".join(missing))
    return errors


def take_time(part, x, n_runs, seconds, give_up):
    heap(keep=True)
    clock = []
    run(part, x, clock=clock)
    del clock[:]
    start = time.perf_counter()
    while len(clock) < n_runs and (len(clock) < 3 or time.perf_counter() - start < seconds):
        run(part, x, clock=clock)
        if give_up and len(clock) == 2 and min(c[-1] for c in clock) > give_up:
            break
    names = ("fwd_us", "bwd_us", "optimize_us", "step_us")
    return {**{name: statistics.median(c[i] for c in clock) for i, name in enumerate(names)}, "runs": len(clock)}


def measure(part, a):
    small = part.inputs(WARM_UP_ROWS)
    run(part, small, clock=[])
    del small
    peak, x, out = take_memory(part)
    selection = compare_selections(part, x, out)
    del x, out
    x = part.inputs()
    errors = check(part, x)
    del x
    x = part.inputs()
    return {
        "peak_bytes": peak,
        "selection": selection,
        "errors": errors,
        **take_time(part, x, a.runs, a.seconds, a.give_up),
    }


def roof():
    """GFLOP/s of a matrix product of 2048, as csagrad bench takes it."""
    heap(keep=True)
    a, b = torch.randn(2048, 2048), torch.randn(2048, 2048)
    times = []
    for _ in range(8):
        start = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - start)
    return {
        "torch": torch.__version__,
        "score_forms": eager.SCORE_FORMS,
        "attention_forms": eager.ATTENTION_FORMS,
        "threads": torch.get_num_threads(),
        "gemm_peak_gflops": 2 * 2048**3 / min(times[1:]) / 1e9,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "file",
        type=pathlib.Path,
        nargs="?",
        help="of csagrad bench --save; without one: torch's version and the speed of its matrix product",
    )
    parser.add_argument("--form", default="blocks", help="see eager_csa.py (default: blocks)")
    parser.add_argument(
        "--block",
        type=int,
        default=0,
        metavar="ROWS",
        help="rows of a block in the form blocks (default: as many as are fast)",
    )
    parser.add_argument("--runs", type=int, default=5, help="timed runs, of which the median counts (default: 5)")
    parser.add_argument("--seconds", type=float, default=15, help="no further run behind so many (default: 15)")
    parser.add_argument("--give-up", type=float, metavar="US", help="no third run when both took longer")
    parser.add_argument("--threads", type=int, help="threads (default: all)")
    parser.add_argument(
        "--memory", type=int, metavar="MIB", help="refuse to take more (default: nine tenths of what is available)"
    )
    a = parser.parse_args()
    if a.threads:
        torch.set_num_threads(a.threads)
    if a.file is None:
        print(json.dumps(roof()))
        return
    forms = set(eager.SCORE_FORMS) | set(eager.ATTENTION_FORMS)
    if a.form not in forms or a.block < 0 or a.runs < 1:
        parser.error(f"--form is one of {' '.join(sorted(forms))}, --block at least 0, --runs at least 1")
    part = part_of(a.file, a.form, a.block)
    limit = limit_memory((a.memory or 0) * MIB)
    try:
        result = measure(part, a)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        result = {"refused": f"needs more than the {limit // MIB} MiB that it may take"}
    print(json.dumps({"form": a.form, "tokens": part.tokens, "input_bytes": part.input_bytes, **result}))


if __name__ == "__main__":
    main()
