/* Counter-based random numbers (Philox 4x32-10, Salmon et al., SC'11): a number depends on (seed, stream,
 * index) alone, so any part of a sequence can be drawn again, in any order, on any number of threads.
 *
 * The seed is the key {low word, high word}; the counter is {index low, index high, stream low, stream high}.
 * One counter gives one block of four words, and every function below reads its block from the first word on.
 * So two kinds of draw at one (seed, stream, index) are not independent: give each purpose its own stream.
 */
#ifndef CG_CORE_RNG_H
#define CG_CORE_RNG_H

#include <stdint.h>

/* 32 random bits. */
uint32_t cg_random_u32(uint64_t seed, uint64_t stream, uint64_t index);

/* Uniform in [0, 1), 32 bits of randomness. */
double cg_random_uniform(uint64_t seed, uint64_t stream, uint64_t index);

/* Uniform in 0 .. n-1, n >= 1. No number is more likely than another by more than 2^-128. */
int64_t cg_random_below(uint64_t seed, uint64_t stream, uint64_t index, int64_t n);

/* Standard normal (Box-Muller on two draws of the same counter). Never beyond 6.77 on either side. */
double cg_random_normal(uint64_t seed, uint64_t stream, uint64_t index);

/* A stream number from a name (FNV-1a), so that a parameter's values do not depend on the others. */
uint64_t cg_random_stream(const char *name);

#endif
