/* "did you mean": the known word nearest to a misspelt one. */
#ifndef CG_CORE_SUGGEST_H
#define CG_CORE_SUGGEST_H

/* The nearest of n words by edit distance, or NULL when none is near (distance above 2 + length/4). */
const char *cg_suggest(const char *word, const char *const *known, int n);

#endif
