/* Pairs of a token and a key that an op has to compute, from shapes alone: for costs. */
#ifndef CG_OPS_PAIRS_H
#define CG_OPS_PAIRS_H

/* T tokens of one sequence choose at most K of the compressed rows that they see; token t sees (t + 1) C / T of C. Several
 * segments see less, which shapes do not tell. */
static inline double cg_chosen_pairs(double T, double C, double K) {
    if (C <= 0 || K <= 0) return 0;
    return K >= C ? T * C / 2 : T * K - K * K * T / (2 * C);
}

/* T tokens of one sequence see the last `window` tokens, themselves included. */
static inline double cg_window_pairs(double T, double window) {
    double reach = window < T ? window : T;
    return reach * T - reach * (reach - 1) / 2;
}

#endif
