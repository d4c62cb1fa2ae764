/* A softmax over logits that come tile by tile (Milakov and Gimelshein, arXiv:1805.02867), for log-probabilities over a
 * large vocabulary and their gradients. Each row of a tile is read from memory once, and written at most once. */
#include "vectors.h"

/* Adds x = scale * tile[n][w], whose first column is `first`, to peak[n], the largest x so far; total[n] and
 * below[n], the sums of exp(x - peak) and of exp(x - peak) (peak - x); and chosen[n], the x of column target[n]. */
void softmax_add(double *peak, double *total, double *below, float *chosen, const float *tile, const int64_t *target,
                 float scale, int64_t first, int64_t n, int64_t w)
{
    #pragma omp parallel for schedule(static) if (n * w > 1 << 13)
    for (int64_t row = 0; row < n; row++) {
        const float *x = tile + row * w;
        const int64_t own = target[row] - first;
        if (own >= 0 && own < w)
            chosen[row] = x[own] * scale;
        float top = x[0];
        for (int64_t i = 1; i < w; i++)
            top = x[i] > top ? x[i] : top;
        top *= scale;
        if (top > peak[row]) {
            const double rise = top - peak[row], shrink = exp(-rise);
            below[row] = shrink * (below[row] + total[row] * rise);
            total[row] *= shrink;
            peak[row] = top;
        }
        const float at = (float)peak[row];
        double sum = 0, sum_below = 0;
        for (int64_t i = 0; i < w; i += BLOCK) {
            const int64_t end = i + BLOCK < w ? i + BLOCK : w;
            float s = 0, b = 0;
            for (int64_t j = i; j < end; j++) {
                const float distance = at - x[j] * scale, e = expf(-distance);
                s += e;
                b += e * distance;
            }
            sum += s;
            sum_below += b;
        }
        total[row] += sum;
        below[row] += sum_below;
    }
}

/* The gradient of sum(dlogp logp + dentropy entropy) with respect to such a tile, written to out, which may be the tile:
 * with p = exp(x - normalizer), scale (dlogp (target? - p) - dentropy p (log p + entropy)). dentropy may be null. */
void softmax_gradient(float *out, const float *tile, const float *normalizer, const int64_t *target, const float *entropy,
                      const float *dlogp, const float *dentropy, float scale, int64_t first, int64_t n, int64_t w)
{
    #pragma omp parallel for schedule(static) if (n * w > 1 << 13)
    for (int64_t row = 0; row < n; row++) {
        const float *x = tile + row * w;
        float *d = out + row * w;
        const float all = normalizer[row], a = -scale * dlogp[row];
        if (dentropy && dentropy[row] != 0) {
            const float b = -scale * dentropy[row], c = a + b * entropy[row];
            #pragma omp simd
            for (int64_t i = 0; i < w; i++) {
                const float logp = x[i] * scale - all;
                d[i] = (c + b * logp) * expf(logp);
            }
        } else {
            #pragma omp simd
            for (int64_t i = 0; i < w; i++)
                d[i] = a * expf(x[i] * scale - all);
        }
        const int64_t own = target[row] - first;
        if (own >= 0 && own < w)
            d[own] -= a;
    }
}
