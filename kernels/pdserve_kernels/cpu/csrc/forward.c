/* A step of a whole decoder in one call: between its operations nobody waits for an interpreter. */
#include <string.h>

#include "kernels.h"

/* Rows that pass one linear after the other together: what they leave behind is then still in the second-level cache. */
enum { BLOCK_ROWS = 512 };

typedef struct {
    const kernels_t *k;
    const model_t *m;
    const step_t *s;
    const linear_t *w;
    enum epilogue epilogue;
    int64_t rows, x_stride, y_stride, layer, width, scratch_bytes;
    int x_is_float;
    const int64_t *row_ids;
    const void *x, *next;
    void *y;
    const float *weight, *q_norm, *k_norm;
    char *scratch;
} job_t;

static int64_t pad(int64_t width) { return (width + CHUNK - 1) / CHUNK * CHUNK; }

typedef struct {
    float *residual;
    char *normed, *qkv, *attended, *inner, *attention;
    int64_t bytes;
} buffers_t;

static int64_t qkv_width(const model_t *m) { return (m->num_heads + 2 * m->num_kv_heads) * m->head_dim; }

/* Rows are padded with zeros that nobody overwrites. */
static buffers_t buffers(const model_t *m, char *memory, int64_t tokens)
{
    int64_t size = m->dtype == F32 ? 4 : 2, at = 0;
    buffers_t b;
#define TAKE(field, count) b.field = (void *)(memory + at), at += ((count) + 127) / 64 * 64
    TAKE(residual, tokens * m->hidden * 4);
    TAKE(normed, tokens * pad(m->hidden) * size);
    TAKE(qkv, tokens * qkv_width(m) * size);
    TAKE(attended, tokens * pad(m->num_heads * m->head_dim) * size);
    TAKE(inner, tokens * pad(m->inner) * size);
    TAKE(attention, attention_scratch(m) * num_threads());
#undef TAKE
    b.bytes = at;
    return b;
}

int64_t scratch_bytes(const model_t *m, int64_t tokens) { return buffers(m, NULL, tokens).bytes; }

static void do_embed(void *argument, int64_t thread, int64_t first, int64_t last)
{
    job_t *j = argument;
    (void)thread;
    j->k->embed(j->m, j->s, j->y, first, last);
}

static void do_norm(void *argument, int64_t thread, int64_t first, int64_t last)
{
    job_t *j = argument;
    (void)thread;
    j->k->rms_norm((enum dtype)j->m->dtype, 1, j->x, j->row_ids, j->weight, j->m->eps, j->y, j->width, j->y_stride,
                   first, last);
}

static void do_linear(void *argument, int64_t thread, int64_t first, int64_t last)
{
    job_t *j = argument;
    (void)thread;
    j->k->linear(j->w, j->epilogue, j->rows, j->x, j->x_stride, j->y, j->y_stride, first, last, j->next);
}

static void do_rope(void *argument, int64_t thread, int64_t first, int64_t last)
{
    job_t *j = argument;
    (void)thread;
    j->k->rope_write(j->m, j->s, j->layer, j->q_norm, j->k_norm, j->y, j->y_stride, first, last);
}

static void do_attention(void *argument, int64_t thread, int64_t first, int64_t last)
{
    job_t *j = argument;
    j->k->attention(j->m, j->s, j->layer, j->x, j->x_stride, j->y, j->y_stride, j->scratch + thread * j->scratch_bytes,
                    first, last);
}

/* Rows [first, first + rows) of x and y. */
static void norm(job_t job, const float *x, int64_t weight, char *y, int64_t first, int64_t rows)
{
    int64_t size = job.m->dtype == F32 ? 4 : 2;
    job.x = x + first * job.m->hidden, job.weight = (const float *)weight;
    job.y = y + first * pad(job.m->hidden) * size;
    job.width = job.m->hidden, job.y_stride = pad(job.m->hidden);
    parallel(do_norm, &job, rows);
}

static void product(job_t job, const linear_t *w, enum epilogue epilogue, const char *x, void *y, int64_t y_stride,
                    int64_t first, int64_t rows, const linear_t *next)
{
    int64_t size = job.m->dtype == F32 ? 4 : 2, y_size = epilogue == ADD_F32 || epilogue == STORE_F32 ? 4 : size;
    job.w = w, job.epilogue = epilogue, job.rows = rows, job.x_stride = pad(w->in);
    job.x = x + first * job.x_stride * size, job.y = (char *)y + first * y_stride * y_size;
    job.y_stride = y_stride, job.next = next && num_threads() == 1 ? (const void *)next->panels : NULL;
    parallel(do_linear, &job, (w->out + PANEL - 1) / PANEL);
}

void forward(const kernels_t *k, const model_t *m, const step_t *s)
{
    buffers_t b = buffers(m, (char *)s->scratch, s->scratch_tokens);
    job_t base = {.k = k, .m = m, .s = s, .scratch = b.attention, .scratch_bytes = attention_scratch(m)};
    const layer_t *layers = (const layer_t *)m->layers;
    job_t job = base;
    job.y = b.residual;
    parallel(do_embed, &job, s->num_tokens);
    for (int64_t i = 0; i < m->num_layers; i++) {
        const layer_t *layer = &layers[i];
        const linear_t *next = i + 1 < m->num_layers ? &layers[i + 1].qkv : &m->head;
        for (int64_t t = 0; t < s->num_tokens; t += BLOCK_ROWS) {
            int64_t rows = s->num_tokens - t < BLOCK_ROWS ? s->num_tokens - t : BLOCK_ROWS;
            norm(base, b.residual, layer->input_norm, b.normed, t, rows);
            product(base, &layer->qkv, STORE, b.normed, b.qkv, qkv_width(m), t, rows, NULL);
        }
        job = base;
        job.layer = i;
        job.y = b.qkv, job.y_stride = qkv_width(m);
        job.q_norm = (const float *)layer->q_norm, job.k_norm = (const float *)layer->k_norm;
        parallel(do_rope, &job, s->num_tokens);
        job.x = b.qkv, job.x_stride = qkv_width(m);
        job.y = b.attended, job.y_stride = pad(m->num_heads * m->head_dim);
        parallel(do_attention, &job, attention_items(m, s));
        for (int64_t t = 0; t < s->num_tokens; t += BLOCK_ROWS) {
            int64_t rows = s->num_tokens - t < BLOCK_ROWS ? s->num_tokens - t : BLOCK_ROWS;
            product(base, &layer->output, ADD_F32, b.attended, b.residual, m->hidden, t, rows, &layer->gate_up);
            norm(base, b.residual, layer->mlp_norm, b.normed, t, rows);
            product(base, &layer->gate_up, SILU_MUL, b.normed, b.inner, pad(m->inner), t, rows, &layer->down);
            product(base, &layer->down, ADD_F32, b.inner, b.residual, m->hidden, t, rows, next);
        }
    }
    if (!s->num_logits)
        return;
    job = base;
    job.row_ids = (const int64_t *)s->logits_rows;
    norm(job, b.residual, m->final_norm, b.normed, 0, s->num_logits);
    product(base, &m->head, STORE_F32, b.normed, (void *)s->logits, m->vocab, 0, s->num_logits, NULL);
}

/* All that would make a kernel read or write outside its tensors. */
const char *check_step(const model_t *m, const step_t *s)
{
    const int32_t *token_ids = (const int32_t *)s->token_ids, *positions = (const int32_t *)s->positions;
    const int32_t *slots = (const int32_t *)s->slots, *start = (const int32_t *)s->query_start;
    const int32_t *seq_lens = (const int32_t *)s->seq_lens, *tables = (const int32_t *)s->block_tables;
    const int64_t *rows = (const int64_t *)s->logits_rows;
    if (s->block_size < 1 || s->num_blocks < 1)
        return "the cache is empty";
    if (s->kv_number < NUMBER_INT8 ? s->kv_number != m->dtype : m->head_dim > MAX_DIM)
        return "the cache is of another dtype, or its heads are too long";
    for (int64_t t = 0; t < s->num_tokens; t++) {
        if (token_ids && (token_ids[t] < 0 || token_ids[t] >= m->vocab))
            return "a token id is outside the vocabulary";
        if (positions[t] < 0 || positions[t] >= m->num_positions)
            return "a position is outside the RoPE tables";
        if (slots[t] < 0 || slots[t] >= s->num_blocks * s->block_size)
            return "a slot is outside the cache";
    }
    if (start[0] != 0 || start[s->num_requests] != s->num_tokens)
        return "the requests are not the tokens of the step";
    for (int64_t r = 0; r < s->num_requests; r++) {
        int64_t queries = start[r + 1] - start[r], blocks = (seq_lens[r] + s->block_size - 1) / s->block_size;
        if (queries < 0 || seq_lens[r] < queries)
            return "a request has more queries than tokens";
        if (blocks > s->block_stride)
            return "a block table is too short";
        for (int64_t i = 0; i < blocks; i++)
            if (tables[r * s->block_stride + i] < 0 || tables[r * s->block_stride + i] >= s->num_blocks)
                return "a block is outside the cache";
    }
    for (int64_t i = 0; i < s->num_logits; i++)
        if (rows[i] < 0 || rows[i] >= s->num_tokens)
            return "a row of the logits is outside the step";
    return NULL;
}
