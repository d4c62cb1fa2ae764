/* Causal attention over segments of any lengths in one row of tokens, in float32, and its gradient. torch's kernels
 * need sequences padded and prefixes repeated, and take microseconds for each head of each sequence.
 *
 * A few queries at a time are multiplied with all keys they attend to, once in forward and once in backward, where the
 * weights are computed again from the logarithm of their sum (Dao et al., arXiv:2205.14135, algorithm 4).
 */
#include "vectors.h"

/* A segment: `length` tokens from `start`, which attend to `before` tokens from `prefix`, and causally to each other. */
struct segment {
    int64_t start, length, prefix, before;
};

struct batch {
    const float *q, *k, *v; /* [tokens][heads][d], and twice [tokens][kv][d] */
    const float *sinks; /* [heads], one more logit for each query of a head, with a value of zeros; or null */
    const struct segment *segments;
    int64_t longest; /* most keys of a segment */
    int64_t heads, kv, d, window;
    float scale, softcap;
};

/* rows[count][d] += weight[R][count]^T x[R][d]. */
#define SPREAD(R)                                                                                                    \
    static void spread_##R(float *rows, int64_t step, const float *weight, int64_t stride, const float *x,           \
                           int64_t count, int64_t d)                                                                 \
    {                                                                                                                \
        int64_t i = 0;                                                                                               \
        for (; i + 2 * LANES <= d; i += 2 * LANES) {                                                                 \
            vec own[R][2];                                                                                           \
            UNROLL for (int r = 0; r < R; r++)                                                                       \
                UNROLL for (int l = 0; l < 2; l++)                                                                   \
                    own[r][l] = AT(x, r * d + i + l * LANES);                                                        \
            for (int64_t j = 0; j < count; j++)                                                                      \
                UNROLL for (int l = 0; l < 2; l++) {                                                                 \
                    float *row = rows + j * step + i + l * LANES;                                                    \
                    vec s = AT(row, 0);                                                                              \
                    UNROLL for (int r = 0; r < R; r++)                                                               \
                        s += weight[r * stride + j] * own[r][l];                                                     \
                    *(vec *)row = s;                                                                                 \
                }                                                                                                    \
        }                                                                                                            \
        for (int64_t j = 0; j < count; j++)                                                                          \
            for (int r = 0; r < R; r++)                                                                              \
                for (int64_t c = i; c < d; c++)                                                                      \
                    rows[j * step + c] += weight[r * stride + j] * x[r * d + c];                                     \
    }
EACH(SPREAD)

typedef void spreading(float *, int64_t, const float *, int64_t, const float *, int64_t, int64_t);
static spreading *const SPREAD_OF[] = {0, spread_1, spread_2, spread_3, spread_4, spread_5, spread_6};

/* Some queries of a segment and of the heads that share key head h, in the order of the segment: query `first + r` is
 * that of token (first + r) / group and of head h * group + (first + r) % group. Their keys are those of positions
 * lo to hi, counted from the prefix' start; the prefix' stand in one place, and the segment's own in another. */
struct block {
    const struct batch *b;
    const struct segment *s;
    int64_t h, first, rows, lo, hi;
};

static struct block block_of(const struct batch *b, const struct segment *s, int64_t h, int64_t number, int64_t blocks)
{
    const int64_t group = b->heads / b->kv, queries = s->length * group;
    struct block k = {b, s, h, queries * number / blocks, 0, 0, 0};
    k.rows = queries * (number + 1) / blocks - k.first;
    k.hi = s->before + (k.first + k.rows - 1) / group + 1;
    if (b->window > 0 && s->before + k.first / group >= b->window)
        k.lo = s->before + k.first / group - b->window + 1;
    return k;
}

static int64_t blocks_of(const struct batch *b, const struct segment *s)
{
    return (s->length * (b->heads / b->kv) + ROWS - 1) / ROWS;
}

/* Index of query r of a block in [tokens][heads]. */
static int64_t row_of(const struct block *k, int64_t r)
{
    const int64_t group = k->b->heads / k->b->kv;
    return (k->s->start + (k->first + r) / group) * k->b->heads + k->h * group + (k->first + r) % group;
}

/* The range of keys that a query attends to, counted from lo. */
static void seen(const struct block *k, int64_t r, int64_t *from, int64_t *to)
{
    const int64_t at = k->s->before + (k->first + r) / (k->b->heads / k->b->kv), window = k->b->window;
    *from = window > 0 && at - window + 1 > k->lo ? at - window + 1 - k->lo : 0;
    *to = at + 1 - k->lo;
}

/* How many of a block's keys, counted from lo, belong to the prefix; the others are the segment's own. */
static int64_t of_prefix(const struct block *k)
{
    return k->lo < k->s->before ? (k->hi < k->s->before ? k->hi : k->s->before) - k->lo : 0;
}

static const float *prefix_rows(const struct block *k, const float *all)
{
    return all + ((k->s->prefix + k->lo) * k->b->kv + k->h) * k->b->d;
}

static int64_t own_row(const struct block *k)
{
    return ((k->s->start + k->lo + of_prefix(k) - k->s->before) * k->b->kv + k->h) * k->b->d;
}

/* out[rows][hi - lo] = x[rows][d] times the block's keys, or values. */
static void block_products(const struct block *k, float *out, int64_t stride, const float *x, const float *all)
{
    const int64_t p = of_prefix(k), step = k->b->kv * k->b->d, d = k->b->d;
    if (p > 0)
        products(out, stride, x, k->rows, prefix_rows(k, all), step, p, d);
    products(out + p, stride, x, k->rows, all + own_row(k), step, k->hi - k->lo - p, d);
}

static void block_combine(const struct block *k, float *sum, const float *weight, int64_t stride, const float *all)
{
    const int64_t p = of_prefix(k), step = k->b->kv * k->b->d, d = k->b->d;
    memset(sum, 0, k->rows * d * sizeof(float));
    if (p > 0)
        COMBINE_OF[k->rows](sum, weight, stride, prefix_rows(k, all), step, p, d);
    COMBINE_OF[k->rows](sum, weight + p, stride, all + own_row(k), step, k->hi - k->lo - p, d);
}

static void load_rows(const struct block *k, float *x, const float *all)
{
    for (int64_t r = 0; r < k->rows; r++)
        memcpy(x + r * k->b->d, all + row_of(k, r) * k->b->d, k->b->d * sizeof(float));
}

static void store_rows(const struct block *k, float *all, const float *x)
{
    for (int64_t r = 0; r < k->rows; r++)
        memcpy(all + row_of(k, r) * k->b->d, x + r * k->b->d, k->b->d * sizeof(float));
}

/* Turns products into logits. */
static void shape(float *s, int64_t count, float scale, float softcap)
{
    for (int64_t j = 0; j < count; j++)
        s[j] *= scale;
    if (softcap > 0)
        for (int64_t j = 0; j < count; j++)
            s[j] = softcap * tanhf(s[j] / softcap);
}

/* Sets the weights of keys that a query of the block does not attend to to 0. */
static void keep(float *row, int64_t from, int64_t to, int64_t count)
{
    memset(row, 0, from * sizeof(float));
    memset(row + to, 0, (count - to) * sizeof(float));
}

/* work holds ROWS * (d + b->longest) numbers. */
static void forward(const struct block *k, float *out, float *lse, float *work)
{
    const int64_t d = k->b->d, stride = k->b->longest;
    float *x = work, *weight = work + ROWS * d;
    load_rows(k, x, k->b->q);
    block_products(k, weight, stride, x, k->b->k);
    for (int64_t r = 0; r < k->rows; r++) {
        int64_t from, to;
        seen(k, r, &from, &to);
        const float sink = k->b->sinks ? k->b->sinks[row_of(k, r) % k->b->heads] : -1e30f;
        float *w = weight + r * stride, peak = sink, sum = 0;
        shape(w + from, to - from, k->b->scale, k->b->softcap);
        for (int64_t j = from; j < to; j++)
            peak = w[j] > peak ? w[j] : peak;
        for (int64_t j = from; j < to; j++) {
            w[j] = expf(w[j] - peak);
            sum += w[j];
        }
        if (k->b->sinks)
            sum += expf(sink - peak);
        const float norm = 1 / sum;
        for (int64_t j = from; j < to; j++)
            w[j] *= norm;
        keep(w, from, to, k->hi - k->lo);
        lse[row_of(k, r)] = peak + logf(sum);
    }
    block_combine(k, x, weight, stride, k->b->v);
    store_rows(k, out, x);
}

/* Gradients of a block: of its queries to dq; of the segment's own keys and values added to dk and dv; of the prefix'
 * to before_k and before_v, [before][kv][d]. work holds ROWS * (2 d + 2 b->longest) numbers. */
static void backward(const struct block *k, const float *out, const float *lse, const float *dout, float *dq, float *dk,
                     float *dv, float *before_k, float *before_v, float *work)
{
    const int64_t d = k->b->d, stride = k->b->longest, step = k->b->kv * d, p = of_prefix(k), own = k->hi - k->lo - p;
    const float scale = k->b->scale, softcap = k->b->softcap;
    float *x = work, *dx = x + ROWS * d, *weight = dx + ROWS * d, *dlogit = weight + ROWS * stride;
    load_rows(k, x, k->b->q);
    load_rows(k, dx, dout);
    block_products(k, weight, stride, x, k->b->k);
    block_products(k, dlogit, stride, dx, k->b->v);
    for (int64_t r = 0; r < k->rows; r++) {
        int64_t from, to;
        seen(k, r, &from, &to);
        const float all = lse[row_of(k, r)], mean = dot(dx + r * d, out + row_of(k, r) * d, d);
        float *w = weight + r * stride, *g = dlogit + r * stride;
        shape(w + from, to - from, scale, softcap);
        for (int64_t j = from; j < to; j++) {
            const float slope = softcap > 0 ? scale * (1 - (w[j] / softcap) * (w[j] / softcap)) : scale;
            w[j] = expf(w[j] - all);
            g[j] = w[j] * (g[j] - mean) * slope;
        }
        keep(w, from, to, k->hi - k->lo);
        keep(g, from, to, k->hi - k->lo);
    }
    const int64_t place = (k->lo * k->b->kv + k->h) * d;
    if (p > 0) {
        SPREAD_OF[k->rows](before_k + place, step, dlogit, stride, x, p, d);
        SPREAD_OF[k->rows](before_v + place, step, weight, stride, dx, p, d);
    }
    SPREAD_OF[k->rows](dk + own_row(k), step, dlogit + p, stride, x, own, d);
    SPREAD_OF[k->rows](dv + own_row(k), step, weight + p, stride, dx, own, d);
    block_combine(k, x, dlogit, stride, k->b->k);
    store_rows(k, dq, x);
}

/* out[tokens][heads][d] and lse[tokens][heads], the logarithm of the sum of exponentials of each query's logits, its
 * sink included. */
void segment_attention(float *out, float *lse, const float *q, const float *k, const float *v, const float *sinks,
                       const int64_t *segments, int64_t count, int64_t longest, int64_t heads, int64_t kv, int64_t d,
                       int64_t window, float scale, float softcap)
{
    const struct batch b = {q, k, v, sinks, (const struct segment *)segments, longest,
                            heads, kv, d, window, scale, softcap};
    #pragma omp parallel
    {
        float *work = malloc(ROWS * (d + longest) * sizeof(float));
        #pragma omp for schedule(dynamic, 1)
        for (int64_t job = 0; job < count * kv; job++) {
            const struct segment *s = b.segments + job / kv;
            for (int64_t i = 0, blocks = blocks_of(&b, s); i < blocks; i++) {
                const struct block block = block_of(&b, s, job % kv, i, blocks);
                forward(&block, out, lse, work);
            }
        }
        free(work);
    }
}

/* dq, dk and dv; dk and dv must be zeros on entry. Sinks count by their part in lse. Gradients of prefixes first go to
 * before[2][sum of `before`][kv][d], also zeros on entry, and are then added in the order of the segments, whatever the number of threads. */
void segment_attention_gradient(float *dq, float *dk, float *dv, float *before, const float *dout, const float *out,
                                const float *lse, const float *q, const float *k, const float *v,
                                const int64_t *segments, int64_t count, int64_t longest, int64_t heads, int64_t kv,
                                int64_t d, int64_t window, float scale, float softcap)
{
    const struct batch b = {q, k, v, 0, (const struct segment *)segments, longest,
                            heads, kv, d, window, scale, softcap};
    int64_t *offset = malloc((count + 1) * sizeof(int64_t));
    offset[0] = 0;
    for (int64_t i = 0; i < count; i++)
        offset[i + 1] = offset[i] + b.segments[i].before * kv * d;
    float *before_k = before, *before_v = before + offset[count];
    #pragma omp parallel
    {
        float *work = malloc(ROWS * (2 * d + 2 * longest) * sizeof(float));
        #pragma omp for schedule(dynamic, 1)
        for (int64_t job = 0; job < count * kv; job++) {
            const struct segment *s = b.segments + job / kv;
            const int64_t o = offset[job / kv];
            for (int64_t i = 0, blocks = blocks_of(&b, s); i < blocks; i++) {
                const struct block block = block_of(&b, s, job % kv, i, blocks);
                backward(&block, out, lse, dout, dq, dk, dv, before_k + o, before_v + o, work);
            }
        }
        free(work);
        #pragma omp for schedule(static)
        for (int64_t c = 0; c < (kv * d + LANES - 1) / LANES; c++) {
            const int64_t from = c * LANES, to = from + LANES < kv * d ? from + LANES : kv * d;
            for (int64_t i = 0; i < count; i++)
                for (int64_t j = 0; j < b.segments[i].before; j++) {
                    const int64_t place = (b.segments[i].prefix + j) * kv * d, o = offset[i] + j * kv * d;
                    for (int64_t e = from; e < to; e++) {
                        dk[place + e] += before_k[o + e];
                        dv[place + e] += before_v[o + e];
                    }
                }
        }
    }
    free(offset);
}
