/* From a row of logits to a token, without sorting the vocabulary. Float64; the same bits on every machine, since sums
 * are made in one order and there is neither a library function nor a fused instruction in them (log of min_p apart).
 *
 * A token comes before another if its logit is larger, or equal and its id smaller.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

#if defined(__x86_64__)
#define FOR_EACH_MACHINE __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_MACHINE
#endif

/* Buckets of the logits below the largest: 64 to a unit of log probability. */
enum { BUCKETS = 2048, PER_UNIT = 64, BLOCK = 256 };

typedef double lanes_t __attribute__((vector_size(64), aligned(8), may_alias));

/* e^x for x <= 0, to about one unit in the last place; 0 below -700 and for NaN. */
static inline __attribute__((always_inline)) double exponential(double x)
{
    static const double magic = 6755399441055744.0; /* 1.5 * 2^52: what is added to it loses its fraction */
    double clamped = x >= -700.0 ? x : -700.0;
    double shifted = clamped * 1.4426950408889634 + magic, n = shifted - magic;
    double r = clamped - n * 6.93147180369123816490e-01 - n * 1.90821492927058770002e-10;
    double p = 1.0 / 479001600;
    p = p * r + 1.0 / 39916800;
    p = p * r + 1.0 / 3628800;
    p = p * r + 1.0 / 362880;
    p = p * r + 1.0 / 40320;
    p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    uint64_t bits, exponent;
    memcpy(&bits, &p, 8);
    memcpy(&exponent, &shifted, 8);
    bits += exponent << 52;
    memcpy(&p, &bits, 8);
    return x >= -700.0 ? p : 0.0;
}

FOR_EACH_MACHINE
static float largest_of(const float *x, int64_t count)
{
    float lanes[16], largest = -INFINITY;
    for (int i = 0; i < 16; i++)
        lanes[i] = -INFINITY;
    int64_t i = 0;
    for (; i + 16 <= count; i += 16)
        for (int j = 0; j < 16; j++)
            lanes[j] = x[i + j] > lanes[j] ? x[i + j] : lanes[j];
    for (; i < count; i++)
        largest = x[i] > largest ? x[i] : largest;
    for (int j = 0; j < 16; j++)
        largest = lanes[j] > largest ? lanes[j] : largest;
    return largest;
}

/* weights = e^((x - largest) / temperature), 0 below e^least; padded with zeros to a multiple of BLOCK. */
FOR_EACH_MACHINE
static void fill_weights(const float *x, int64_t count, double largest, double temperature, double least,
                         double *weights)
{
    for (int64_t i = 0; i < count; i++) {
        double y = ((double)x[i] - largest) / temperature, w = exponential(y);
        weights[i] = y >= least ? w : 0.0;
    }
    for (int64_t i = count; i % BLOCK; i++)
        weights[i] = 0.0;
}

FOR_EACH_MACHINE
static double sum_block(const double *weights)
{
    lanes_t sum = {0};
    for (int i = 0; i < BLOCK; i += 8)
        sum += *(const lanes_t *)(weights + i);
    return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

FOR_EACH_MACHINE
static void drop_after(const float *x, int64_t count, float last_logit, int64_t last_id, double *weights)
{
    for (int64_t i = 0; i < count; i++) {
        int kept = (x[i] > last_logit) | ((x[i] == last_logit) & (i <= last_id));
        weights[i] = kept ? weights[i] : 0.0;
    }
}

FOR_EACH_MACHINE
static int64_t count_above(const float *x, int64_t count, float limit)
{
    int64_t above = 0;
    for (int64_t i = 0; i < count; i++)
        above += x[i] > limit;
    return above;
}

typedef struct {
    float logit;
    int32_t id;
} candidate_t;

static int compare(const void *a, const void *b)
{
    const candidate_t *p = a, *q = b;
    if (p->logit != q->logit)
        return p->logit > q->logit ? -1 : 1;
    return p->id < q->id ? -1 : p->id > q->id;
}

typedef struct {
    const float *logits;
    int64_t vocab;
    double largest, scale; /* buckets for one unit of logit */
    const double *weights;
    candidate_t *candidates;
    int64_t counts[BUCKETS];
    double masses[BUCKETS];
} ranking_t;

static int bucket_of(const ranking_t *r, float logit)
{
    double below = (r->largest - (double)logit) * r->scale;
    return below < BUCKETS - 1 ? (int)below : BUCKETS - 1; /* NaN goes into the last */
}

static void fill_buckets(ranking_t *r)
{
    memset(r->counts, 0, sizeof r->counts);
    memset(r->masses, 0, sizeof r->masses);
    for (int64_t i = 0; i < r->vocab; i++) {
        int b = bucket_of(r, r->logits[i]);
        r->counts[b]++;
        r->masses[b] += r->weights[i];
    }
}

/* The tokens of a bucket, in their order; returns how many. */
static int64_t rank_bucket(ranking_t *r, int bucket)
{
    int64_t count = 0;
    for (int64_t i = 0; i < r->vocab; i++)
        if (bucket_of(r, r->logits[i]) == bucket)
            r->candidates[count++] = (candidate_t){r->logits[i], (int32_t)i};
    qsort(r->candidates, (size_t)count, sizeof(candidate_t), compare);
    return count;
}

/* The last token that top_k and then top_p (Holtzman et al., 2020) keep. */
static candidate_t last_kept(ranking_t *r, int64_t top_k, double top_p)
{
    candidate_t last = {-INFINITY, INT32_MAX};
    double total = 0.0;
    int64_t rank = 0;
    fill_buckets(r);
    for (int b = 0; b < BUCKETS; b++) {
        if (rank + r->counts[b] <= top_k) {
            rank += r->counts[b];
            total += r->masses[b];
            continue;
        }
        if (rank < top_k) {
            rank_bucket(r, b);
            for (int64_t i = 0; rank < top_k; i++, rank++) {
                last = r->candidates[i];
                total += r->weights[last.id];
            }
        }
        break;
    }
    if (top_p >= 1.0)
        return last;
    double mass = 0.0, enough = top_p * total;
    rank = 0;
    for (int b = 0; b < BUCKETS; b++) {
        if (mass + r->masses[b] < enough && rank + r->counts[b] <= top_k) {
            mass += r->masses[b];
            rank += r->counts[b];
            continue;
        }
        int64_t count = rank_bucket(r, b);
        for (int64_t i = 0; i < count && rank < top_k; i++, rank++) {
            mass += r->weights[r->candidates[i].id];
            if (mass >= enough)
                return r->candidates[i];
        }
        if (rank >= top_k)
            break;
    }
    return last;
}

/* The token where the cumulative weight, in order of ids, passes random * total. */
static int64_t pass(const double *weights, int64_t vocab, double random)
{
    double total = 0.0;
    int64_t padded = (vocab + BLOCK - 1) / BLOCK * BLOCK;
    for (int64_t i = 0; i < padded; i += BLOCK)
        total += sum_block(weights + i);
    double target = random * total, passed = 0.0;
    if (target >= total)
        target = nextafter(total, 0.0);
    int64_t found = 0;
    for (int64_t i = 0; i < padded; i += BLOCK) {
        double sum = sum_block(weights + i);
        if (sum > 0.0)
            found = i;
        if (passed + sum > target)
            break;
        passed += sum;
    }
    int64_t last = found;
    for (int64_t i = found; i < found + BLOCK; i++) {
        if (weights[i] <= 0.0)
            continue;
        last = i;
        passed += weights[i];
        if (passed > target)
            break;
    }
    return last;
}

/* Memory that a thread keeps, since a fresh one of this size costs more than what is done in it. */
static void *scratch(size_t bytes)
{
    static __thread void *memory;
    static __thread size_t size;
    if (bytes > size) {
        free(memory);
        memory = malloc(bytes);
        size = memory ? bytes : 0;
    }
    return memory;
}

const char *draw(const float *logits, int64_t vocab, const draw_t *params, int64_t *token_id)
{
    int64_t padded = (vocab + BLOCK - 1) / BLOCK * BLOCK;
    char *memory = scratch((size_t)padded * 8 + (size_t)vocab * sizeof(candidate_t) + sizeof(ranking_t));
    if (!memory)
        return "no memory";
    double *weights = (double *)memory;
    ranking_t *ranking = (ranking_t *)(memory + padded * 8);
    float largest = largest_of(logits, vocab);
    if (!(largest > -INFINITY && largest < INFINITY)) {
        /* Nothing is right where a model yields such numbers, but the other requests of the step must not suffer. */
        *token_id = 0;
        return NULL;
    }
    double least = params->min_p > 0.0 ? log(params->min_p) : -INFINITY;
    fill_weights(logits, vocab, largest, params->temperature, least, weights);
    int64_t top_k = params->top_k > 0 && params->top_k < vocab ? params->top_k : vocab;
    if (top_k < vocab || params->top_p < 1.0) {
        ranking->logits = logits, ranking->vocab = vocab;
        ranking->largest = largest, ranking->scale = PER_UNIT / params->temperature;
        ranking->weights = weights, ranking->candidates = (candidate_t *)(ranking + 1);
        candidate_t last = last_kept(ranking, top_k, params->top_p);
        drop_after(logits, vocab, last.logit, last.id, weights);
    }
    *token_id = pass(weights, vocab, params->random);
    return NULL;
}

const char *log_probability(const float *logits, int64_t vocab, int64_t token_id, double *logprob, double *log_total,
                            int64_t *rank)
{
    int64_t padded = (vocab + BLOCK - 1) / BLOCK * BLOCK;
    double *weights = scratch((size_t)padded * 8), total = 0.0;
    if (!weights)
        return "no memory";
    float largest = largest_of(logits, vocab);
    fill_weights(logits, vocab, largest, 1.0, -INFINITY, weights);
    for (int64_t i = 0; i < padded; i += BLOCK)
        total += sum_block(weights + i);
    *log_total = largest + log(total);
    *logprob = logits[token_id] - *log_total;
    *rank = 1 + count_above(logits, vocab, logits[token_id]);
    return NULL;
}

/* Ids of the `count` first tokens, in their order. */
void first_tokens(const float *logits, int64_t vocab, int64_t count, int64_t *ids)
{
    int64_t have = 0;
    for (int64_t i = 0; i < vocab; i++) {
        if (have == count && !(logits[i] > logits[ids[count - 1]]))
            continue;
        int64_t at = have < count ? have++ : count - 1;
        for (; at > 0 && logits[i] > logits[ids[at - 1]]; at--)
            ids[at] = ids[at - 1];
        ids[at] = i;
    }
}
