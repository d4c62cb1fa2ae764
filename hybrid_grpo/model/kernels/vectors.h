/* Parts of the kernels: vectors of floats, and small matrix products in which the order of every sum does not depend on
 * the number of rows. */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* A product's sums, ROWS times four vectors, and what they are made from must fit in the processor's registers: those of
 * AVX-512 are 32 of 16 floats, those of AVX2 16 of 8. */
#ifdef __AVX512F__
#define LANES 16
#define ROWS 6
#else
#define LANES 8
#define ROWS 3
#endif
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef float vec4 __attribute__((vector_size(16), aligned(4), may_alias));

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int lanes __attribute__((vector_size(4 * LANES)));
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (lanes){__VA_ARGS__})
#endif

/* Keeps a vector in a register while it is used several times; the compiler would load it for every use. */
#if defined(__AVX512F__)
#define KEEP(vector) __asm__("" : "+v"(vector))
#elif defined(__AVX2__)
#define KEEP(vector) __asm__("" : "+x"(vector))
#else
#define KEEP(vector)
#endif
#define UNROLL _Pragma("GCC unroll 8")

/* The sums of four vectors' lanes: halves of two share a vector, then quarters of four. */
static inline vec4 totals(vec a, vec b, vec c, vec d)
{
#if LANES == 16
    const vec ab = SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
                 + SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    const vec cd = SHUFFLE(c, d, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
                 + SHUFFLE(c, d, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    vec sum = SHUFFLE(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
            + SHUFFLE(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    sum += SHUFFLE(sum, sum, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    sum += SHUFFLE(sum, sum, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    return (vec4){sum[0], sum[4], sum[8], sum[12]};
#else
    const vec ab = SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    const vec cd = SHUFFLE(c, d, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(c, d, 4, 5, 6, 7, 12, 13, 14, 15);
    vec sum = SHUFFLE(ab, cd, 0, 1, 4, 5, 8, 9, 12, 13) + SHUFFLE(ab, cd, 2, 3, 6, 7, 10, 11, 14, 15);
    sum += SHUFFLE(sum, sum, 1, 0, 3, 2, 5, 4, 7, 6);
    return (vec4){sum[0], sum[2], sum[4], sum[6]};
#endif
}

#define AT(pointer, i) (*(const vec *)((pointer) + (i)))
#define BLOCK (4 * LANES)

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

/* Instances of a template, one for each number of rows that is handled at once, at most ROWS. */
#define EACH(TEMPLATE) TEMPLATE(1) TEMPLATE(2) TEMPLATE(3) TEMPLATE(4) TEMPLATE(5) TEMPLATE(6)

/* out[R][4], its rows n apart, from x[R][k] and four rows of the weight, `step` apart: each loaded vector, of LONG numbers
 * of a TYPE, meets several others. With FIRST the next four rows of the weight are asked for, which later passes find in
 * the cache. */
#define TILE(R, NAME, FIRST, TYPE, LONG, ADD)                                                                        \
    static void NAME##_##R(float *out, const void *from, const void *weights, const float *bias, int64_t n,          \
                           int64_t step, int64_t k)                                                                  \
    {                                                                                                                \
        const TYPE *x = from, *w = weights;                                                                          \
        vec sum[R][4];                                                                                               \
        UNROLL for (int r = 0; r < R; r++)                                                                           \
            UNROLL for (int c = 0; c < 4; c++)                                                                       \
                sum[r][c] = (vec){0};                                                                                \
        int64_t i = 0;                                                                                               \
        for (; i + LONG <= k; i += LONG) {                                                                           \
            vec row[R];                                                                                              \
            UNROLL for (int r = 0; r < R; r++) {                                                                     \
                row[r] = AT(x, r * k + i);                                                                           \
                KEEP(row[r]);                                                                                        \
            }                                                                                                        \
            UNROLL for (int c = 0; c < 4; c++) {                                                                     \
                const vec weight = AT(w, c * step + i);                                                              \
                if (FIRST)                                                                                           \
                    __builtin_prefetch(w + (c + 4) * step + i);                                                      \
                UNROLL for (int r = 0; r < R; r++)                                                                   \
                    sum[r][c] = ADD(sum[r][c], row[r], weight);                                                      \
            }                                                                                                        \
        }                                                                                                            \
        UNROLL for (int r = 0; r < R; r++) {                                                                         \
            vec4 result = totals(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);                                        \
            for (int64_t j = i; j < k; j++)                                                                          \
                for (int c = 0; c < 4; c++)                                                                          \
                    result[c] += x[r * k + j] * w[c * step + j];                                                     \
            if (bias)                                                                                                \
                result += *(const vec4 *)bias;                                                                       \
            *(vec4 *)(out + r * n) = result;                                                                         \
        }                                                                                                            \
    }
#define MADD(sum, a, b) ((sum) + (a) * (b))
#define TILES(R) TILE(R, first, 1, float, LANES, MADD) TILE(R, later, 0, float, LANES, MADD)
EACH(TILES)

typedef void tile(float *, const void *, const void *, const float *, int64_t, int64_t, int64_t);
static tile *const FIRST[] = {0, first_1, first_2, first_3, first_4, first_5, first_6};
static tile *const LATER[] = {0, later_1, later_2, later_3, later_4, later_5, later_6};

/* out[rows][count] = x[rows][d] w[count][d]^T, the rows of out `stride` and those of w `step` apart. */
static void products(float *out, int64_t stride, const float *x, int64_t rows, const float *w, int64_t step, int64_t count,
                     int64_t d)
{
    int64_t c = 0;
    for (; c + 4 <= count; c += 4)
        LATER[rows](out + c, x, w + c * step, 0, stride, step, d);
    for (; c < count; c++)
        for (int64_t r = 0; r < rows; r++)
            out[r * stride + c] = dot(x + r * d, w + c * step, d);
}

/* sum[R][d] += weight[R][count] rows[count][d], the weights `stride` and the rows `step` apart; VEC(row, 0) and (row, 1)
 * are the next numbers of a row, of a TYPE. */
#define COMBINE(R, NAME, TYPE, VEC)                                                                                  \
    static void NAME##_##R(float *sum, const float *weight, int64_t stride, const void *from, int64_t step,          \
                           int64_t count, int64_t d)                                                                 \
    {                                                                                                                \
        const TYPE *rows = from;                                                                                     \
        int64_t i = 0;                                                                                               \
        for (; i + 2 * LANES <= d; i += 2 * LANES) {                                                                 \
            vec s[R][2];                                                                                             \
            UNROLL for (int r = 0; r < R; r++)                                                                       \
                UNROLL for (int l = 0; l < 2; l++)                                                                   \
                    s[r][l] = AT(sum, r * d + i + l * LANES);                                                        \
            for (int64_t j = 0; j < count; j++)                                                                      \
                UNROLL for (int r = 0; r < R; r++)                                                                   \
                    UNROLL for (int l = 0; l < 2; l++)                                                               \
                        s[r][l] += weight[r * stride + j] * VEC(rows + j * step + i, l);                             \
            UNROLL for (int r = 0; r < R; r++)                                                                       \
                UNROLL for (int l = 0; l < 2; l++)                                                                   \
                    *(vec *)(sum + r * d + i + l * LANES) = s[r][l];                                                 \
        }                                                                                                            \
        for (int r = 0; r < R; r++)                                                                                  \
            for (int64_t j = 0; j < count; j++)                                                                      \
                for (int64_t c = i; c < d; c++)                                                                      \
                    sum[r * d + c] += weight[r * stride + j] * rows[j * step + c];                                   \
    }
#define FLOATS(row, l) AT(row, (l) * LANES)
#define COMBINES(R) COMBINE(R, combine, float, FLOATS)
EACH(COMBINES)

typedef void combining(float *, const float *, int64_t, const void *, int64_t, int64_t, int64_t);
static combining *const COMBINE_OF[] = {0, combine_1, combine_2, combine_3, combine_4, combine_5, combine_6};
