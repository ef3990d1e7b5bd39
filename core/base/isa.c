#include "core/base/isa.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "core/base/shown.h"
#include "core/base/suggest.h"

static const char *const names[CG_ISAS] = {
    [CG_PORTABLE] = "portable", [CG_AVX2] = "avx2", [CG_AVX512] = "avx512"};

/* What core/base/each_isa.h compiles for. These calls know whether the system saves the wide registers. */
bool cg_isa_exists(cg_isa isa) {
    if (isa == CG_PORTABLE) return true;
#ifdef CG_HAVE_ISAS
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
                          __builtin_cpu_supports("popcnt");
    if (isa == CG_AVX2) return has_avx2;
    return has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
#else
    return false;
#endif
}

const char *cg_isa_name(cg_isa isa) { return names[isa]; }

/* CG_ISAS: none of that name. */
static cg_isa named(const char *name) {
    int isa = 0;
    while (isa < CG_ISAS && strcmp(name, names[isa])) isa++;
    return (cg_isa)isa;
}

bool cg_isa_obeyed(cg_error *error) {
    const char *name = getenv("CSAGRAD_ISA");
    if (!name || !*name) return true;
    const cg_isa isa = named(name);
    if (isa == CG_ISAS) {
        const char *near = cg_suggest(name, names, CG_ISAS);
        return cg_fail(error, CG_BAD_INPUT, "CSAGRAD_ISA is \"%s\", expected avx512, avx2 or portable%s%s%s",
                       cg_shown(name).text, near ? ", did you mean " : "", near ? near : "", near ? "?" : "");
    }
    return cg_isa_exists(isa) ||
           cg_fail(error, CG_BAD_INPUT, "CSAGRAD_ISA is %s, which this processor or build lacks", name);
}

static atomic_int used = CG_ISAS;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void choose(void) {
    const char *name = getenv("CSAGRAD_ISA");
    int isa = name ? (int)named(name) : CG_ISAS;
    if (isa == CG_ISAS || !cg_isa_exists((cg_isa)isa))
        for (isa = CG_ISAS - 1; !cg_isa_exists((cg_isa)isa);) isa--;
    atomic_store_explicit(&used, isa, memory_order_relaxed);
}

/* Kernels ask for every row: without a lock but for the first time. */
cg_isa cg_isa_used(void) {
    int isa = atomic_load_explicit(&used, memory_order_relaxed);
    if (isa != CG_ISAS) return (cg_isa)isa;
    pthread_once(&once, choose);
    return (cg_isa)atomic_load_explicit(&used, memory_order_relaxed);
}
