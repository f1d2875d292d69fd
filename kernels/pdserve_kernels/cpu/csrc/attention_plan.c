/* How the attention of a step is cut into items that can be computed apart: queries of a request, and a KV head. */
#include "kernels.h"

static int64_t parts(const step_t *s, int64_t request)
{
    const int32_t *start = (const int32_t *)s->query_start;
    return (start[request + 1] - start[request] + QUERY_TOKENS - 1) / QUERY_TOKENS;
}

int64_t attention_items(const model_t *m, const step_t *s)
{
    int64_t count = 0;
    for (int64_t r = 0; r < s->num_requests; r++)
        count += parts(s, r);
    return count * m->num_kv_heads;
}

int64_t attention_scratch(const model_t *m)
{
    int64_t rows = QUERY_TOKENS * (m->num_heads / m->num_kv_heads), dim = (m->head_dim + PANEL - 1) / PANEL * PANEL;
    return rows * dim * 8 + dim * 64 * 8 + dim * 64 * 8 + rows * 68 + 64;
}

attention_item_t attention_item(const model_t *m, const step_t *s, int64_t index)
{
    const int32_t *start = (const int32_t *)s->query_start, *seq_lens = (const int32_t *)s->seq_lens;
    for (int64_t r = 0; r < s->num_requests; r++) {
        int64_t here = parts(s, r) * m->num_kv_heads;
        if (index >= here) {
            index -= here;
            continue;
        }
        int64_t queries = start[r + 1] - start[r], first = index / m->num_kv_heads * QUERY_TOKENS;
        int64_t rest = queries - first;
        return (attention_item_t){
            .request = r,
            .kv_head = index % m->num_kv_heads,
            .token = start[r] + first,
            .num_tokens = rest < QUERY_TOKENS ? rest : QUERY_TOKENS,
            .position = seq_lens[r] - queries + first,
        };
    }
    return (attention_item_t){0};
}
