#include "core/base/bf16.h"

#define CG_ISA_FILE "core/base/bf16_kernels.h"
#include "core/base/each_isa.h"

void cg_bf16_widen(int64_t n, const uint16_t *restrict x, float *restrict y) {
    static void (*const widens[CG_ISAS])(int64_t, const uint16_t *, float *) = CG_EACH_ISA(widen);
    widens[cg_isa_used()](n, x, y);
}

void cg_bf16_narrow(int64_t n, const float *restrict x, uint16_t *restrict y) {
    static void (*const narrows[CG_ISAS])(int64_t, const float *, uint16_t *) = CG_EACH_ISA(narrow);
    narrows[cg_isa_used()](n, x, y);
}
