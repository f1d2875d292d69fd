/* What the parts of the C backend know of each other: values, the table of an instruction family, the thread pool.
 *
 * Structs of 64-bit fields are filled by Python (cpu/layout.py has the same fields in the same order); pointers travel
 * as integers. Letters as in interface.py.
 */
#ifndef PDSERVE_KERNELS_H
#define PDSERVE_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "landing.h"

typedef uint16_t bf16;

enum dtype { BF16 = 0, F32 = 1 };
enum weights { WEIGHTS_BF16 = 0, WEIGHTS_F32 = 1, WEIGHTS_INT8 = 2 };

/* What becomes of the sums of a linear. */
enum epilogue {
    STORE = 0,     /* rounded to the dtype of the input */
    STORE_F32 = 1, /* as they are */
    ADD_F32 = 2,   /* added to the float32 output */
    SILU_MUL = 3,  /* half as many: silu(gate) * up, of weights packed gate beside up */
};

/* A weight is cut into panels of 64 outputs, each one run of memory that a product reads from its beginning to its end.
 *
 * bfloat16: [pair of inputs][output: 64][2], zeros up to a multiple of 32 inputs.
 * float32:  [input][64].
 * int8:     as bfloat16, one byte a number; the scales belong to the outputs.
 */
enum { PANEL = 64, CHUNK = 32 };

typedef struct {
    int64_t weights; /* enum weights */
    int64_t in, out;
    int64_t panels;
    int64_t bias;   /* float32 [panels * 64], or 0 */
    int64_t scales; /* float32 [panels * 64], or 0 */
} linear_t;

typedef struct {
    int64_t input_norm; /* float32 [E], as are all norm weights */
    int64_t q_norm, k_norm; /* or 0 */
    int64_t mlp_norm;
    linear_t qkv, output, gate_up, down;
} layer_t;

typedef struct {
    int64_t dtype; /* enum dtype: of activations and embedding */
    int64_t num_layers, hidden, inner, vocab;
    int64_t num_heads, num_kv_heads, head_dim;
    int64_t window; /* 0: none */
    int64_t num_positions;
    int64_t cos, sin; /* float32 [num_positions, head_dim / 2] */
    double scale, eps;
    int64_t embedding; /* [V, E] */
    int64_t final_norm;
    int64_t layers; /* layer_t[num_layers] */
    linear_t head;
} model_t;

/* One step. Everything is int32 but the row numbers of the logits. */
typedef struct {
    int64_t num_tokens, num_requests, num_logits;
    int64_t token_ids, positions, slots; /* [T] */
    int64_t query_start, seq_lens;       /* [R + 1], [R] */
    int64_t block_tables, block_stride;  /* [R, block_stride] */
    int64_t kv_cache, num_blocks, block_size;
    int64_t kv_head_rows, kv_layer_rows; /* rows of a block from head to head, and from layer to layer */
    int64_t kv_number, block_bytes, scales_at; /* enum number: the model's dtype, or codes whose scales begin there */
    int64_t logits_rows, logits; /* int64 [N], float32 [N, V] */
    int64_t scratch, scratch_tokens; /* scratch_bytes() of at least T and N tokens, zeroed once; and how many */
} step_t;

typedef struct {
    const char *name;
    /* y[rows, out] of x[rows, in], the panels [first, last) of it. x holds `in` numbers a row, rows `x_stride` apart,
     * and for bfloat16 zeros up to the next multiple of 32. `next`: memory that will be read after this, or NULL. */
    void (*linear)(const linear_t *w, enum epilogue epilogue, int64_t rows, const void *x, int64_t x_stride, void *y,
                   int64_t y_stride, int64_t first, int64_t last, const void *next);
    void (*embed)(const model_t *m, const step_t *s, float *residual, int64_t first, int64_t last);
    /* Rows [first, last) of norm(x) * weight; x is float32 or of the dtype; `row_ids` picks rows of x. */
    void (*rms_norm)(enum dtype dtype, int x_is_float, const void *x, const int64_t *row_ids, const float *weight,
                     double eps, void *y, int64_t width, int64_t y_stride, int64_t first, int64_t last);
    void (*rope_write)(const model_t *m, const step_t *s, int64_t layer, const float *q_norm, const float *k_norm,
                       void *qkv, int64_t stride, int64_t first, int64_t last);
    /* Items [first, last) of attention_items(); scratch: attention_scratch() bytes. */
    void (*attention)(const model_t *m, const step_t *s, int64_t layer, const void *q, int64_t q_stride, void *out,
                      int64_t out_stride, void *scratch, int64_t first, int64_t last);
    void (*argmax)(const float *logits, int64_t vocab, int64_t *ids, int64_t first, int64_t last);
} kernels_t;

/* Query tokens that share the keys and values of an attention item. */
enum { QUERY_TOKENS = 64 };

extern const kernels_t kernels_portable;
#if defined(__x86_64__)
extern const kernels_t kernels_avx2, kernels_avx512, kernels_amx;
#endif

/* dispatch.c */
const kernels_t *find_kernels(const char *name);        /* NULL where this machine lacks it */
const char *const *kernel_names(void);                  /* best first, NULL at the end */
const char *processor(void);                            /* its maker's name */

/* pool.c: fn(argument, thread, first, last) over a partition of [0, count). */
typedef void (*work_fn)(void *argument, int64_t thread, int64_t first, int64_t last);
int set_threads(int64_t count);
int64_t num_threads(void);
void parallel(work_fn fn, void *argument, int64_t count);

/* attention_plan.c */
int64_t attention_items(const model_t *m, const step_t *s);
int64_t attention_scratch(const model_t *m);
typedef struct {
    int64_t request, kv_head, token, num_tokens, position; /* token: the first, of T; position: its own */
} attention_item_t;
attention_item_t attention_item(const model_t *m, const step_t *s, int64_t index);

/* forward.c; check_step returns NULL, or what is wrong. */
const char *check_step(const model_t *m, const step_t *s);
int64_t scratch_bytes(const model_t *m, int64_t tokens);
void forward(const kernels_t *k, const model_t *m, const step_t *s);

/* sampling.c */
typedef struct {
    double temperature, min_p, top_p, random;
    int64_t top_k;
} draw_t;
const char *draw(const float *logits, int64_t vocab, const draw_t *params, int64_t *token_id);
const char *log_probability(const float *logits, int64_t vocab, int64_t token_id, double *logprob, double *log_total,
                            int64_t *rank);

void first_tokens(const float *logits, int64_t vocab, int64_t count, int64_t *ids);

/* bandwidth.c */
double read_bandwidth(const void *memory, int64_t bytes);

#endif
