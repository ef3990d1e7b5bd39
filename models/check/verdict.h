/* What a dump follows: every quantity in it beside what is expected, and the contract that explains the numbers.
 *
 * Expected is the default contract, with the support and reduction that the dump declares. Everything is computed in
 * f64 from the dump's inputs; what float arithmetic may differ by is measured on a sample of rows and carried through
 * each formula, so that an error has a size in units of expected rounding. Each answer is judged by the rounding of its own
 * numbers, and by the finest arithmetic that its inputs allow; coarser arithmetic is thought of where nothing else explains
 * the numbers, and believed where it shows (models/check/judge.h).
 *
 * The search: all combinations of the axes (and the faults that act on a row) are held against a row, those that do
 * not give its numbers are dropped, and the next row follows. What is left is named only if the numbers that tell it
 * from the expected contract are too many for chance: v->identified. */
#ifndef CG_MODELS_VERDICT_H
#define CG_MODELS_VERDICT_H

#include "models/check/contract.h"
#include "models/check/dump.h"

typedef struct cg_difference {
    int64_t segment, position, head; /* head -1: the quantity has none */
    double got, expected, units;     /* units of expected rounding */
} cg_difference;

enum { CG_WORST_ROWS = 64 };

typedef struct cg_quantity {
    const char *name;
    const char *tensor; /* as in the file */
    bool ok;
    bool unsure; /* not ok, but arithmetic coarser than its type explains it, and nothing shows which it was */
    const char *
        computed_in; /* "bfloat16": ok at the rounding of this arithmetic, which the answer shows; NULL: at its own */
    bool unjudged;      /* the dump lacks what is needed: `says` tells what */
    double worst_rel;   /* largest error over largest expected magnitude */
    double worst_units; /* largest error in units of expected rounding */
    bool has_first;
    cg_difference first; /* the first row that differs */
    cg_difference worst[CG_WORST_ROWS];
    int n_worst;
    char says[400]; /* what it follows instead, ties, its form; "": nothing to add */
} cg_quantity;

enum { CG_QUANTITIES = 24, CG_VERDICT_FAULTS = 24, CG_NOTES = 24 };

typedef struct cg_verdict {
    bool match;       /* every answer of the dump is judged, and as expected */
    bool cannot_tell; /* nothing is known to differ, but not every answer could be judged */
    bool identified;  /* `contract` gives the dump's loss quantities, and enough numbers carry it */
    bool judged_loss; /* target, prediction, kl, loss or gradients were there to judge */
    cg_contract expected, contract, gradient;
    bool gradient_differs; /* the gradients follow `gradient` and not `contract` */
    bool undetermined[CG_AXES];
    unsigned remaining
        [CG_AXES]; /* bits: the values of an axis that give the dump's numbers; 0: the axis was not looked at */
    int64_t numbers, rows; /* independent numbers that the contract rests on, and the rows that hold them */
    int64_t n_fit;         /* contracts that fit where too few numbers name one; 0: does not apply */
    double factor;         /* of all indexer gradients against their contract: 1 */
    char faults[CG_VERDICT_FAULTS][48];
    int n_faults;
    cg_quantity quantities[CG_QUANTITIES];
    int n_quantities;
    char sentence[1200];
    char tell_apart[CG_AXES][400]; /* for an undetermined axis: what to dump instead */
    int n_looks;                   /* how often all rows were held against all contracts: what a check costs */
    char notes[CG_NOTES][240];     /* layout, forms found, what was not judged and why */
    int n_notes;
} cg_verdict;

typedef struct cg_verdict_options {
    double tolerance; /* allowed error relative to a quantity's largest magnitude; 0: expected rounding */
    int n_worst;      /* rows to list per quantity */
    const cg_contract *expected; /* NULL: what the dump declares over the default */
} cg_verdict_options;

/* NULL with a sentence when a needed number is missing, nothing can be judged, or memory is out. */
cg_verdict *cg_verdict_make(const cg_dump *dump, const cg_verdict_options *options, cg_error *error);

#endif
