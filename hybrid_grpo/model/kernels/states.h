/* Parts of the kernels for layers that carry a state: one row or one head of them. */
#include "vectors.h"

#define WIDEST 512

/* out[channels] = the causal convolution over the last `kernel` tokens, whose newest is x; with `silu` behind it.
 * state[channels][kernel] has the tokens before, and then those with x. */
static inline void conv_row(float *out, const float *x, float *state, const float *weight, const float *bias, int64_t silu,
                            int64_t channels, int64_t kernel)
{
    for (int64_t c = 0; c < channels; c++) {
        float *s = state + c * kernel;
        for (int64_t i = 1; i < kernel; i++)
            s[i - 1] = s[i];
        s[kernel - 1] = x[c];
        const float sum = dot(s, weight + c * kernel, kernel) + (bias ? bias[c] : 0);
        out[c] = silu ? sum / (1 + expf(-sum)) : sum;
    }
}

/* x[d] times `scale`, to length 1 before where `unit` is set. */
static inline void scaled(float *out, const float *x, float scale, int64_t unit, int64_t d)
{
    if (unit)
        scale /= sqrtf(dot(x, x, d) + 1e-6f);
    for (int64_t i = 0; i < d; i++)
        out[i] = x[i] * scale;
}

/* The state[dk][dv] forgets by decay[dk] and takes in what value[dv] adds to what it returns for key[dk], times `strength`;
 * out[dv] is what it then returns for query[dk] (Yang et al., arXiv:2412.06464, equation 10). */
static inline void delta(float *out, float *state, const float *query, const float *key, const float *value, const float *decay,
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

/* The same for one head as layers have it: the logarithm of the decay, one for the head or one for each of the
 * `channels`; the query divided by the root of dk; query and key brought to length 1 before where `unit` is set. */
static inline void delta_head(float *out, float *state, const float *query, const float *key, const float *value,
                              const float *log_decay, int64_t channels, float strength, int64_t unit, int64_t dk,
                              int64_t dv)
{
    float q[WIDEST], k[WIDEST], decay[WIDEST];
    scaled(q, query, 1 / sqrtf(dk), unit, dk);
    scaled(k, key, 1, unit, dk);
    for (int64_t i = 0; i < dk; i++)
        decay[i] = channels == 1 && i ? decay[0] : expf(log_decay[i]);
    delta(out, state, q, k, value, decay, strength, dk, dv);
}

/* Head h of a state space: state[d][size], x, step and out[d], b and c[size]; a and skip of all heads, see states.c. */
static inline void mamba_head(float *out, float *state, const float *x, const float *step, const float *a, const float *b,
                              const float *c, const float *skip, int64_t h, int64_t by_channel, int64_t d, int64_t size)
{
    for (int64_t p = 0; p < d; p++) {
        const int64_t channel = h * d + p;
        const float decay = by_channel ? 0 : expf(step[p] * a[h]), weight = step[p] * x[p];
        float *s = state + p * size, sum = 0;
        for (int64_t i = 0; i < size; i++) {
            s[i] = (by_channel ? expf(step[p] * a[channel * size + i]) : decay) * s[i] + weight * b[i];
            sum += s[i] * c[i];
        }
        out[p] = sum + (skip ? skip[by_channel ? channel : h] * x[p] : 0);
    }
}

/* out[d] = x / rms(x) * weight * silu(gate). */
static inline void gated_norm_row(float *out, const float *x, const float *gate, const float *weight, float epsilon,
                                  int64_t d)
{
    const float scale = 1 / sqrtf(dot(x, x, d) / d + epsilon);
    for (int64_t i = 0; i < d; i++)
        out[i] = x[i] * scale * weight[i] * gate[i] / (1 + expf(-gate[i]));
}
