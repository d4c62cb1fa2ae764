/* bfloat16: half of a float, and products of it: by the tiles of Intel's AMX (Intel 64 and IA-32 manual, volume 1, chapter
 * 18), where a compiler's target and the kernel of the system have them; else by AVX-512, if it has AVX512_BF16. */
typedef uint16_t half __attribute__((may_alias));
typedef uint32_t word __attribute__((may_alias)); /* two halves, or the bits of a float */

typedef word words __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline void widen(float *out, const half *x, int64_t n)
{
    word *bits = (word *)out;
    for (int64_t i = 0; i < n; i++)
        bits[i] = (word)x[i] << 16;
}

/* Rounds to the nearest, ties to even. */
static inline void narrow(half *out, const float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        word bits;
        memcpy(&bits, x + i, sizeof bits);
        out[i] = (half)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}

/* Numbers of two vectors, as pairs in one. */
#define BOTH (2 * LANES)

#ifdef __AVX512BF16__
#include <immintrin.h>
#define MADD_PAIRS(sum, a, b) ((vec)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)(a), (__m512bh)(b)))
#define PAIRS(R) TILE(R, pairs, 0, half, BOTH, MADD_PAIRS)
EACH(PAIRS)
/* Of each pair the first, and then of each the second. */
#define APART(row, l) ((l) ? (vec)(*(const words *)(row) & 0xffff0000) : (vec)(*(const words *)(row) << 16))
#define COMBINE_APART(R) COMBINE(R, apart, half, APART)
EACH(COMBINE_APART)
static tile *const PAIRED[] = {0, pairs_1, pairs_2, pairs_3, pairs_4, pairs_5, pairs_6};
static combining *const COMBINE_PAIRED[] = {0, apart_1, apart_2, apart_3, apart_4, apart_5, apart_6};
#else
static tile *const PAIRED[ROWS + 1] = {0};
static combining *const COMBINE_PAIRED[ROWS + 1] = {0};
#endif

/* A tile has 16 rows of 16 words. */
#define SIDE 16
/* Tiles of an input x[m][k]. */
#define PACKS(m, k) (((m) + SIDE - 1) / SIDE * ((k) / (2 * SIDE)))

#if defined(__AMX_BF16__) && !defined(__clang__) /* which has no __builtin_shuffle */
#include <sys/syscall.h>
#include <unistd.h>

/* In each step the halves of pairs of rows change places: numbers, then pairs of them, and so on (Eklundh, 1972). */
static inline void transpose(words *rows)
{
    _Pragma("GCC unroll 4") for (int step = 1; step < SIDE; step *= 2) {
        words low, high;
        _Pragma("GCC unroll 16") for (int j = 0; j < SIDE; j++) {
            low[j] = j & step ? SIDE + j - step : j;
            high[j] = j & step ? SIDE + j : j + step;
        }
        _Pragma("GCC unroll 16") for (int i = 0; i < SIDE; i++)
            if (!(i & step)) {
                const words a = rows[i], b = rows[i + step];
                rows[i] = __builtin_shuffle(a, b, low);
                rows[i + step] = __builtin_shuffle(a, b, high);
            }
    }
}

/* Packs 16 rows and 32 columns of x[m][k] as the second factor of a tile product: a row of the tile has two columns. */
static void pack(word *packed, const float *x, int64_t m, int64_t k, int64_t job)
{
    const int64_t across = k / (2 * SIDE), first = job / across * SIDE, column = job % across * 2 * SIDE;
    words rows[SIDE] = {{0}};
    for (int64_t i = 0; i < SIDE && first + i < m; i++)
        narrow((half *)(rows + i), x + (first + i) * k + column, 2 * SIDE);
    transpose(rows);
    memcpy(packed + job * SIDE * SIDE, rows, sizeof rows);
}

/* Columns that are unpacked at a time. */
#define UNPACKED(m) (2 * SIDE)

/* 32 columns of out[m][n] = x[m][k] w[32][k]^T + bias[32]. Accumulators are tiles 0 to 3: of 32 rows of the weight, in
 * tiles 4 and 5, and 32 rows of the input, in 6 and 7. */
static void half_columns(float *out, const word *packed, const half *w, const float *bias, int64_t count, int64_t m,
                         int64_t n, int64_t k)
{
    const int64_t across = k / (2 * SIDE), block = across * SIDE * SIDE;
    words sums[2][2][SIDE];
    for (int64_t row = 0; row < m; row += 2 * SIDE) {
        const word *from = packed + row / SIDE * block;
        const int64_t two = m - row > SIDE;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t j = 0; j < across; j++, from += SIDE * SIDE) {
            for (int64_t i = 2 * SIDE; i < 4 * SIDE && row + 2 * SIDE >= m; i++)
                __builtin_prefetch(w + i * k + j * 2 * SIDE); /* of the next columns */
            _tile_loadd(4, w + j * 2 * SIDE, 2 * k);
            _tile_loadd(5, w + SIDE * k + j * 2 * SIDE, 2 * k);
            _tile_loadd(6, from, 4 * SIDE);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 5, 6);
            if (two) {
                _tile_loadd(7, from + block, 4 * SIDE);
                _tile_dpbf16ps(2, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, sums[0][0], 4 * SIDE);
        _tile_stored(1, sums[0][1], 4 * SIDE);
        _tile_stored(2, sums[1][0], 4 * SIDE);
        _tile_stored(3, sums[1][1], 4 * SIDE);
        for (int64_t b = 0; b < 2 + 2 * two; b++) {
            const int64_t first = row + b / 2 * SIDE, column = b % 2 * SIDE;
            transpose(sums[b / 2][b % 2]);
            for (int64_t i = 0; i < SIDE && first + i < m; i++)
                *(vec *)(out + (first + i) * n + column) = (vec)sums[b / 2][b % 2][i] + (bias ? AT(bias, column) : (vec){0});
        }
    }
}

/* Eight tiles of 16 rows of 64 bytes. A constant, since GCC does not see that the instruction reads all of it. */
static const struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} SHAPE = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

static void begin_tiles(const word *packed)
{
    if (packed)
        _tile_loadconfig(&SHAPE);
}

static void end_tiles(const word *packed)
{
    if (packed)
        _tile_release();
}

/* Whether this process may: Linux wants to be asked first (arch_prctl, ARCH_REQ_XCOMP_PERM). */
static int multiplies_halves(void)
{
    return !syscall(SYS_arch_prctl, 0x1023, 18);
}
#else
static int multiplies_halves(void) { return PAIRED[1] != 0; }

/* What few rows multiply stays in the first cache. */
#define UNPACKED(m) ((m) <= 2 * ROWS ? 4 : 2 * SIDE)

/* The numbers in their own order: AVX-512 multiplies and adds two of each sum at once. */
static void pack(word *packed, const float *x, int64_t m, int64_t k, int64_t job)
{
    const int64_t across = k / (2 * SIDE), first = job / across * SIDE, column = job % across * 2 * SIDE;
    for (int64_t at = first * k + column; at < (first + SIDE) * k && at < m * k; at += k)
        narrow((half *)packed + at, x + at, 2 * SIDE);
}

static void half_columns(float *out, const word *packed, const half *w, const float *bias, int64_t count, int64_t m,
                         int64_t n, int64_t k)
{
    for (int64_t row = 0; row < m; row += ROWS)
        for (int64_t c = 0; c < count; c += 4)
            PAIRED[m - row < ROWS ? m - row : ROWS](out + row * n + c, (const half *)packed + row * k, w + c * k,
                                                    bias ? bias + c : 0, n, k, k);
}

static void begin_tiles(const word *packed) {}
static void end_tiles(const word *packed) {}
#endif

/* Numbers in four bits, the first of two in the upper ones: code[16] times the scale of each FOUR_BITS (NF4: Dettmers et
 * al., arXiv:2305.14314, section 3). */
#define FOUR_BITS 64
/* Longest rows of a matrix of which a strip of columns is unpacked at once, on the stack. */
#define MOST_UNPACKED (1 << 14)

typedef uint8_t bytes __attribute__((vector_size(16), aligned(1), may_alias));
typedef half halves __attribute__((vector_size(16), aligned(1), may_alias));

/* out[n], rounded, from the numbers from `first` on; both are multiples of FOUR_BITS. */
static void unpack(half *out, const uint8_t *codes, const float *scales, const float *code, int64_t first, int64_t n)
{
    for (int64_t at = first; at < first + n; at += FOUR_BITS) {
        float wide[16];
        half table[16];
        for (int64_t i = 0; i < 16; i++)
            wide[i] = code[i] * scales[at / FOUR_BITS];
        narrow(table, wide, 16);
#ifdef __clang__
        for (int64_t i = 0; i < FOUR_BITS / 2; i++, out += 2) {
            out[0] = table[codes[at / 2 + i] >> 4];
            out[1] = table[codes[at / 2 + i] & 15];
        }
#else
        bytes low, high; /* of the table's halves */
        for (int64_t i = 0; i < 16; i++) {
            low[i] = (uint8_t)table[i];
            high[i] = (uint8_t)(table[i] >> 8);
        }
        const bytes left = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23}, right = left + 8;
        for (int64_t i = 0; i < FOUR_BITS / 2; i += 16, out += 32) {
            const bytes two = *(const bytes *)(codes + at / 2 + i), one = two >> 4, other = two & 15;
            const bytes a = __builtin_shuffle(low, one), b = __builtin_shuffle(high, one);
            const bytes c = __builtin_shuffle(low, other), d = __builtin_shuffle(high, other);
            const halves ab[] = {(halves)__builtin_shuffle(a, b, left), (halves)__builtin_shuffle(a, b, right)};
            const halves cd[] = {(halves)__builtin_shuffle(c, d, left), (halves)__builtin_shuffle(c, d, right)};
            for (int64_t part = 0; part < 2; part++) {
                *(halves *)(out + 16 * part) = __builtin_shuffle(ab[part], cd[part], (halves){0, 8, 1, 9, 2, 10, 3, 11});
                *(halves *)(out + 16 * part + 8) = __builtin_shuffle(ab[part], cd[part], (halves){4, 12, 5, 13, 6, 14, 7, 15});
            }
        }
#endif
    }
}

/* Weights w[n][k]: floats; halves, where the input is `half`; or, if there are scales, numbers in four bits, or, without
 * a code, in eight: whole ones times the scale of their row. */
struct matrix {
    const void *w;
    const float *scales, *code;
};

/* out[rows][k], rounded, from those of a matrix from `first` on. */
static void unpack_rows(half *out, struct matrix w, int64_t first, int64_t rows, int64_t k)
{
    if (w.code) {
        unpack(out, w.w, w.scales, w.code, first * k, rows * k);
        return;
    }
    for (int64_t r = first; r < first + rows; r++)
        for (int64_t at = 0; at < k; at += 2 * SIDE, out += 2 * SIDE) {
            const int8_t *codes = (const int8_t *)w.w + r * k + at;
#ifdef __AVX512BF16__
            const __m512 scale = _mm512_set1_ps(w.scales[r]);
            const __m512 a = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)codes)));
            const __m512 b = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)(codes + SIDE))));
            _mm512_storeu_si512(out, (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(b, scale), _mm512_mul_ps(a, scale)));
#else
            float wide[2 * SIDE];
            for (int64_t i = 0; i < 2 * SIDE; i++)
                wide[i] = codes[i] * w.scales[r];
            narrow(out, wide, 2 * SIDE);
#endif
        }
}

/* The same as floats, rounded to halves or not. */
static void unpack_wide(float *out, struct matrix w, int64_t first, int64_t rows, int64_t k, int64_t rounds)
{
    const uint8_t *codes = w.w;
    if (rounds) {
        half own[rows * k];
        unpack_rows(own, w, first, rows, k);
        widen(out, own, rows * k);
        return;
    }
    for (int64_t at = first * k; at < (first + rows) * k; at++, out++)
        *out = w.code ? w.code[codes[at / 2] >> (at % 2 ? 0 : 4) & 15] * w.scales[at / FOUR_BITS]
                      : ((const int8_t *)codes)[at] * w.scales[at / k];
}
