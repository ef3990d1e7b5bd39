/* a * b + c, for the kernel part of an op's file: included once for each REAL. Fused by name where the path can: what a
 * compiler contracts depends on its options, and scores must have the same bits in every op that makes them, cg_gemm
 * included. The portable path rounds twice, in all of them. */
static inline __attribute__((always_inline, unused)) REAL KERNEL(fused)(REAL a, REAL b, REAL c) {
#if !defined(__FMA__)
    return a * b + c;
#elif REAL_BITS == 32
    return __builtin_fmaf(a, b, c);
#else
    return __builtin_fma(a, b, c);
#endif
}
