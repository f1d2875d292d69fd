/* Bytes of KV blocks on their way between two caches: digest, copy and conversion. */
#ifndef PDSERVE_LANDING_H
#define PDSERVE_LANDING_H

#include <stdint.h>

/* XXH3-128 with seed 0, as its specification has it, of more than 240 bytes: high half first, big-endian. */
enum { DIGEST_MIN = 241, DIGEST_BYTES = 16 };
void digest(const void *from, int64_t bytes, uint8_t out[DIGEST_BYTES]);

/* Copies and digests what it copied: each byte of `from` is read once. */
void copy_digest(const void *from, void *to, int64_t bytes, uint8_t out[DIGEST_BYTES]);

enum number { NUMBER_BF16 = 0, NUMBER_F32 = 1, NUMBER_INT8 = 2, NUMBER_FP8 = 3 };
enum { AXES = 4, MAX_DIM = 1024 };

/* Rows of `dim` numbers along four axes, from one place to another. A row of int8 or fp8 (e4m3) has a float32 scale: a
 * number is its code times the scale. Fields in the order of kv_blocks.py. */
typedef struct {
    int64_t from, to;               /* of the first row */
    int64_t from_scales, to_scales; /* of the first row, or 0 */
    int64_t from_number, to_number; /* enum number */
    int64_t dim;
    int64_t extent[AXES];
    int64_t from_stride[AXES], to_stride[AXES]; /* in rows */
} rows_t;

void convert_rows(const rows_t *rows);

/* A row of bfloat16 or float32 to int8 or fp8; returns its scale. */
float quantize_row(void *to, enum number number, const void *from, enum number from_number, int64_t dim);

#endif
