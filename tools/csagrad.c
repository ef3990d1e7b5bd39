/* csagrad: the program. Finds the subcommand and hands over.
 *
 *     csagrad COMMAND [OPTION...]      csagrad --help      csagrad COMMAND --help */
#include "tools/csagrad.h"

#include <argp.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "core/base/file.h"
#include "core/base/isa.h"
#include "core/base/suggest.h"
#include "tools/options.h"
#include "tools/out_of_memory.h"

typedef struct command {
    const char *name, *doc;
    int (*run)(int argc, char **argv);
} command;

static const command commands[] = {
    {"train", "train a model, show its losses and its indexer, keep checkpoints", csagrad_train},
    {"mem", "what saving, recomputing or streaming costs: peak memory planned and measured, saved values, time",
     csagrad_mem},
    {"bench", "how fast are the parts of a layer and a whole step, against what this machine can do?",
     csagrad_bench},
    {"gradcheck", "compare all gradients with central differences: each op, then a whole small model",
     csagrad_gradcheck},
    {"check", "say which contract a dump of attention and indexer loss follows, and where it first differs",
     csagrad_check},
    {"dump", "write a CSA layer's inputs and answers under a named contract, to test other code against",
     csagrad_dump},
    {"ops", "list the ops: what each saves for backward, and what recompute may do with it", csagrad_ops},
    {"info", "list the tensors of a file: safetensors, npy or npz; without one, the kernels that run here",
     csagrad_info},
    {"config", "list the keys of the configuration, or print the one that the options give", csagrad_config},
};

enum { N_COMMANDS = sizeof commands / sizeof commands[0] };

static int help(void) {
    puts("Usage: csagrad COMMAND [OPTION...]\n"
         "Train a toy DeepSeek-V4 model with Compressed Sparse Attention, and see what its memory holds and "
         "why.\n\n"
         "Commands:");
    for (int i = 0; i < N_COMMANDS; i++) printf("  %-10s %s\n", commands[i].name, commands[i].doc);
    puts("\nOptions:\n"
         "  --help     this text; csagrad COMMAND --help lists the options of a command\n"
         "  --version  version of the program\n\n"
         "Exit codes: 0 fine, 1 the check failed or the machine refused, 2 bad usage or input,\n"
         "77 the work needs a device that is absent.");
    return 0;
}

static int unknown(const char *word) {
    const char *names[N_COMMANDS];
    for (int i = 0; i < N_COMMANDS; i++) names[i] = commands[i].name;
    const char *near = cg_suggest(word, names, N_COMMANDS);
    cg_error error = {0};
    cg_fail(&error, CG_BAD_INPUT, "unknown %s \"%.100s\"%s%s%s", word[0] == '-' ? "option" : "command", word,
            near ? ", did you mean " : ", see csagrad --help", near ? near : "", near ? "?" : "");
    return tool_failed("csagrad", &error);
}

static char program[64] = "csagrad";

/* At every exit, those of --help included: a full disk shows only when the last bytes leave the buffer. */
static void check_output(void) {
    if (fflush(stdout) == 0 && !ferror(stdout)) return;
    fprintf(stderr, "%s: the output could not be written\n", program);
    _exit(CG_FAILED);
}

/* A program may be started with standard input, output or errors closed: the first files that it opens would
 * then get their numbers, and what is printed would run into them. */
static void open_standard_files(void) {
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0 && errno == EBADF && open("/dev/null", O_RDWR) != fd) _exit(CG_FAILED);
}

/* Ends the program as the signal would have, but leaves no half-written file. Commands with something to save
 * have handlers of their own. */
static void on_end(int number) {
    cg_file_remove_unfinished();
    signal(number, SIG_DFL);
    raise(number);
}

static void tidy_at_signals(void) {
    static const int numbers[] = {SIGINT, SIGTERM, SIGHUP};
    struct sigaction old, action = {.sa_handler = on_end};
    for (int i = 0; i < 3; i++)
        if (sigaction(numbers[i], NULL, &old) == 0 && old.sa_handler == SIG_DFL) /* not what nohup ignores */
            sigaction(numbers[i], &action, NULL);
}

/* Threads that wait for each other spin for milliseconds by default, which on a busy machine takes the processor from
 * the thread they wait for: with one other process on two cores a step took twelve times as long as with short spins,
 * and short ones cost nothing on an idle machine. libgomp reads its settings before main: set and start again. */
static void spin_briefly(char **argv) {
    if (getenv("OMP_WAIT_POLICY") || getenv("GOMP_SPINCOUNT")) return;
    setenv("GOMP_SPINCOUNT", "1000", 1);
    execv("/proc/self/exe", argv); /* where that is refused, the defaults serve */
}

int main(int argc, char **argv) {
    open_standard_files();
    spin_briefly(argv);
    tidy_at_signals();
    atexit(check_output);
    tool_end_without_memory(program);
    json_set_alloc_funcs(tool_malloc, free);
    argp_program_version = CSAGRAD_VERSION;
    argp_err_exit_status = CG_BAD_INPUT;
    cg_error error = {0};
    if (!cg_isa_obeyed(&error)) return tool_failed(program, &error);
    if (argc < 2) {
        cg_fail(&error, CG_BAD_INPUT, "a command is needed, see csagrad --help");
        return tool_failed(program, &error);
    }
    if (!strcmp(argv[1], "--help") || !strcmp(argv[1], "-?")) return help();
    if (!strcmp(argv[1], "--version") || !strcmp(argv[1], "-V")) {
        puts(CSAGRAD_VERSION);
        return 0;
    }
    for (int i = 0; i < N_COMMANDS; i++) {
        if (strcmp(argv[1], commands[i].name)) continue;
        snprintf(program, sizeof program, "csagrad %s", commands[i].name);
        argv[1] = program;
        return commands[i].run(argc - 1, argv + 1);
    }
    return unknown(argv[1]);
}
