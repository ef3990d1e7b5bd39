/* Gated pooling of tokens into compressed rows, and its gradient: see ops/csa/csa_compress.c for the formulas. A thread per
 * channel of an entry walks over the entry's slots; nothing is kept of them. */
#include "ops/cuda/csa/csa_teacher.cuh"

namespace {

enum { KV, GATE, APE, ENTRIES, POSITIONS, DOUT };
enum { THREADS = 128 };

template <typename T> struct pool {
    int64_t T_, C, m, d, columns;
    bool overlap;
    const T *kv, *gate;
    const cg_sum_of<T> *ape;
    const int32_t *entries, *positions;
};

template <typename T> pool<T> pool_of(const cg_run_args *args) {
    const csa_compress_attr *attr = (const csa_compress_attr *)args->attr;
    const cg_tensor *in = args->in;
    const int64_t columns = in[KV].shape.dims[1];
    return {.T_ = in[KV].shape.dims[0],
            .C = in[ENTRIES].shape.dims[0],
            .m = attr->ratio,
            .d = attr->overlap ? columns / 2 : columns,
            .columns = columns,
            .overlap = attr->overlap,
            .kv = (const T *)in[KV].data,
            .gate = (const T *)in[GATE].data,
            .ape = (const cg_sum_of<T> *)in[APE].data,
            .entries = (const int32_t *)in[ENTRIES].data,
            .positions = (const int32_t *)in[POSITIONS].data};
}

/* ---- wrong data ---- */

enum entry_fault { FITS, OUTSIDE, NO_PREDECESSOR };

/* least: the first row that entry s may begin at, behind the entry before it. */
CG_DEVICE entry_fault entry_fits(const int32_t *entries, const int32_t *positions, int64_t s, int64_t T,
                                 int64_t m, bool overlap, int64_t *least) {
    const int64_t first = entries[s];
    int64_t before = s - 1;
    *least = 0;
    if (first == -1) return FITS;
    while (before >= 0 && entries[before] == -1) before--;
    if (before >= 0) *least = entries[before] + m;
    if (first < *least || first < 0 || first + m > T) return OUTSIDE;
    if (overlap && positions[s] > 0 && (s == 0 || entries[s - 1] != first - m)) return NO_PREDECESSOR;
    return FITS;
}

CG_GLOBAL void check_entries_kernel(const int32_t *entries, const int32_t *positions, int64_t C, int64_t T,
                                    int64_t m, bool overlap, cg_device_fault *fault) {
    CG_FOR(s, C) {
        int64_t least;
        const entry_fault what = entry_fits(entries, positions, s, T, m, overlap, &least);
        if (what != FITS) cg_report(fault, 1, s, what, entries[s], least, positions[s]);
    }
}

void describe(const cg_run_args *args, const cg_device_fault *fault, cg_error *error) {
    const int64_t ratio = ((const csa_compress_attr *)args->attr)->ratio, T = args->in[KV].shape.dims[0];
    const int64_t *got = fault->got;
    if (got[0] == OUTSIDE)
        cg_fail(error, CG_BAD_INPUT,
                "entry %lld begins at row %lld, expected -1 or %lld to %lld for %lld rows of its own",
                (long long)fault->place, (long long)got[1], (long long)got[2], (long long)(T - ratio),
                (long long)ratio);
    else
        cg_fail(error, CG_BAD_INPUT,
                "entry %lld stands at position %d, but the entry before it does not begin at row %lld",
                (long long)fault->place, (int)got[3], (long long)(got[1] - ratio));
}

/* ---- slots ---- */

/* The slots of entry s: its own rows, then those before it. None for spare room, nor for an entry that does not fit. */
template <typename T> struct entry_slots {
    int64_t first, n;
    CG_MEMBER entry_slots(const pool<T> &p, int64_t s) : first(p.entries[s]), n(0) {
        int64_t least;
        if (first < 0 || entry_fits(p.entries, p.positions, s, p.T_, p.m, p.overlap, &least) != FITS) return;
        n = p.overlap && p.positions[s] > 0 && first >= p.m ? 2 * p.m : p.m;
    }
    /* Where channel j of slot i stands in kv and gate; *in_ape: and in ape. */
    CG_MEMBER int64_t at(const pool<T> &p, int64_t i, int64_t j, int64_t *in_ape) const {
        const bool own = i < p.m;
        const int64_t column = (own ? p.columns - p.d : 0) + j;
        *in_ape = (own ? i : i - p.m) * p.columns + column;
        return (own ? first + i : first + i - 2 * p.m) * p.columns + column;
    }
};

/* Softmax of one channel over its slots, and the weighted mean of kv. */
template <typename S> struct pooled {
    log_sum<S> all;
    S mean;
};

template <typename T>
CG_DEVICE pooled<cg_sum_of<T>> pool_channel(const pool<T> &p, const entry_slots<T> &slots, int64_t j) {
    typedef cg_sum_of<T> S;
    pooled<S> result = {{-cg_infinity<S>, 0}, 0};
    for (int64_t i = 0; i < slots.n; i++) {
        int64_t in_ape;
        const int64_t at = slots.at(p, i, j, &in_ape);
        result.all.top = cg_larger()(result.all.top, cg_up(p.gate[at]) + p.ape[in_ape]);
    }
    for (int64_t i = 0; i < slots.n; i++) {
        int64_t in_ape;
        const int64_t at = slots.at(p, i, j, &in_ape);
        const S e = cg_exp(cg_up(p.gate[at]) + p.ape[in_ape] - result.all.top);
        result.all.sum += e;
        result.mean = cg_fma(e, cg_up(p.kv[at]), result.mean);
    }
    if (slots.n > 0) result.mean /= result.all.sum;
    return result;
}

template <typename T> CG_GLOBAL void compress_kernel(pool<T> p, T *out) {
    CG_FOR(i, p.C * p.d) { out[i] = cg_down<T>(pool_channel(p, entry_slots<T>(p, i / p.d), i % p.d).mean); }
}

template <typename T> bool check_entries(const cg_run_args *args, const pool<T> &p, cg_stream *stream) {
    return CG_LAUNCH(check_entries_kernel, cg_blocks(p.C, 256), 256, 0, stream, p.entries, p.positions, p.C,
                     p.T_, p.m, p.overlap, args->fault);
}

template <typename T> bool csa_compress(const cg_run_args *args, cg_stream *stream) {
    const pool<T> p = pool_of<T>(args);
    return check_entries(args, p, stream) &&
           CG_LAUNCH(compress_kernel<T>, cg_blocks(p.C * p.d, 256), 256, 0, stream, p, (T *)args->out[0].data);
}

/* ---- gradient ---- */

template <typename T> CG_GLOBAL void clear_kernel(T *dkv, T *dgate, int64_t n) {
    CG_FOR(i, n) {
        dkv[i] = cg_down<T>(0);
        dgate[i] = cg_down<T>(0);
    }
}

/* Parts of the entries, each with its sum of dape in a row of the workspace; cut by the number of entries alone. */
int64_t parts_of(int64_t C) {
#ifdef CG_CUDA_HOST
    const int64_t least = 2, most = 512;
#else
    const int64_t least = 8, most = 512;
#endif
    const int64_t parts = C / least;
    return parts < 1 ? 1 : parts > most ? most : parts;
}

/* A thread per part and channel: nobody else writes the columns of its channel in its part's sum. */
template <typename T>
CG_GLOBAL void compress_grad_kernel(pool<T> p, const T *dout, T *dkv, T *dgate, cg_sum_of<T> *sums,
                                    int64_t parts) {
    typedef cg_sum_of<T> S;
    CG_FOR(i, parts * p.d) {
        const int64_t part = i / p.d, j = i % p.d;
        S *sum = sums + part * p.m * p.columns;
        for (int64_t r = 0; r < p.m; r++)
            for (int64_t column = j; column < p.columns; column += p.d) sum[r * p.columns + column] = 0;
        const int64_t end = cg_cut(p.C, parts, part + 1);
        for (int64_t s = cg_cut(p.C, parts, part); s < end; s++) {
            const entry_slots<T> slots(p, s);
            const pooled<S> entry = pool_channel(p, slots, j);
            const S g = cg_up(dout[s * p.d + j]) / entry.all.sum;
            for (int64_t k = 0; k < slots.n; k++) {
                int64_t in_ape;
                const int64_t at = slots.at(p, k, j, &in_ape);
                const S share = g * cg_exp(cg_up(p.gate[at]) + p.ape[in_ape] - entry.all.top);
                const S dlogit = share * (cg_up(p.kv[at]) - entry.mean);
                dkv[at] = cg_down<T>(share);
                dgate[at] = cg_down<T>(dlogit);
                sum[in_ape] += dlogit;
            }
        }
    }
}

template <typename T>
CG_GLOBAL void add_parts_kernel(const cg_sum_of<T> *sums, cg_sum_of<T> *dape, int64_t n, int64_t parts) {
    CG_FOR(i, n) {
        cg_sum_of<T> sum = 0;
        for (int64_t part = 0; part < parts; part++) sum += sums[part * n + i];
        dape[i] = sum;
    }
}

size_t compress_grad_workspace(const cg_node *node) {
    const size_t real = node->in[KV]->dtype == CG_F64 ? sizeof(double) : sizeof(float);
    return (size_t)(parts_of(cg_dim(node->in[ENTRIES], 0)) * cg_shape_count(&node->in[APE]->shape)) * real;
}

template <typename T> bool csa_compress_grad(const cg_run_args *args, cg_stream *stream) {
    const pool<T> p = pool_of<T>(args);
    cg_sum_of<T> *sums = (cg_sum_of<T> *)args->workspace;
    T *dkv = (T *)args->out[0].data, *dgate = (T *)args->out[1].data;
    const int64_t parts = parts_of(p.C), n = p.T_ * p.columns, n_ape = p.m * p.columns;
    return check_entries(args, p, stream) &&
           CG_LAUNCH(clear_kernel<T>, cg_blocks(n, 256), 256, 0, stream, dkv, dgate, n) &&
           CG_LAUNCH(compress_grad_kernel<T>, cg_blocks(parts * p.d, THREADS), THREADS, 0, stream, p,
                     (const T *)args->in[DOUT].data, dkv, dgate, sums, parts) &&
           CG_LAUNCH(add_parts_kernel<T>, cg_blocks(n_ape, 256), 256, 0, stream, sums,
                     (cg_sum_of<T> *)args->out[2].data, n_ape, parts);
}

} // namespace

extern "C" const cg_cuda_op cg_cuda_csa_compress = {
    .op = "csa_compress",
    .variants = {{.name = "plain",
                  .launch = {csa_compress<float>, csa_compress<double>, nullptr, csa_compress<cg_bf16>}}},
    .describe = describe,
};

extern "C" const cg_cuda_op cg_cuda_csa_compress_grad = {
    .op = "csa_compress_grad",
    .variants = {{.name = "plain",
                  .launch = {csa_compress_grad<float>, csa_compress_grad<double>, nullptr,
                             csa_compress_grad<cg_bf16>},
                  .workspace = compress_grad_workspace}},
    .describe = describe,
};
