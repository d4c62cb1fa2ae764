/* One new token of every sequence through the layers that carry a state, on a CPU in float32: each state is read and
 * written once, in place. The order of every sum does not depend on the number of rows.
 */
#include "states.h"

/* out[n][channels] = the causal convolution over the last `kernel` tokens, whose newest is x, with rows apart as given;
 * with `silu` behind it. state[n][channels][kernel] has the tokens before, and then those with x. */
void conv_step(float *out, const float *x, int64_t x_row, float *state, const float *weight, const float *bias,
               int64_t silu, int64_t n, int64_t channels, int64_t kernel)
{
    #pragma omp parallel for schedule(static) if (n * channels > 1 << 12)
    for (int64_t row = 0; row < n; row++)
        conv_row(out + row * channels, x + row * x_row, state + row * channels * kernel, weight, bias, silu, channels,
                 kernel);
}

/* Gated delta rule: state[n][heads][dk][dv], out[n][heads][dv]; query, key [n][key_heads][dk] and value [n][heads][dv]
 * with rows apart as given; strength[n][heads]; log_decay[n][heads][channels], where channels is 1 or dk. Queries and
 * keys are brought to length 1 where `unit` is set. dk and dv are at most WIDEST. */
void delta_step(float *out, float *state, const float *query, int64_t query_row, const float *key, int64_t key_row,
                const float *value, int64_t value_row, const float *log_decay, const float *strength,
                int64_t unit, int64_t n, int64_t heads, int64_t key_heads, int64_t dk, int64_t dv, int64_t channels)
{
    #pragma omp parallel for schedule(static)
    for (int64_t job = 0; job < n * heads; job++) {
        const int64_t row = job / heads, h = job % heads, from = h / (heads / key_heads) * dk;
        delta_head(out + job * dv, state + job * dk * dv, query + row * query_row + from, key + row * key_row + from,
                   value + row * value_row + h * dv, log_decay + job * channels, channels, strength[job], unit, dk, dv);
    }
}

/* A state space (Gu and Dao, arXiv:2312.00752, equation 2): state[n][heads][d][size], x and step[n][heads][d]; b and
 * c[n][groups][size] with rows apart as given; a[heads] and skip[heads] or null, or, `by_channel` (Mamba 1),
 * a[heads][d][size] and skip[heads][d]; out[n][heads][d]. */
void mamba_step(float *out, float *state, const float *x, int64_t x_row, const float *step, const float *a,
                const float *b, int64_t b_row, const float *c, int64_t c_row, const float *skip,
                int64_t by_channel, int64_t n, int64_t heads, int64_t d, int64_t size, int64_t groups)
{
    #pragma omp parallel for schedule(static)
    for (int64_t job = 0; job < n * heads; job++) {
        const int64_t row = job / heads, h = job % heads, from = h / (heads / groups) * size, at = job * d;
        mamba_head(out + at, state + at * size, x + row * x_row + h * d, step + at, a, b + row * b_row + from,
                   c + row * c_row + from, skip, h, by_channel, d, size);
    }
}

/* out[rows][d] = x / rms(x) * weight * silu(gate). */
void gated_norm(float *out, const float *x, const float *gate, const float *weight, float epsilon, int64_t rows, int64_t d)
{
    #pragma omp parallel for schedule(static) if (rows * d > 1 << 12)
    for (int64_t r = 0; r < rows; r++)
        gated_norm_row(out + r * d, x + r * d, gate + r * d, weight, epsilon, d);
}
