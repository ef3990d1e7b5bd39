/* Inside of judge_loss.c and judge_say.c: what was found out about the loss and its gradients, before words are made of
 * it. */
#ifndef CG_MODELS_JUDGE_FACTS_H
#define CG_MODELS_JUDGE_FACTS_H

#include "models/check/judge_search.h"

#define PART(q) (1u << (q))
#define ROW_PARTS (PART(Q_TARGET) | PART(Q_LOG_PREDICT) | PART(Q_PREDICT) | PART(Q_KL))
#define VALUE_PARTS (ROW_PARTS | PART(Q_LOSS))
#define ROW_GRADIENTS (PART(Q_GRAD_Q) | PART(Q_GRAD_W))
#define GRADIENTS (ROW_GRADIENTS | PART(Q_GRAD_K))

/* The simplest contract that gives the numbers of some quantities. */
typedef struct choice {
    bool found;
    cg_contract c;
    unsigned also
        [CG_AXES]; /* bits: values of an axis that do as well, all other axes as they are; its own included */
    bool combined; /* so does another contract that differs elsewhere */
    cg_contract combination;
    bool underflow; /* so does one whose float teacher underflows */
    int64_t n;      /* how many do */
} choice;

/* ... and how the dump stands beside it. */
typedef struct finding {
    choice choice;
    compared beside;
    unsigned given;     /* the quantities that it was chosen for */
    unsigned explained; /* those that it gives */
    bool carried;       /* by numbers enough that chance would not do it */
    telling rests_on;
    bool has_factor; /* gradients have the direction of the contract's ... */
    bool one_factor; /* ... times one factor for all */
    double factor;
} finding;

typedef struct facts {
    search *s;
    unsigned parts;               /* the quantities that can be judged */
    unsigned as_expected, unsure; /* of those */
    compared beside;              /* the expected contract */
    bool expectable;              /* the dump has what the expected contract needs */
    bool nothing;                 /* loss_coeff is 0: loss and gradients are 0 under any contract */
    finding joint, value,
        gradient;      /* of everything; of values alone, of gradients alone where there is no joint one */
    finding coarse;    /* of everything, in the coarsest arithmetic that was tried */
    bool group_factor; /* all gradients that differ are those expected, times one factor */
    double factor;
    double distance[TARGETS]; /* of the dump's target from each, where none gives it */
    int n_measured;
} facts;

/* The verdict's sentence, notes, faults and what each quantity says. */
void judge_say_loss(const facts *f);

/* How far a contract is from another: axes that differ, faults, and a little for the order of values. */
double judge_cost(const cg_contract *c, const cg_contract *expected);

#endif
