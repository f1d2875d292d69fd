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
enum { BUCKETS = 2048, PER_UNIT = 64, BLOCK = 256, FEW = 128 };

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

/* e^((x - largest) * sharpness), 0 below e^least. */
static inline __attribute__((always_inline)) double weight_of(float x, double largest, double sharpness, double least)
{
    double y = ((double)x - largest) * sharpness, w = exponential(y);
    return y >= least ? w : 0.0;
}

/* The weights of all, padded with zeros to a multiple of BLOCK. */
FOR_EACH_MACHINE
static void fill_weights(const float *x, int64_t count, double largest, double sharpness, double least, double *weights)
{
    for (int64_t i = 0; i < count; i++)
        weights[i] = weight_of(x[i], largest, sharpness, least);
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

static double total_of(const double *weights, int64_t vocab)
{
    double total = 0.0;
    for (int64_t i = 0; i < vocab; i += BLOCK)
        total += sum_block(weights + i);
    return total;
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
    double weight;
} candidate_t;

static int compare(const void *a, const void *b)
{
    const candidate_t *p = a, *q = b;
    if (p->logit != q->logit)
        return p->logit > q->logit ? -1 : 1;
    return p->id < q->id ? -1 : p->id > q->id;
}

typedef struct {
    double largest, scale; /* buckets for one unit of logit */
    const candidate_t *candidates; /* in the order of their ids */
    int64_t count;
    candidate_t *ranked;
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
    for (int64_t i = 0; i < r->count; i++) {
        int b = bucket_of(r, r->candidates[i].logit);
        r->counts[b]++;
        r->masses[b] += r->candidates[i].weight;
    }
}

/* The candidates of a bucket, in the order of tokens; returns how many. */
static int64_t rank_bucket(ranking_t *r, int bucket)
{
    int64_t count = 0;
    for (int64_t i = 0; i < r->count; i++)
        if (bucket_of(r, r->candidates[i].logit) == bucket)
            r->ranked[count++] = r->candidates[i];
    qsort(r->ranked, (size_t)count, sizeof(candidate_t), compare);
    return count;
}

/* The mass of the first top_k candidates. */
static double mass_of_first(ranking_t *r, int64_t top_k)
{
    double total = 0.0;
    int64_t rank = 0;
    for (int b = 0; b < BUCKETS && rank < top_k; b++) {
        if (rank + r->counts[b] <= top_k) {
            rank += r->counts[b];
            total += r->masses[b];
            continue;
        }
        rank_bucket(r, b);
        for (int64_t i = 0; rank < top_k; i++, rank++)
            total += r->ranked[i].weight;
    }
    return total;
}

/* The last of the first top_k candidates with which their mass is `enough`. */
static candidate_t last_kept(ranking_t *r, int64_t top_k, double enough)
{
    candidate_t last = {-INFINITY, INT32_MAX, 0.0};
    double mass = 0.0;
    int64_t rank = 0;
    for (int b = 0; b < BUCKETS && rank < top_k; b++) {
        if (mass + r->masses[b] < enough && rank + r->counts[b] <= top_k) {
            mass += r->masses[b];
            rank += r->counts[b];
            continue;
        }
        int64_t count = rank_bucket(r, b);
        for (int64_t i = 0; i < count && rank < top_k; i++, rank++) {
            last = r->ranked[i];
            mass += last.weight;
            if (mass >= enough)
                return last;
        }
    }
    return last;
}

FOR_EACH_MACHINE
static int any_from(const double *weights, double least)
{
    int any = 0;
    for (int i = 0; i < BLOCK; i++)
        any |= weights[i] >= least;
    return any;
}

/* Those that weigh `least` or more; returns how many. */
static int64_t find_candidates(const float *logits, int64_t vocab, const double *weights, double least,
                               candidate_t *candidates)
{
    int64_t count = 0;
    for (int64_t start = 0; start < vocab; start += BLOCK) {
        int64_t end = start + BLOCK < vocab ? start + BLOCK : vocab;
        if (!any_from(weights + start, least))
            continue;
        for (int64_t i = start; i < end; i++) {
            candidates[count] = (candidate_t){logits[i], (int32_t)i, weights[i]};
            count += weights[i] >= least;
        }
    }
    return count;
}

/* The candidate where the cumulative weight, in their order, passes random * total. */
static int64_t pass_candidates(const candidate_t *candidates, int64_t count, double random)
{
    double total = 0.0, passed = 0.0;
    for (int64_t i = 0; i < count; i++)
        total += candidates[i].weight;
    double target = random * total;
    if (target >= total)
        target = nextafter(total, 0.0);
    int64_t last = 0;
    for (int64_t i = 0; i < count; i++) {
        if (candidates[i].weight <= 0.0)
            continue;
        last = candidates[i].id;
        passed += candidates[i].weight;
        if (passed > target)
            break;
    }
    return last;
}

static int compare_ids(const void *a, const void *b)
{
    const candidate_t *p = a, *q = b;
    return p->id < q->id ? -1 : p->id > q->id;
}

/* The token where the cumulative weight, in order of ids, passes random * total. */
static int64_t pass(const double *weights, int64_t vocab, double random)
{
    int64_t padded = (vocab + BLOCK - 1) / BLOCK * BLOCK;
    double total = total_of(weights, vocab), target = random * total, passed = 0.0;
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

/* Finite at any temperature, so that the largest logit always has weight 1. */
static double sharpness_of(const draw_t *params)
{
    double sharpness = 1.0 / params->temperature;
    return sharpness < 1e300 ? sharpness : 1e300;
}

/* Draws among the `top_k` first tokens, at most FEW: they are found by themselves. */
static int64_t draw_of_few(const float *logits, int64_t vocab, const draw_t *params, int64_t top_k, double largest,
                           double least)
{
    int64_t ids[FEW], kept = 0;
    candidate_t candidates[FEW];
    double total = 0.0, mass = 0.0;
    first_tokens(logits, vocab, top_k, ids);
    for (int64_t i = 0; i < top_k; i++) {
        float logit = logits[ids[i]];
        double weight = weight_of(logit, largest, sharpness_of(params), least);
        candidates[i] = (candidate_t){logit, (int32_t)ids[i], weight};
        total += weight;
    }
    while (kept < top_k && (params->top_p >= 1.0 || mass < params->top_p * total))
        mass += candidates[kept++].weight;
    qsort(candidates, (size_t)kept, sizeof(candidate_t), compare_ids);
    return pass_candidates(candidates, kept, params->random);
}

/* Draws among the tokens that top_k and then top_p (Holtzman et al., 2020) keep. */
static int64_t draw_of_first(const float *logits, int64_t vocab, const draw_t *params, int64_t top_k, double largest,
                             const double *weights, ranking_t *ranking)
{
    double total = total_of(weights, vocab);
    candidate_t *candidates = (candidate_t *)(ranking + 1);
    /* All that weigh less than this make up half of what top_p drops, or less. */
    double negligible = top_k == vocab ? (1.0 - params->top_p) * total / (2.0 * (double)vocab) : -1.0;
    ranking->largest = largest, ranking->scale = PER_UNIT * sharpness_of(params);
    ranking->candidates = candidates, ranking->ranked = candidates + vocab;
    ranking->count = find_candidates(logits, vocab, weights, negligible, candidates);
    fill_buckets(ranking);
    if (top_k < vocab)
        total = mass_of_first(ranking, top_k);
    candidate_t last = last_kept(ranking, top_k, params->top_p < 1.0 ? params->top_p * total : INFINITY);
    int64_t kept = 0;
    for (int64_t i = 0; i < ranking->count; i++)
        if (compare(&candidates[i], &last) <= 0)
            candidates[kept++] = candidates[i];
    return pass_candidates(candidates, kept, params->random);
}

const char *draw(const float *logits, int64_t vocab, const draw_t *params, int64_t *token_id)
{
    float largest = largest_of(logits, vocab);
    if (!(largest > -INFINITY && largest < INFINITY)) {
        /* Nothing is right where a model yields such numbers, but the other requests of the step must not suffer. */
        *token_id = 0;
        return NULL;
    }
    double least = params->min_p > 0.0 ? log(params->min_p) : -INFINITY;
    int64_t top_k = params->top_k > 0 && params->top_k < vocab ? params->top_k : vocab;
    if (top_k <= FEW) {
        *token_id = draw_of_few(logits, vocab, params, top_k, largest, least);
        return NULL;
    }
    int64_t padded = (vocab + BLOCK - 1) / BLOCK * BLOCK;
    char *memory = scratch((size_t)padded * 8 + (size_t)vocab * 2 * sizeof(candidate_t) + sizeof(ranking_t));
    if (!memory)
        return "no memory";
    double *weights = (double *)memory;
    fill_weights(logits, vocab, largest, sharpness_of(params), least, weights);
    if (top_k < vocab || params->top_p < 1.0)
        *token_id = draw_of_first(logits, vocab, params, top_k, largest, weights, (ranking_t *)(memory + padded * 8));
    else
        *token_id = pass(weights, vocab, params->random);
    return NULL;
}

const char *log_probability(const float *logits, int64_t vocab, int64_t token_id, double *logprob, double *log_total,
                            int64_t *rank)
{
    int64_t padded = (vocab + BLOCK - 1) / BLOCK * BLOCK;
    double *weights = scratch((size_t)padded * 8);
    if (!weights)
        return "no memory";
    float largest = largest_of(logits, vocab);
    fill_weights(logits, vocab, largest, 1.0, -INFINITY, weights);
    *log_total = largest + log(total_of(weights, vocab));
    *logprob = logits[token_id] - *log_total;
    *rank = 1 + count_above(logits, vocab, logits[token_id]);
    return NULL;
}

FOR_EACH_MACHINE
static int any_above(const float *x, float limit)
{
    int any = 0;
    for (int i = 0; i < 64; i++)
        any |= x[i] > limit;
    return any;
}

/* Ids of the `count` first tokens, in their order. */
void first_tokens(const float *logits, int64_t vocab, int64_t count, int64_t *ids)
{
    int64_t have = 0;
    for (int64_t i = 0; i < vocab; i++) {
        if (have == count) {
            float last = logits[ids[count - 1]];
            while (i + 64 <= vocab && !any_above(logits + i, last))
                i += 64;
            if (i == vocab)
                break;
            if (!(logits[i] > last))
                continue;
        }
        int64_t at = have < count ? have++ : count - 1;
        for (; at > 0 && logits[i] > logits[ids[at - 1]]; at--)
            ids[at] = ids[at - 1];
        ids[at] = i;
    }
}
