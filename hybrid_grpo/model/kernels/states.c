/* One new token of every sequence through the layers that carry a state, on a CPU in float32: each state is read and
 * written once, in place. The order of every sum does not depend on the number of rows.
 */
#include "vectors.h"

#define WIDEST 512

/* out[n][channels] = the causal convolution over the last `kernel` tokens, whose newest is x; with `silu` behind it.
 * state[n][channels][kernel] has the tokens before, and then those with x. */
void conv_step(float *out, const float *x, float *state, const float *weight, const float *bias, int64_t silu, int64_t n,
               int64_t channels, int64_t kernel)
{
    #pragma omp parallel for schedule(static) if (n * channels > 1 << 12)
    for (int64_t row = 0; row < n; row++)
        for (int64_t c = 0; c < channels; c++) {
            float *s = state + (row * channels + c) * kernel;
            for (int64_t i = 1; i < kernel; i++)
                s[i - 1] = s[i];
            s[kernel - 1] = x[row * channels + c];
            const float sum = dot(s, weight + c * kernel, kernel) + (bias ? bias[c] : 0);
            out[row * channels + c] = silu ? sum / (1 + expf(-sum)) : sum;
        }
}

/* x[d] times `scale`, to length 1 before where `unit` is set. */
static void scaled(float *out, const float *x, float scale, int64_t unit, int64_t d)
{
    if (unit)
        scale /= sqrtf(dot(x, x, d) + 1e-6f);
    for (int64_t i = 0; i < d; i++)
        out[i] = x[i] * scale;
}

/* The state[dk][dv] forgets by decay[dk] and takes in what value[dv] adds to what it returns for key[dk], times `strength`;
 * out[dv] is what it then returns for query[dk] (Yang et al., arXiv:2412.06464, equation 10). */
static void delta(float *out, float *state, const float *query, const float *key, const float *value, const float *decay,
                  float strength, int64_t dk, int64_t dv)
{
    float weight[WIDEST], change[WIDEST];
    for (int64_t i = 0; i < dk; i++)
        weight[i] = key[i] * decay[i];
    memset(change, 0, dv * sizeof(float));
    add_rows(change, 0, weight, state, dv, dk, dv);
    for (int64_t j = 0; j < dv; j++)
        change[j] = (value[j] - change[j]) * strength;
    int64_t j = 0;
    for (; j + BLOCK <= dv; j += BLOCK) {
        vec sum[4] = {{0}, {0}, {0}, {0}};
        for (int64_t i = 0; i < dk; i++)
            for (int l = 0; l < 4; l++) {
                vec *at = (vec *)(state + i * dv + j + l * LANES);
                *at = decay[i] * *at + key[i] * AT(change, j + l * LANES);
                sum[l] += query[i] * *at;
            }
        for (int l = 0; l < 4; l++)
            *(vec *)(out + j + l * LANES) = sum[l];
    }
    for (; j < dv; j++) {
        float sum = 0;
        for (int64_t i = 0; i < dk; i++) {
            state[i * dv + j] = decay[i] * state[i * dv + j] + key[i] * change[j];
            sum += query[i] * state[i * dv + j];
        }
        out[j] = sum;
    }
}

/* Gated delta rule: state[n][heads][dk][dv], out[n][heads][dv]; query, key [n][key_heads][dk] and value [n][heads][dv]
 * with rows apart as given; strength[n][heads]; log_decay[n][heads][channels], where channels is 1 or dk. Queries and
 * keys are brought to length 1 where `unit` is set. dk and dv are at most WIDEST. */
void delta_step(float *out, float *state, const float *query, int64_t query_row, const float *key, int64_t key_row,
                const float *value, int64_t value_row, const float *log_decay, const float *strength, int64_t unit,
                int64_t n, int64_t heads, int64_t key_heads, int64_t dk, int64_t dv, int64_t channels)
{
    #pragma omp parallel for schedule(static)
    for (int64_t job = 0; job < n * heads; job++) {
        const int64_t row = job / heads, h = job % heads, from = h / (heads / key_heads) * dk;
        float q[WIDEST], k[WIDEST], decay[WIDEST];
        scaled(q, query + row * query_row + from, 1 / sqrtf(dk), unit, dk);
        scaled(k, key + row * key_row + from, 1, unit, dk);
        for (int64_t i = 0; i < dk; i++)
            decay[i] = channels == 1 && i ? decay[0] : expf(log_decay[job * channels + i]);
        delta(out + job * dv, state + job * dk * dv, q, k, value + row * value_row + h * dv, decay, strength[job], dk, dv);
    }
}

/* Mamba 2 (Dao and Gu, arXiv:2405.21060, equation 1): state[n][heads][d][size], x and step[n][heads][d], a[heads];
 * b, c[n][groups][size] with rows apart as given; skip[heads] or null; out[n][heads][d]. */
void mamba_step(float *out, float *state, const float *x, int64_t x_row, const float *step, const float *a,
                const float *b, int64_t b_row, const float *c, int64_t c_row, const float *skip, int64_t n, int64_t heads,
                int64_t d, int64_t size, int64_t groups)
{
    #pragma omp parallel for schedule(static)
    for (int64_t job = 0; job < n * heads; job++) {
        const int64_t row = job / heads, h = job % heads, from = h / (heads / groups) * size;
        const float *B = b + row * b_row + from, *C = c + row * c_row + from;
        for (int64_t p = 0; p < d; p++) {
            const float input = x[row * x_row + h * d + p], length = step[job * d + p];
            const float decay = expf(length * a[h]), weight = length * input;
            float *s = state + (job * d + p) * size, sum = 0;
            for (int64_t i = 0; i < size; i++) {
                s[i] = decay * s[i] + weight * B[i];
                sum += s[i] * C[i];
            }
            out[job * d + p] = sum + (skip ? skip[h] * input : 0);
        }
    }
}

/* out[rows][d] = x / rms(x) * weight * silu(gate). */
void gated_norm(float *out, const float *x, const float *gate, const float *weight, float epsilon, int64_t rows, int64_t d)
{
    #pragma omp parallel for schedule(static) if (rows * d > 1 << 12)
    for (int64_t r = 0; r < rows; r++) {
        const float *own = x + r * d, *g = gate + r * d, scale = 1 / sqrtf(dot(own, own, d) / d + epsilon);
        for (int64_t i = 0; i < d; i++)
            out[r * d + i] = own[i] * scale * weight[i] * g[i] / (1 + expf(-g[i]));
    }
}
