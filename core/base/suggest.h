/* "did you mean": the known word nearest to a misspelt one. */
#ifndef CG_CORE_SUGGEST_H
#define CG_CORE_SUGGEST_H

/* The nearest of n words by edit distance, the first of equals, or NULL when none is near: distance above
 * 2 + length/4, or no letter of the two in common place (every short word is near to every other). Letters
 * are compared as bytes, capitals and small letters as different. Words of 128 bytes or more are never near. */
const char *cg_suggest(const char *word, const char *const *known, int n);

#endif
