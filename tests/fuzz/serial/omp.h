/* OpenMP's functions on one thread, for builds without OpenMP: clang may come without its library. */
#ifndef CG_TESTS_FUZZ_SERIAL_OMP_H
#define CG_TESTS_FUZZ_SERIAL_OMP_H

static inline int omp_get_max_threads(void) { return 1; }
static inline int omp_get_num_threads(void) { return 1; }
static inline int omp_get_thread_num(void) { return 0; }
static inline void omp_set_dynamic(int on) { (void)on; }
static inline void omp_set_num_threads(int n) { (void)n; }

#endif
