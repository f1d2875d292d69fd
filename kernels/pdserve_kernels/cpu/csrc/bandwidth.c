/* What memory gives one core at most: the floor that the kernels are measured against. */
#include <time.h>

#include "kernels.h"

static double seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Bytes per second of one pass over the memory, from its beginning to its end. */
#if defined(__x86_64__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
double read_bandwidth(const void *memory, int64_t bytes)
{
    typedef uint64_t line_t __attribute__((vector_size(64), may_alias));
    const line_t *p = memory;
    line_t a = {0}, b = {0}, c = {0}, d = {0};
    double start = seconds();
    for (int64_t i = 0; i + 4 <= bytes / 64; i += 4)
        a += p[i], b += p[i + 1], c += p[i + 2], d += p[i + 3];
    a += b + c + d;
    volatile uint64_t used = a[0] + a[1] + a[2] + a[3] + a[4] + a[5] + a[6] + a[7];
    (void)used;
    return (double)bytes / (seconds() - start);
}
