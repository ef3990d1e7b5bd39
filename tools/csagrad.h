/* The subcommands of the program: one file tools/<name>.c each, listed once in tools/csagrad.c.
 *
 * argv[0] is "csagrad NAME", which starts every message. The result is the exit code: 0 fine, 1 the check that
 * was asked for failed or the machine refused, 2 bad usage or input (the sentence names the option), 77 a
 * device is absent. */
#ifndef CG_TOOLS_CSAGRAD_H
#define CG_TOOLS_CSAGRAD_H

#include "graph/backend.h"

int csagrad_bench(int argc, char **argv);
int csagrad_check(int argc, char **argv);
int csagrad_check_row(int argc, char **argv); /* for csagrad check --row */

/* For csagrad check of a file of gated pooling alone, computed on a backend (NULL: the CPU): true when it is one, with
 * the exit code. */
bool csagrad_check_compressor(const char *program, const char *path, const cg_backend *backend,
                              double tolerance, bool json, int *code);

int csagrad_config(int argc, char **argv);
int csagrad_dump(int argc, char **argv);
int csagrad_gradcheck(int argc, char **argv);
int csagrad_info(int argc, char **argv);
int csagrad_mem(int argc, char **argv);
int csagrad_ops(int argc, char **argv);
int csagrad_train(int argc, char **argv);

#endif
