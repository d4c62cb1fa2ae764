/* Decoding one token of each sequence on a CPU; torch's kernels, made for large matrices, are slow at it.
 *
 * Plain C with the vector extensions of GCC and Clang, compiled on first use (build.py). The order of every sum does not
 * depend on the number of rows, so a sequence has the same result in any batch. Numbers are float32; matrices of weights,
 * keys and values may be bfloat16 (`half`), and are then multiplied as the processor can (half.h).
 */
#include "states.h"
#include "half.h"

/* What is multiplied by weights: x[m][k], and if these are `half`, maybe what `pack` makes of it. */
struct input {
    const float *x;
    int64_t m, k, half;
    const word *packed;
};

/* Columns first to end of out[m][n] = x[m][k] w[n][k]^T + bias[n]; they stay in the cache while all rows pass. */
static void wide_columns(float *out, const float *x, const float *w, const float *bias, int64_t m, int64_t n, int64_t k,
                    int64_t first, int64_t end)
{
    const int64_t passes = (m + ROWS - 1) / ROWS;
    /* Passes have about the same number of rows: 7 rows are split into 4 and 3, not 6 and 1. */
    for (int64_t p = 0; p < passes; p++) {
        const int64_t r = m * p / passes, rows = m * (p + 1) / passes - r;
        int64_t c = first;
        for (; c + 4 <= end; c += 4)
            (p ? LATER : FIRST)[rows](out + r * n + c, x + r * k, w + c * k, bias ? bias + c : 0, n, k, k);
        for (; c < end; c++)
            for (int64_t i = r; i < r + rows; i++)
                out[i * n + c] = dot(x + i * k, w + c * k, k) + (bias ? bias[c] : 0);
    }
}

static void columns(float *out, const struct input *in, struct matrix w, const float *bias, int64_t n, int64_t first,
                    int64_t end)
{
    const int64_t m = in->m, k = in->k;
    if (!in->half && !w.scales)
        wide_columns(out, in->x, w.w, bias, m, n, k, first, end);
    else if (in->packed && end - first == 2 * SIDE && (!w.scales || k <= MOST_UNPACKED)) {
        const int64_t count = w.scales ? UNPACKED(m) : 2 * SIDE;
        half own[w.scales ? count * k : 1];
        for (int64_t c = first; c < end; c += count) {
            if (w.scales)
                unpack_rows(own, w, c, count, k);
            half_columns(out + c, in->packed, w.scales ? own : (const half *)w.w + c * k, bias ? bias + c : 0, count, m, n, k);
        }
    } else
        for (int64_t c = first; c < end; c += 4) {
            const int64_t count = end - c < 4 ? end - c : 4;
            float wide[4 * k];
            if (w.scales)
                unpack_wide(wide, w, c, count, k, in->half);
            else
                widen(wide, (const half *)w.w + c * k, count * k);
            wide_columns(out + c, in->x, wide, bias ? bias + c : 0, m, n, k, 0, count);
        }
}

/* Columns that a thread computes at a time. */
#define STRIP(in) ((in)->packed ? 2 * SIDE : SIDE)
#define STRIPS(n, width) (((n) + (width) - 1) / (width))
#define END(first, n, width) ((first) + (width) < (n) ? (first) + (width) : (n))

/* What an adapter adds to the product of an input x: (x down[rank][k]^T) up[rank][n] (Hu et al., arXiv:2106.09685), by
 * way of low[m][rank], which `team_lower` computes. A rank of 0 is none. */
struct adapter {
    const float *down, *up;
    float *low;
    int64_t rank;
};

/* A matrix product with the same input as others: out[m][n] from w[n][k] and bias[n], and maybe an adapter. */
struct product {
    float *out;
    struct matrix w;
    const float *bias;
    int64_t n;
    const struct adapter *adapter;
};

/* Adds what an adapter adds to columns first to end of out[m][n]. */
static void add_adapter(float *out, const struct adapter *a, int64_t m, int64_t n, int64_t first, int64_t end)
{
    for (int64_t r = 0; a && a->rank && r < m; r++)
        for (int64_t i = 0; i < a->rank; i++) {
            const float low = a->low[r * a->rank + i], *up = a->up + i * n;
            for (int64_t c = first; c < end; c++)
                out[r * n + c] += low * up[c];
        }
}

/* Several products of an input, a strip of columns at a time. Every thread of a team calls the functions named team_...;
 * the threads share the work and wait for each other at the end. */
static void team_products(const struct product *products, int64_t count, const struct input *in)
{
    const int64_t width = STRIP(in);
    int64_t strips = 0;
    for (int64_t i = 0; i < count; i++)
        strips += STRIPS(products[i].n, width);
    #pragma omp for schedule(static)
    for (int64_t s = 0; s < strips; s++) {
        int64_t i = 0, strip = s;
        for (; strip >= STRIPS(products[i].n, width); i++)
            strip -= STRIPS(products[i].n, width);
        const struct product p = products[i];
        const int64_t first = strip * width, end = END(first, p.n, width);
        columns(p.out, in, p.w, p.bias, p.n, first, end);
        add_adapter(p.out, p.adapter, in->m, p.n, first, end);
    }
}

/* Computes `low` of up to three adapters of an input, one after the other in low; nothing if there are none. */
static void team_lower(struct adapter *own, const struct adapter *adapters, int64_t count, float *low,
                       const struct input *in)
{
    const int64_t blocks = adapters ? (in->m + ROWS - 1) / ROWS : 0;
    for (int64_t i = 0; i < count; i++) {
        own[i] = adapters ? adapters[i] : (struct adapter){0};
        own[i].low = low;
        low += in->m * own[i].rank;
    }
    if (!blocks)
        return;
    #pragma omp for schedule(static)
    for (int64_t job = 0; job < count * blocks; job++) {
        const struct adapter *a = own + job / blocks;
        const int64_t r = job % blocks * ROWS, rows = in->m - r < ROWS ? in->m - r : ROWS;
        wide_columns(a->low + r * a->rank, in->x + r * in->k, a->down, 0, rows, a->rank, in->k, 0, a->rank);
    }
}

/* x[m][n] += in[m][k] w[n][k]^T + bias[n], by way of t[m][n]; with what an adapter adds. */
static void team_add_product(float *x, float *t, struct input in, struct matrix w, const float *bias, int64_t n,
                             const struct adapter *adapter, float *low)
{
    const int64_t width = STRIP(&in);
    struct adapter own;
    team_lower(&own, adapter, 1, low, &in);
    #pragma omp for schedule(static)
    for (int64_t first = 0; first < n; first += width) {
        const int64_t end = END(first, n, width);
        columns(t, &in, w, bias, n, first, end);
        add_adapter(t, &own, in.m, n, first, end);
        for (int64_t r = 0; r < in.m; r++)
            for (int64_t c = first; c < end; c++)
                x[r * n + c] += t[r * n + c];
    }
}

/* gate[m][n] = silu(x w_gate^T) * (x w_up^T), by way of up[m][n] (Shazeer, arXiv:2002.05202, equation 6); with what
 * their adapters add. */
static void team_gated(float *gate, float *up, struct input in, struct matrix w_gate, struct matrix w_up, int64_t n,
                       const struct adapter *adapters, float *low)
{
    const int64_t width = STRIP(&in);
    struct adapter own[2];
    team_lower(own, adapters, 2, low, &in);
    #pragma omp for schedule(static)
    for (int64_t first = 0; first < n; first += width) {
        const int64_t end = END(first, n, width);
        columns(gate, &in, w_gate, 0, n, first, end);
        columns(up, &in, w_up, 0, n, first, end);
        add_adapter(gate, own, in.m, n, first, end);
        add_adapter(up, own + 1, in.m, n, first, end);
        for (int64_t r = 0; r < in.m; r++)
            for (int64_t i = r * n + first; i < r * n + end; i++)
                gate[i] = gate[i] / (1 + expf(-gate[i])) * up[i];
    }
}

/* out[m][n] = x[m][k] w[n][k]^T + bias[n]. */
void linear(float *out, const float *x, const float *w, const float *bias, int64_t m, int64_t n, int64_t k)
{
    const struct product product = {out, {w}, bias, n, 0};
    const struct input in = {x, m, k, 0, 0};
    #pragma omp parallel if (m * n * k > 1 << 15)
    team_products(&product, 1, &in);
}

/* out[m][d] = x / rms(x) * (weight + offset) (Zhang and Sennrich, arXiv:1910.07467, equation 4). */
static inline void norm_row(float *out, const float *x, const float *weight, float offset, float epsilon, int64_t d)
{
    const float scale = 1 / sqrtf(dot(x, x, d) / d + epsilon);
    for (int64_t i = 0; i < d; i++)
        out[i] = x[i] * scale * (weight[i] + offset);
}

static void team_rms_norm(float *out, const float *x, const float *weight, float offset, float epsilon, int64_t m,
                          int64_t d)
{
    #pragma omp for schedule(static)
    for (int64_t r = 0; r < m; r++)
        norm_row(out + r * d, x + r * d, weight, offset, epsilon, d);
}

void rms_norm(float *out, const float *x, const float *weight, float offset, float epsilon, int64_t m, int64_t d)
{
    #pragma omp parallel for schedule(static) if (m * d > 1 << 14)
    for (int64_t r = 0; r < m; r++)
        norm_row(out + r * d, x + r * d, weight, offset, epsilon, d);
}

#define PAIRED_FOR(half, d, page) ((half) && PAIRED[1] && (d) % BOTH == 0 && (page) % 4 == 0)
#define MOST_SCORES 2048
#define MOST_SUMS 8192

/* New tokens of sequences over a layer's cache, a token a row.
 *
 * q[n][heads][d], key and value [n][kv][d] by strides; pools keys and values [pages][page][kv][d]; table[n][width] names
 * the pages of a sequence; position[n] is that of the new token. (heads / kv) * page is at most MOST_SCORES,
 * (heads / kv) * d and page * d at most MOST_SUMS, heads / kv at most 64. Pools may be `half`.
 */
struct attention {
    float *out;
    const float *q;
    int64_t q_row, q_head;
    const float *key;
    int64_t key_row, key_head;
    const float *value;
    int64_t value_row, value_head;
    void *keys, *values;
    const int32_t *table;
    const int64_t *position;
    int64_t n, heads, kv, d, page, width, window;
    float scale, softcap;
    const float *sinks; /* [heads], or null */
    int64_t half, paired; /* `paired`: numbers of the pools are multiplied as they are */
    const int64_t *begin, *entry; /* see `decode` */
};

static void put(const struct attention *a, void *pool, int64_t entry, int64_t h, const float *x)
{
    const int64_t at = (entry * a->kv + h) * a->d;
    if (a->half)
        narrow((half *)pool + at, x, a->d);
    else
        memcpy((float *)pool + at, x, a->d * sizeof(float));
}

/* Entries of a page's head, the first at `place` of the pool; floats, in `own` if those of the pool are `half`, unless
 * `paired`. */
static const void *entries(const struct attention *a, const void *pool, int64_t place, float *own, int64_t start,
                           int64_t end)
{
    if (a->paired || !a->half)
        return (const char *)pool + place * (a->half ? sizeof(half) : sizeof(float));
    for (int64_t j = start; j < end; j++)
        widen(own + j * a->d, (const half *)pool + place + j * a->kv * a->d, a->d);
    return own;
}

/* Stores key and value head h of a row in the cache, in the entries of all that are as the row. */
static void store(const struct attention *a, int64_t row, int64_t h)
{
    const int64_t page = a->page, at = a->position[row], own = a->table[row * a->width + at / page] * page + at % page;
    const int64_t *entry = a->begin ? a->entry + a->begin[row] : &own;
    const int64_t *end = a->begin ? a->entry + a->begin[row + 1] : entry + 1;
    for (; entry < end; entry++) {
        put(a, a->keys, *entry, h, a->key + row * a->key_row + h * a->key_head);
        put(a, a->values, *entry, h, a->value + row * a->value_row + h * a->value_head);
    }
}

/* Attends over a row's sequence up to the row, which may have been stored together with rows before it. The softmax over
 * pages is the online softmax of Milakov and Gimelshein (arXiv:1805.02867); it begins with the head's sink, a logit whose
 * value is zero. */
static void attend(const struct attention *a, int64_t row, int64_t h)
{
    const int64_t d = a->d, kv = a->kv, page = a->page, window = a->window, group = a->heads / kv;
    const int64_t last = a->position[row], first = window > 0 && last >= window ? last - window + 1 : 0;
    const int32_t *pages = a->table + row * a->width;
    const int64_t step = a->half && !a->paired ? d : kv * d;
    float score[MOST_SCORES], sum[MOST_SUMS], top[64], norm[64], own_keys[MOST_SUMS], own_values[MOST_SUMS];
    float query[MOST_SUMS];
    half pairs[MOST_SUMS]; /* of `query` */
    memset(sum, 0, group * d * sizeof(float));
    for (int64_t g = 0; g < group; g++) {
        for (int64_t i = 0; i < d; i++)
            query[g * d + i] = a->q[row * a->q_row + (h * group + g) * a->q_head + i];
        top[g] = a->sinks ? a->sinks[h * group + g] : -1e30f;
        norm[g] = a->sinks ? 1 : 0;
    }
    if (a->paired)
        narrow(pairs, query, group * d);
    for (int64_t p = first / page; p <= last / page; p++) {
        const int64_t start = p * page < first ? first - p * page : 0;
        const int64_t end = (p + 1) * page <= last ? page : last - p * page + 1;
        const int64_t place = (pages[p] * page * kv + h) * d;
        const void *K = entries(a, a->keys, place, own_keys, start, end);
        const void *V = entries(a, a->values, place, own_values, start, end);
        for (int64_t g = 0, rows; g < group; g += rows) {
            rows = group - g < ROWS ? group - g : ROWS;
            if (a->paired)
                for (int64_t j = start / 4 * 4; j < end; j += 4)
                    PAIRED[rows](score + g * page + j, pairs + g * d, (const half *)K + j * step, 0, page, step, d);
            else
                products(score + g * page + start, page, query + g * d, rows, (const float *)K + start * step, step,
                         end - start, d);
        }
        for (int64_t g = 0; g < group; g++) {
            float *s = score + g * page, peak = top[g];
            for (int64_t j = start; j < end; j++)
                s[j] *= a->scale;
            if (a->softcap > 0)
                for (int64_t j = start; j < end; j++)
                    s[j] = a->softcap * tanhf(s[j] / a->softcap);
            for (int64_t j = start; j < end; j++)
                peak = s[j] > peak ? s[j] : peak;
            const float shrink = expf(top[g] - peak);
            top[g] = peak;
            float weights = 0;
            for (int64_t j = start; j < end; j++) {
                s[j] = expf(s[j] - peak);
                weights += s[j];
            }
            norm[g] = norm[g] * shrink + weights;
            for (int64_t i = 0; i < d; i++)
                sum[g * d + i] *= shrink;
        }
        for (int64_t g = 0, rows; g < group; g += rows) {
            rows = group - g < ROWS ? group - g : ROWS;
            const char *first_value = (const char *)V + start * step * (a->paired ? sizeof(half) : sizeof(float));
            (a->paired ? COMBINE_PAIRED : COMBINE_OF)[rows](sum + g * d, score + g * page + start, page, first_value,
                                                            step, end - start, d);
        }
    }
    for (int64_t g = 0; g < group; g++)
        for (int64_t i = 0; i < d; i++) {
            const int64_t at = a->paired ? i / BOTH * BOTH + i % 2 * LANES + i % BOTH / 2 : i;
            a->out[(row * a->heads + h * group + g) * d + i] = sum[g * d + at] / norm[g];
        }
}

void decode_attention(float *out, const float *q, int64_t q_row, int64_t q_head, const float *key, int64_t key_row,
                      int64_t key_head, const float *value, int64_t value_row, int64_t value_head, void *keys,
                      void *values, const int32_t *table, const int64_t *position, int64_t n, int64_t heads, int64_t kv,
                      int64_t d, int64_t page, int64_t width, int64_t window, float scale, float softcap,
                      const float *sinks, int64_t half)
{
    const struct attention a = {out, q, q_row, q_head, key, key_row, key_head, value, value_row, value_head, keys, values,
                                table, position, n, heads, kv, d, page, width, window, scale, softcap, sinks, half,
                                PAIRED_FOR(half, d, page)};
    for (int64_t job = 0; job < n * kv; job++)
        store(&a, job / kv, job % kv);
    #pragma omp parallel for schedule(dynamic, 1)
    for (int64_t job = 0; job < n * kv; job++)
        attend(&a, job / kv, job % kv);
}

/* Normalises a head if there is a weight, and rotates its first `rotated` numbers, halves apart (Su et al.,
 * arXiv:2104.09864). */
static void norm_rotate(float *x, const float *weight, float offset, float epsilon, const float *cos, const float *sin,
                        int64_t rotated, int64_t d)
{
    if (weight)
        norm_row(x, x, weight, offset, epsilon, d);
    for (int64_t i = 0; i < rotated / 2; i++) {
        const float a = x[i], b = x[rotated / 2 + i];
        x[i] = a * cos[i] - b * sin[i];
        x[rotated / 2 + i] = b * cos[rotated / 2 + i] + a * sin[rotated / 2 + i];
    }
}

/* A Gated DeltaNet (Yang et al., arXiv:2412.06464): weights of its products, of the convolution over queries, keys and
 * values, of its decay and of its gated norm; and the states of the rows. */
struct delta_net {
    const void *qkv, *z, *b, *a;
    const float *conv, *conv_bias, *dt_bias, *log_rate, *norm;
    const void *out;
    float *conv_state, *state;
};

struct layer {
    struct matrix q, k, v, o, gate, up, down;
    const float *norm, *q_bias, *k_bias, *v_bias, *q_norm, *k_norm, *o_bias, *mlp_norm;
    void *keys, *values;
    const struct delta_net *delta; /* in place of the attention, or null */
    const struct adapter *adapters; /* of q, k, v, o, gate, up and down, or null */
    int64_t window;
    float scale, softcap;
};

struct model {
    struct matrix embedding, head;
    const float *norm, *head_bias;
    const struct layer *layers;
    word *packed; /* room for a packed input, or null */
    int64_t count, vocabulary, hidden, heads, kv, d, inner, page;
    int64_t rotated, gated; /* `gated`: behind the query of a head is its gate, whose sigmoid multiplies the output */
    int64_t delta_heads, delta_key_heads, dk, dv, kernel, half;
    int64_t ranks; /* most numbers that adapters of one input have in between */
    float epsilon, offset; /* weights of norms are stored less `offset` */
};

/* The input x[m][k] of products with a model's weights; a team packs it together. */
static struct input team_input(const struct model *model, const float *x, int64_t m, int64_t k)
{
    struct input in = {x, m, k, model->half, 0};
    if (in.half && model->packed && k % (2 * SIDE) == 0) {
        #pragma omp for schedule(static)
        for (int64_t job = 0; job < PACKS(m, k); job++)
            pack(model->packed, x, m, k, job);
        in.packed = model->packed;
    }
    return in;
}

/* The attention of a layer for t[n][hidden]; returns its output before the last product, [n][heads][d]; null if keys and
 * values are only to be stored. */
static float *team_attention(const struct model *m, const struct layer *l, float *work, float *low, const float *t,
                             const float *rope, const int32_t *table, const int64_t *position, int64_t n, int64_t width,
                             const int64_t *begin, const int64_t *entry, int only_store)
{
    const int64_t d = m->d, wide = m->heads * d, narrow = m->kv * d, group = m->heads / m->kv;
    const int64_t apart = m->gated ? 2 * d : d;
    float *q = work, *out = q + n * m->heads * apart, *k = out + n * wide, *v = k + n * narrow;
    const struct input in = team_input(m, t, n, m->hidden);
    struct adapter own[3];
    team_lower(own, l->adapters, 3, low, &in);
    const struct product qkv[] = {{q, l->q, l->q_bias, m->heads * apart, own}, {k, l->k, l->k_bias, narrow, own + 1},
                                  {v, l->v, l->v_bias, narrow, own + 2}};
    team_products(qkv + only_store, 3 - only_store, &in);
    const struct attention a = {out, q, m->heads * apart, apart, k, narrow, d, v, narrow, d, l->keys, l->values, table,
                                position, n, m->heads, m->kv, d, m->page, width, l->window, l->scale, l->softcap, 0, m->half,
                                PAIRED_FOR(m->half, d, m->page), begin, entry};
    #pragma omp for schedule(static)
    for (int64_t job = 0; job < n * m->kv; job++) {
        const int64_t row = job / m->kv;
        const float *cos = rope + row * 2 * m->rotated, *sin = cos + m->rotated;
        norm_rotate(k + job * d, l->k_norm, m->offset, m->epsilon, cos, sin, m->rotated, d);
        for (int64_t g = job * group; g < (job + 1) * group && !only_store; g++)
            norm_rotate(q + g * apart, l->q_norm, m->offset, m->epsilon, cos, sin, m->rotated, d);
        store(&a, row, job % m->kv);
    }
    if (only_store)
        return 0;
    #pragma omp for schedule(dynamic, 4)
    for (int64_t job = 0; job < n * m->kv; job++) {
        attend(&a, job / m->kv, job % m->kv);
        if (m->gated)
            for (int64_t g = job * group; g < (job + 1) * group; g++)
                for (int64_t i = 0; i < d; i++)
                    out[g * d + i] /= 1 + expf(-q[g * apart + d + i]);
    }
    return out;
}

static float softplus(float x)
{
    return x > 20 ? x : log1pf(expf(x));
}

/* The Gated DeltaNet of a layer for t[n][hidden]; returns its output before the last product, [n][heads][dv]. */
static float *team_delta(const struct model *m, const struct delta_net *l, float *work, const float *t,
                         int64_t n)
{
    const int64_t heads = m->delta_heads, dk = m->dk, dv = m->dv, keys = m->delta_key_heads * dk, values = heads * dv;
    const int64_t mixed = 2 * keys + values;
    float *qkv = work, *shifted = qkv + n * mixed, *z = shifted + n * mixed, *out = z + n * values;
    float *b = out + n * values, *a = b + n * heads;
    const struct product products[] = {{qkv, {l->qkv}, 0, mixed, 0}, {z, {l->z}, 0, values, 0}, {b, {l->b}, 0, heads, 0},
                                       {a, {l->a}, 0, heads, 0}};
    const struct input in = team_input(m, t, n, m->hidden);
    team_products(products, 4, &in);
    #pragma omp for schedule(static)
    for (int64_t row = 0; row < n; row++)
        conv_row(shifted + row * mixed, qkv + row * mixed, l->conv_state + row * mixed * m->kernel, l->conv, l->conv_bias,
                 1, mixed, m->kernel);
    #pragma omp for schedule(static)
    for (int64_t job = 0; job < n * heads; job++) {
        const int64_t row = job / heads, h = job % heads, from = h / (heads / m->delta_key_heads) * dk;
        const float *query = shifted + row * mixed + from, *value = shifted + row * mixed + 2 * keys + h * dv;
        const float log_decay = -expf(l->log_rate[h]) * softplus(a[job] + l->dt_bias[h]);
        float *own = out + job * dv;
        delta_head(own, l->state + job * dk * dv, query, query + keys, value, &log_decay, 1, 1 / (1 + expf(-b[job])), 1,
                   dk, dv);
        gated_norm_row(own, own, z + job * dv, l->norm, m->epsilon, dv);
    }
    return out;
}

/* A model of the Llama family (Touvron et al., arXiv:2302.13971, section 2.2) for one new token of every sequence:
 * logits[n][vocabulary] of token[n] at position[n], whose cos and sin are rope[n][2][rotated]. Any layer may have a
 * Gated DeltaNet in place of its attention. A row stands for all sequences with its tokens: its keys and values are
 * stored in the entries entry[begin[row]] to entry[begin[row + 1] - 1] of the cache (without `begin`, in its own).
 *
 * `work` holds n * (2 hidden + 2 inner + ranks + mixer) numbers, where the mixer of attention takes heads (apart + d) + 2 kv d,
 * and that of a Gated DeltaNet 2 (2 keys + values) + 2 values + 2 heads. One team of threads runs all of it: it meets at
 * the end of each loop that is shared out, seven times a layer. Without `logits`, it ends when the last layer, one with
 * attention, has stored its keys and values.
 */
void decode(const struct model *given, float *logits, float *work, const int64_t *token, const float *rope,
            const int32_t *table, const int64_t *position, int64_t n, int64_t width, const int64_t *begin,
            const int64_t *entry)
{
    struct model own = *given, *m = &own;
    if (!multiplies_halves())
        m->packed = 0;
    const int64_t hidden = m->hidden, inner = m->inner;
    float *x = work, *t = x + n * hidden, *gate = t + n * hidden, *up = gate + n * inner, *low = up + n * inner;
    float *mixer = low + n * m->ranks;
    #pragma omp parallel
    {
        begin_tiles(m->packed);
        #pragma omp for schedule(static)
        for (int64_t row = 0; row < n; row++) {
            if (m->embedding.scales)
                unpack_wide(x + row * hidden, m->embedding, token[row], 1, hidden, m->half);
            else if (m->half)
                widen(x + row * hidden, (const half *)m->embedding.w + token[row] * hidden, hidden);
            else
                memcpy(x + row * hidden, (const float *)m->embedding.w + token[row] * hidden, hidden * sizeof(float));
            norm_row(t + row * hidden, x + row * hidden, m->layers[0].norm, m->offset, m->epsilon, hidden);
        }
        for (int64_t i = 0; i < m->count; i++) {
            const struct layer *l = m->layers + i;
            const struct adapter *adapters = l->adapters;
            if (i)
                team_rms_norm(t, x, l->norm, m->offset, m->epsilon, n, hidden);
            const float *out;
            if (l->delta) {
                out = team_delta(m, l->delta, mixer, t, n);
                team_add_product(x, t, team_input(m, out, n, m->delta_heads * m->dv), (struct matrix){l->delta->out}, 0,
                                 hidden, 0, low);
            } else {
                out = team_attention(m, l, mixer, low, t, rope, table, position, n, width, begin, entry,
                                     !logits && i == m->count - 1);
                if (!out)
                    break;
                team_add_product(x, t, team_input(m, out, n, m->heads * m->d), l->o, l->o_bias, hidden,
                                 adapters ? adapters + 3 : 0, low);
            }
            team_rms_norm(t, x, l->mlp_norm, m->offset, m->epsilon, n, hidden);
            team_gated(gate, up, team_input(m, t, n, hidden), l->gate, l->up, inner, adapters ? adapters + 4 : 0, low);
            team_add_product(x, t, team_input(m, gate, n, inner), l->down, 0, hidden, adapters ? adapters + 6 : 0, low);
        }
        if (logits) {
            team_rms_norm(t, x, m->norm, m->offset, m->epsilon, n, hidden);
            const struct product head = {logits, m->head, m->head_bias, m->vocabulary, 0};
            const struct input in = team_input(m, t, n, hidden);
            team_products(&head, 1, &in);
        }
        end_tiles(m->packed);
    }
}

/* SplitMix64 (Steele, Lea and Flood, 2014) started at the key: a multiple of 2^-23 in [0, 1). */
static float uniform(int64_t key, int64_t counter)
{
    uint64_t x = (uint64_t)key + (uint64_t)(counter + 1) * 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return (float)((x ^ (x >> 31)) >> 41) * 0x1p-23f;
}

static float exp_sum(const float *logits, float peak, float scale, int64_t count)
{
    float sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += expf((logits[i] - peak) * scale);
    return sum;
}

/* token and logp of rows from logits[n][v]: drawn from softmax(logits / temperature) by inverting its cumulative
 * distribution at the stream's next number, or the largest where temperature is 0 (logp then at temperature 1). Logits i
 * are those of rows slot[begin[i]] to slot[begin[i + 1] - 1]; without `begin`, of row i. */
void sample(int64_t *token, float *logp, const float *logits, const int64_t *key, const int64_t *counter,
            const int64_t *begin, const int64_t *slot, float temperature, int64_t n, int64_t v)
{
    const float scale = temperature > 0 ? 1 / temperature : 1;
    #pragma omp parallel for schedule(dynamic, 1) if (n * v > 1 << 13)
    for (int64_t i = 0; i < n; i++) {
        const float *x = logits + i * v;
        float peak = x[0], block[v / BLOCK + 1];
        for (int64_t j = 1; j < v; j++)
            peak = x[j] > peak ? x[j] : peak;
        double total = 0;
        for (int64_t b = 0; b * BLOCK < v; b++)
            total += block[b] = exp_sum(x + b * BLOCK, peak, scale, v - b * BLOCK < BLOCK ? v - b * BLOCK : BLOCK);
        for (int64_t j = begin ? begin[i] : i; j < (begin ? begin[i + 1] : i + 1); j++) {
            const int64_t row = slot ? slot[j] : j;
            int64_t chosen = 0;
            if (temperature > 0) {
                const double threshold = uniform(key[row], counter[row]) * total;
                double sum = 0;
                int64_t b = 0;
                while (b * BLOCK < v && sum + block[b] <= threshold)
                    sum += block[b++];
                /* Inside the block. Its parts may add up to slightly less than its sum: then the last part is taken. */
                const int64_t end = (b + 1) * BLOCK < v ? (b + 1) * BLOCK : v;
                for (int64_t at = b * BLOCK; at < end && sum <= threshold; at++) {
                    const float part = expf((x[at] - peak) * scale);
                    sum += part;
                    chosen = part > 0 ? at : chosen;
                }
            } else
                while (chosen < v - 1 && x[chosen] < peak)
                    chosen++;
            token[row] = chosen;
            logp[row] = (x[chosen] - peak) * scale - (float)log(total);
        }
    }
}
