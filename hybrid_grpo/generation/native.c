/* Decoding one token a sequence on a CPU, in float32: what torch's kernels for large matrices do slowly.
 *
 * Plain C with the vector extensions of GCC and Clang, compiled on first use (native.py). Every sum runs in an
 * order that does not depend on how many rows there are, so a sequence has the same result in any batch.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef float vec4 __attribute__((vector_size(16), aligned(4), may_alias));

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int lanes __attribute__((vector_size(4 * LANES)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (lanes){__VA_ARGS__})
#endif

/* Keeps a vector that is used several times in a register; the compiler would load it again for every use. */
#ifdef __AVX512F__
#define KEEP(vector) __asm__("" : "+v"(vector))
#else
#define KEEP(vector)
#endif
#define UNROLL _Pragma("GCC unroll 8")

/* The sums of four vectors' lanes: halves of two share a vector, then quarters of four. */
static inline vec4 totals(vec a, vec b, vec c, vec d)
{
    const vec ab = SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
                 + SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    const vec cd = SHUFFLE(c, d, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
                 + SHUFFLE(c, d, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    vec sum = SHUFFLE(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
            + SHUFFLE(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    sum += SHUFFLE(sum, sum, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    sum += SHUFFLE(sum, sum, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    return (vec4){sum[0], sum[4], sum[8], sum[12]};
}

#define AT(pointer, i) (*(const vec *)((pointer) + (i)))
#define BLOCK (4 * LANES)

/* Dot products of a[d] with four rows, `stride` apart. */
static inline vec4 dots(const float *a, const float *rows, int64_t stride, int64_t d)
{
    vec sum[4] = {{0}, {0}, {0}, {0}};
    int64_t i = 0;
    for (; i + LANES <= d; i += LANES)
        for (int j = 0; j < 4; j++)
            sum[j] += AT(a, i) * AT(rows, j * stride + i);
    vec4 result = totals(sum[0], sum[1], sum[2], sum[3]);
    for (; i < d; i++)
        for (int j = 0; j < 4; j++)
            result[j] += a[i] * rows[j * stride + i];
    return result;
}

static inline float dot(const float *a, const float *b, int64_t d)
{
    float sum = 0;
    for (int64_t i = 0; i < d; i++)
        sum += a[i] * b[i];
    return sum;
}

/* sum[d] = shrink * sum + weight[count] rows[count][d], the rows `stride` apart. */
static inline void add_rows(float *sum, float shrink, const float *weight, const float *rows, int64_t stride,
                            int64_t count, int64_t d)
{
    int64_t i = 0;
    for (; i + BLOCK <= d; i += BLOCK) {
        vec s[4];
        for (int l = 0; l < 4; l++)
            s[l] = shrink * AT(sum, i + l * LANES);
        for (int64_t j = 0; j < count; j++)
            for (int l = 0; l < 4; l++)
                s[l] += weight[j] * AT(rows, j * stride + i + l * LANES);
        for (int l = 0; l < 4; l++)
            *(vec *)(sum + i + l * LANES) = s[l];
    }
    for (; i < d; i++) {
        float s = shrink * sum[i];
        for (int64_t j = 0; j < count; j++)
            s += weight[j] * rows[j * stride + i];
        sum[i] = s;
    }
}

/* R rows of x times four rows of the weight: each loaded vector meets several others. */
#define TILE(R)                                                                                                      \
    static void tile_##R(float *out, const float *x, const float *w, const float *bias, int64_t n, int64_t k)        \
    {                                                                                                                \
        vec sum[R][4];                                                                                               \
        UNROLL for (int r = 0; r < R; r++)                                                                           \
            UNROLL for (int c = 0; c < 4; c++)                                                                       \
                sum[r][c] = (vec){0};                                                                                \
        int64_t i = 0;                                                                                               \
        for (; i + LANES <= k; i += LANES) {                                                                         \
            vec row[R];                                                                                              \
            UNROLL for (int r = 0; r < R; r++) {                                                                     \
                row[r] = AT(x, r * k + i);                                                                           \
                KEEP(row[r]);                                                                                        \
            }                                                                                                        \
            UNROLL for (int c = 0; c < 4; c++) {                                                                     \
                const vec weight = AT(w, c * k + i);                                                                 \
                UNROLL for (int r = 0; r < R; r++)                                                                   \
                    sum[r][c] += row[r] * weight;                                                                    \
            }                                                                                                        \
        }                                                                                                            \
        UNROLL for (int r = 0; r < R; r++) {                                                                         \
            vec4 result = totals(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);                                        \
            for (int64_t j = i; j < k; j++)                                                                          \
                for (int c = 0; c < 4; c++)                                                                          \
                    result[c] += x[r * k + j] * w[c * k + j];                                                        \
            if (bias)                                                                                                \
                result += *(const vec4 *)bias;                                                                       \
            *(vec4 *)(out + r * n) = result;                                                                         \
        }                                                                                                            \
    }
TILE(1)
TILE(2)
TILE(3)
TILE(4)
TILE(5)
TILE(6)

typedef void tile(float *, const float *, const float *, const float *, int64_t, int64_t);
static tile *const TILES[] = {0, tile_1, tile_2, tile_3, tile_4, tile_5, tile_6};

/* out[m][n] = x[m][k] w[n][k]^T + bias[n]; a strip of the weight stays in the cache while all rows pass. */
void linear(float *out, const float *x, const float *w, const float *bias, int64_t m, int64_t n, int64_t k)
{
    const int64_t strip = 32, strips = (n + strip - 1) / strip, passes = (m + 5) / 6;
    #pragma omp parallel for schedule(static) if (m * n * k > 1 << 15)
    for (int64_t s = 0; s < strips; s++) {
        const int64_t end = (s + 1) * strip < n ? (s + 1) * strip : n;
        /* Passes of about the same number of rows: 7 are 4 and 3, not 6 and 1. */
        for (int64_t p = 0; p < passes; p++) {
            const int64_t r = m * p / passes, rows = m * (p + 1) / passes - r;
            int64_t c = s * strip;
            for (; c + 4 <= end; c += 4)
                TILES[rows](out + r * n + c, x + r * k, w + c * k, bias ? bias + c : 0, n, k);
            for (; c < end; c++)
                for (int64_t i = r; i < r + rows; i++)
                    out[i * n + c] = dot(x + i * k, w + c * k, k) + (bias ? bias[c] : 0);
        }
    }
}

/* out[m][d] = x / rms(x) * (weight + offset) (Zhang and Sennrich, arXiv:1910.07467, equation 4). */
void rms_norm(float *out, const float *x, const float *weight, float offset, float epsilon, int64_t m, int64_t d)
{
    #pragma omp parallel for schedule(static) if (m * d > 1 << 14)
    for (int64_t r = 0; r < m; r++) {
        const float *row = x + r * d;
        const float scale = 1 / sqrtf(dot(row, row, d) / d + epsilon);
        for (int64_t i = 0; i < d; i++)
            out[r * d + i] = row[i] * scale * (weight[i] + offset);
    }
}

#define MOST_SCORES 2048
#define MOST_SUMS 8192

/* One new token of every sequence: its key and value go into the cache, its queries attend to all of it.
 *
 * q[n][heads][d] by strides, key and value [n][kv][d] by strides; pools [pages][page][kv][d]; table[n][width] names
 * the pages of a sequence; position[n] is that of the new token. Softmax over pages is Milakov and Gimelshein's
 * online one (arXiv:1805.02867). (heads / kv) * page is at most MOST_SCORES, (heads / kv) * d at most MOST_SUMS.
 */
void decode_attention(float *out, const float *q, int64_t q_row, int64_t q_head, const float *key, int64_t key_row,
                      int64_t key_head, const float *value, int64_t value_row, int64_t value_head, float *keys,
                      float *values, const int32_t *table, const int64_t *position, int64_t n, int64_t heads, int64_t kv,
                      int64_t d, int64_t page, int64_t width, int64_t window, float scale, float softcap)
{
    const int64_t group = heads / kv;
    #pragma omp parallel for schedule(dynamic, 1)
    for (int64_t job = 0; job < n * kv; job++) {
        const int64_t row = job / kv, h = job % kv, last = position[row];
        const int64_t first = window > 0 && last >= window ? last - window + 1 : 0;
        const int32_t *pages = table + row * width;
        const int64_t entry = ((pages[last / page] * page + last % page) * kv + h) * d;
        memcpy(keys + entry, key + row * key_row + h * key_head, d * sizeof(float));
        memcpy(values + entry, value + row * value_row + h * value_head, d * sizeof(float));

        float score[MOST_SCORES], sum[MOST_SUMS], top[64], norm[64];
        memset(sum, 0, group * d * sizeof(float));
        for (int64_t g = 0; g < group; g++) {
            top[g] = -1e30f;
            norm[g] = 0;
        }
        for (int64_t p = first / page; p <= last / page; p++) {
            const int64_t start = p * page < first ? first - p * page : 0;
            const int64_t end = (p + 1) * page <= last ? page : last - p * page + 1;
            const float *K = keys + (pages[p] * page * kv + h) * d, *V = values + (pages[p] * page * kv + h) * d;
            for (int64_t g = 0; g < group; g++) {
                const float *own = q + row * q_row + (h * group + g) * q_head;
                float *s = score + g * page;
                int64_t j = start;
                for (; j + 4 <= end; j += 4)
                    *(vec4 *)(s + j) = scale * dots(own, K + j * kv * d, kv * d, d);
                for (; j < end; j++)
                    s[j] = scale * dot(own, K + j * kv * d, d);
            }
            for (int64_t g = 0; g < group; g++) {
                float *s = score + g * page, peak = top[g];
                if (softcap > 0)
                    for (int64_t j = start; j < end; j++)
                        s[j] = softcap * tanhf(s[j] / softcap);
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
                add_rows(sum + g * d, shrink, s + start, V + start * kv * d, kv * d, end - start, d);
            }
        }
        for (int64_t g = 0; g < group; g++)
            for (int64_t i = 0; i < d; i++)
                out[(row * heads + h * group + g) * d + i] = sum[g * d + i] / norm[g];
    }
}

/* Rotates each head of x[n][heads][d] by its row's cos and sin[n][d], halves apart (Su et al., arXiv:2104.09864). */
static void rotate(float *x, const float *cos, const float *sin, int64_t n, int64_t heads, int64_t d)
{
    #pragma omp parallel for schedule(static) if (n * heads * d > 1 << 14)
    for (int64_t row = 0; row < n; row++)
        for (int64_t h = 0; h < heads; h++) {
            float *a = x + (row * heads + h) * d, *b = a + d / 2;
            const float *c = cos + row * d, *s = sin + row * d;
            for (int64_t i = 0; i < d / 2; i++) {
                const float old = a[i];
                a[i] = old * c[i] - b[i] * s[i];
                b[i] = b[i] * c[d / 2 + i] + old * s[d / 2 + i];
            }
        }
}

struct layer {
    const float *norm, *q, *q_bias, *k, *k_bias, *v, *v_bias, *q_norm, *k_norm, *o, *o_bias;
    const float *mlp_norm, *gate, *up, *down;
    int64_t hidden, heads, kv, d, inner, window;
    float epsilon, scale, softcap;
};

/* A whole decoder layer of the Llama family (Touvron et al., arXiv:2302.13971, section 2.2) over x[n][hidden], in
 * place, for one new token of every sequence. `work` holds n * (hidden + 2 heads d + 2 kv d + 2 inner) numbers; the
 * rest is as for decode_attention.
 */
void decoder_layer(const struct layer *l, float *x, float *work, const float *cos, const float *sin, float *keys,
                   float *values, const int32_t *table, const int64_t *position, int64_t n, int64_t page, int64_t width)
{
    const int64_t hidden = l->hidden, wide = l->heads * l->d, narrow = l->kv * l->d, inner = l->inner;
    float *t = work, *q = t + n * hidden, *out = q + n * wide, *k = out + n * wide, *v = k + n * narrow;
    float *gate = v + n * narrow, *up = gate + n * inner;
    rms_norm(t, x, l->norm, 0, l->epsilon, n, hidden);
    linear(q, t, l->q, l->q_bias, n, wide, hidden);
    linear(k, t, l->k, l->k_bias, n, narrow, hidden);
    linear(v, t, l->v, l->v_bias, n, narrow, hidden);
    if (l->q_norm)
        rms_norm(q, q, l->q_norm, 0, l->epsilon, n * l->heads, l->d);
    if (l->k_norm)
        rms_norm(k, k, l->k_norm, 0, l->epsilon, n * l->kv, l->d);
    rotate(q, cos, sin, n, l->heads, l->d);
    rotate(k, cos, sin, n, l->kv, l->d);
    decode_attention(out, q, wide, l->d, k, narrow, l->d, v, narrow, l->d, keys, values, table, position, n, l->heads,
                     l->kv, l->d, page, width, l->window, l->scale, l->softcap);
    linear(t, out, l->o, l->o_bias, n, hidden, wide);
    for (int64_t i = 0; i < n * hidden; i++)
        x[i] += t[i];
    rms_norm(t, x, l->mlp_norm, 0, l->epsilon, n, hidden);
    linear(gate, t, l->gate, 0, n, inner, hidden);
    linear(up, t, l->up, 0, n, inner, hidden);
    #pragma omp parallel for schedule(static) if (n * inner > 1 << 13)
    for (int64_t row = 0; row < n; row++)
        for (int64_t i = row * inner; i < (row + 1) * inner; i++)
            gate[i] = gate[i] / (1 + expf(-gate[i])) * up[i];
    linear(t, gate, l->down, 0, n, hidden, inner);
    for (int64_t i = 0; i < n * hidden; i++)
        x[i] += t[i];
}
