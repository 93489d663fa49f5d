// Kernels of the CPU path: linear layers over packed weights, paged attention, norms. Compiled once per machine.
//
// Everything is built on one microkernel: up to ROWS rows of A, as they lie in memory, times one panel of B. A panel
// holds 64 columns of B, reduction index by reduction index, so that it is read front to back exactly once:
//
//     float32    [K][64]
//     bfloat16   [K / 2][64][2]      what one dot-product instruction (vdpbf16ps) takes
//
// Weights may be int8 with a scale for each column, or int4 with one for each column and GROUP of the reduction: they
// become bfloat16 panels, exactly, where they are used.
//
// Products are accumulated in float32. Vectors are GCC's, so the code compiles for any CPU; where the CPU multiplies
// bfloat16 itself, that is used, and elsewhere bfloat16 is widened when panels are packed.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif
#include <omp.h>
#if defined(__linux__)
#include <sched.h>
#endif

namespace {

constexpr long LANES = 16;
constexpr long PANEL = 64;
constexpr long VECTORS = PANEL / LANES;
#if defined(__AVX512F__)
constexpr int ROWS = 6;  // 6 x 4 accumulators, 4 vectors of B and one of A: 29 of 32 registers
#else
constexpr int ROWS = 2;
#endif

// Sums live in registers only where the loops are part of their caller; left to judge by size, GCC gives that up as this
// file grows, and everything takes twice as long.
#define ALWAYS_INLINE inline __attribute__((always_inline))

typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IntVec __attribute__((vector_size(64)));
typedef Vec UnalignedVec __attribute__((aligned(4)));
typedef uint16_t HalfVec __attribute__((vector_size(32)));
typedef HalfVec UnalignedHalfVec __attribute__((aligned(2)));
typedef uint32_t UIntVec __attribute__((vector_size(64)));
typedef int8_t ByteVec __attribute__((vector_size(16)));

struct bfloat16 {
    uint16_t bits;
};

inline Vec splat(float x) { return Vec{} + x; }
inline Vec load(const float* p) { return *reinterpret_cast<const UnalignedVec*>(p); }
inline void store(float* p, Vec x) { *reinterpret_cast<UnalignedVec*>(p) = x; }

inline Vec load(const bfloat16* p) {
    const HalfVec half = *reinterpret_cast<const UnalignedHalfVec*>(p);
    return (Vec)(__builtin_convertvector(half, UIntVec) << 16);
}

inline void store(bfloat16* p, Vec x) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    const UIntVec bits = (UIntVec)x;
    const UIntVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;  // to nearest even, as torch does
    *reinterpret_cast<UnalignedHalfVec*>(p) = __builtin_convertvector(rounded, HalfVec);
#endif
}

inline Vec load(const int8_t* p) {
    ByteVec bytes;
    std::memcpy(&bytes, p, LANES);
    return __builtin_convertvector(bytes, Vec);
}

// Integers from -128 to 127 after rounding to the nearest, to even between two.
inline void store(int8_t* p, Vec x) {
    const Vec magic = splat(12582912.0f);  // 1.5 * 2^23
    const IntVec whole = __builtin_convertvector((x + magic) - magic, IntVec);
    const auto bytes = __builtin_convertvector(whole, ByteVec);
    std::memcpy(p, &bytes, LANES);
}

inline float widen(float x) { return x; }
inline float widen(bfloat16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

template <typename T>
inline T narrow(float x);
template <>
inline float narrow<float>(float x) {
    return x;
}
template <>
inline bfloat16 narrow<bfloat16>(float x) {
    bfloat16 out[LANES];
    store(out, splat(x));
    return out[0];
}

#if defined(__AVX512F__)
inline float sum(Vec x) { return _mm512_reduce_add_ps((__m512)x); }
inline float largest(Vec x) { return _mm512_reduce_max_ps((__m512)x); }
#else
inline float sum(Vec x) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}

inline float largest(Vec x) {
    float most = x[0];
    for (int i = 1; i < LANES; i++) most = std::max(most, x[i]);
    return most;
}
#endif

#if defined(__AVX512F__)
inline Vec maximum(Vec a, Vec b) { return (Vec)_mm512_max_ps((__m512)a, (__m512)b); }
inline Vec minimum(Vec a, Vec b) { return (Vec)_mm512_min_ps((__m512)a, (__m512)b); }
#else
inline Vec maximum(Vec a, Vec b) { return a > b ? a : b; }
inline Vec minimum(Vec a, Vec b) { return a < b ? a : b; }
#endif

// exp(x) to 2 units in the last place for x <= 88; 0 below -87. Cephes' way: 2^n times a polynomial.
inline Vec exponential(Vec x) {
    const Vec clamped = minimum(maximum(x, splat(-87.3f)), splat(88.3f));
    const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Vec shifted = clamped * 1.44269504f + magic;
    const Vec n = shifted - magic;
    const Vec r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
    Vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const Vec scale = (Vec)(((IntVec)shifted + (127 - 0x4b400000)) << 23);
    return x < splat(-87.3f) ? Vec{} : p * scale;
}

// 2^x for x <= 0, to 3e-6 with 5 terms and 2e-7 with 6.
template <int TERMS>
inline Vec power_of_two(Vec x) {
    const Vec bounded = maximum(x, splat(-126.0f));
#if defined(__AVX512F__)
    const Vec n = (Vec)_mm512_roundscale_ps((__m512)bounded, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const Vec n = (bounded + 12582912.0f) - 12582912.0f;
#endif
    const Vec r = bounded - n;
    Vec p = splat(TERMS == 6 ? 1.5403530e-4f : 1.3333558e-3f);
    if (TERMS == 6) p = p * r + 1.3333558e-3f;
    p = p * r + 9.6181291e-3f;
    p = p * r + 5.5504109e-2f;
    p = p * r + 2.4022651e-1f;
    p = p * r + 6.9314718e-1f;
    p = p * r + 1.0f;
#if defined(__AVX512F__)
    return (Vec)_mm512_mask_scalef_ps(_mm512_setzero_ps(), _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126.0f), _CMP_GE_OQ),
                                      (__m512)p, (__m512)n);
#else
    const Vec scale = (Vec)((__builtin_convertvector(n, IntVec) + 127) << 23);
    return x < splat(-126.0f) ? Vec{} : p * scale;
#endif
}

inline Vec hyperbolic_tangent(Vec x) {
    return 1.0f - 2.0f / (exponential(minimum(x * 2.0f, splat(60.0f))) + 1.0f);
}

// ------------------------------------------------------------------------------------------------ the microkernel

// How elements of B lie in a panel, and what A's elements are.
template <typename T>
struct Operand {
    typedef float Element;
    static constexpr long PAIR = 1;
};
#if defined(__AVX512BF16__)
template <>
struct Operand<bfloat16> {
    typedef bfloat16 Element;
    static constexpr long PAIR = 2;
};
#endif

inline Vec multiply_add(Vec acc, const float* a, const float* b) { return acc + splat(*a) * load(b); }
#if defined(__AVX512BF16__)
inline Vec multiply_add(Vec acc, const bfloat16* a, const bfloat16* b) {
    int32_t two;
    std::memcpy(&two, a, 4);
    return (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(two), (__m512bh)_mm512_loadu_si512(b));
}
#endif

// acc[rows][PANEL] (+)= a[rows][depth] x panel. `ahead`: memory that will be read soon; a line of it is fetched with
// each of the first `lines` steps, or two while there are more lines than steps: then MORE is set.
template <typename E, long PAIR, int M, bool MORE>
ALWAYS_INLINE void multiply(const E* a, long stride, const E* panel, long depth, Vec acc[][VECTORS], const char* ahead,
                     long lines) {
    const long steps = depth / PAIR;
    const char* further = ahead + steps * 64;
    for (long k = 0; k < depth; k += PAIR) {
        if (k < lines * PAIR) {
            __builtin_prefetch(ahead, 0, 2);
            ahead += 64;
        }
        if (MORE && k < (lines - steps) * PAIR) {
            __builtin_prefetch(further, 0, 2);
            further += 64;
        }
        __builtin_prefetch(panel + PANEL * PAIR * 6, 0, 3);
        __builtin_prefetch(panel + PANEL * PAIR * 6 + LANES * PAIR, 0, 3);
        __builtin_prefetch(panel + PANEL * PAIR * 6 + 2 * LANES * PAIR, 0, 3);
        __builtin_prefetch(panel + PANEL * PAIR * 6 + 3 * LANES * PAIR, 0, 3);
#pragma GCC unroll 6
        for (int i = 0; i < M; i++)
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++)
                acc[i][j] = multiply_add(acc[i][j], a + i * stride + k, panel + j * LANES * PAIR);
        panel += PANEL * PAIR;
    }
}

// The tile's epilogue decides where sums start and where they go.
template <typename E, long PAIR, int M, typename Begin, typename End>
ALWAYS_INLINE void tile(const E* a, long stride, const E* panel, long depth, const char* ahead, long lines, Begin begin,
                 End end) {
    Vec acc[M][VECTORS];
#pragma GCC unroll 6
    for (int i = 0; i < M; i++)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) acc[i][j] = begin(i, j);
    if (lines > depth / PAIR)
        multiply<E, PAIR, M, true>(a, stride, panel, depth, acc, ahead, lines);
    else
        multiply<E, PAIR, M, false>(a, stride, panel, depth, acc, ahead, lines);
#pragma GCC unroll 6
    for (int i = 0; i < M; i++) end(i, acc[i]);
}

template <typename E, long PAIR, typename Begin, typename End>
inline void tile_of(int rows, const E* a, long stride, const E* panel, long depth, const char* ahead, long lines,
                    Begin begin, End end) {
    switch (rows) {
        case 1: return tile<E, PAIR, 1>(a, stride, panel, depth, ahead, lines, begin, end);
        case 2: return tile<E, PAIR, 2>(a, stride, panel, depth, ahead, lines, begin, end);
#if defined(__AVX512F__)
        case 3: return tile<E, PAIR, 3>(a, stride, panel, depth, ahead, lines, begin, end);
        case 4: return tile<E, PAIR, 4>(a, stride, panel, depth, ahead, lines, begin, end);
        case 5: return tile<E, PAIR, 5>(a, stride, panel, depth, ahead, lines, begin, end);
        case 6: return tile<E, PAIR, 6>(a, stride, panel, depth, ahead, lines, begin, end);
#endif
    }
}

// Calls body(first, count) for groups of at most ROWS rows, as even as they can be.
template <typename Body>
inline void for_row_groups(long rows, Body body) {
    const long groups = (rows + ROWS - 1) / ROWS;
    for (long g = 0; g < groups; g++) {
        const long first = rows * g / groups;
        body(first, int(rows * (g + 1) / groups - first), g, groups);
    }
}

// ----------------------------------------------------------------------------------------------------- linear layers

#if defined(__AVX512BF16__)

constexpr long DEPTH = 1024;     // of a unit of work: 128 KiB of weights, so that it and the next fit the L2 cache
constexpr long RUNS = 64;        // of units that each thread takes
constexpr long LONG_RUNS = 8;    // and with few rows
constexpr long BLOCK_ROWS = 256; // rows of A that one unit is used for before the next is read
constexpr long GROUP = 32;       // of the reduction, that shares a scale of int4 weights
constexpr long BYTES_AHEAD = 2048;  // of int8 weights, fetched before they are converted

inline long panels(long n) { return (n + PANEL - 1) / PANEL; }
inline long even(long k) { return (k + 1) / 2 * 2; }

// Where a panel's 64 sums go. Columns beyond `n` are not written.
struct Plain {
    bfloat16* out;
    long stride;
    const bfloat16* bias;
    long n;

    void operator()(long row, long panel, const Vec* sums) const {
        const long first = panel * PANEL;
        bfloat16* to = out + row * stride + first;
        if (first + PANEL <= n) {
            for (long j = 0; j < VECTORS; j++)
                store(to + j * LANES, bias ? sums[j] + load(bias + first + j * LANES) : sums[j]);
            return;
        }
        alignas(64) float all[PANEL];
        for (long j = 0; j < VECTORS; j++) store(all + j * LANES, sums[j]);
        for (long c = 0; first + c < n; c++) to[c] = narrow<bfloat16>(bias ? all[c] + widen(bias[first + c]) : all[c]);
    }
};

// A panel holds 32 columns of the gate and the same 32 of the up projection: silu(gate) * up, 32 columns a panel.
struct Gated {
    bfloat16* out;
    long stride;

    void operator()(long row, long panel, const Vec* sums) const {
        bfloat16* to = out + row * stride + panel * (PANEL / 2);
        for (long j = 0; j < VECTORS / 2; j++) {
            const Vec gate = sums[j];
            store(to + j * LANES, gate / (1.0f + exponential(-gate)) * sums[j + VECTORS / 2]);
        }
    }
};

// Weights as they are multiplied.
struct PlainWeights {
    static constexpr long OPENED = DEPTH, STEP = PANEL;
    static constexpr bool GROUPED = false;
    const bfloat16* packed;
    struct Room {};

    const bfloat16* open(const bfloat16* slice, long, Room&) const { return slice; }
};

#if defined(__AVX512VBMI__)

// int8 as sign and magnitude. 64 bytes are two vectors of 32 bfloat16, 16 columns of a pair of the reduction each:
// byte 16 L + 8 v + i is element 8 L + i of vector v, as the interleaving of bytes leaves them.
class BytesToBfloat16 {
   public:
    BytesToBfloat16() {
        low0_ = _mm512_load_si512(tables.low);
        low1_ = _mm512_load_si512(tables.low + 64);
        high0_ = _mm512_load_si512(tables.high);
        high1_ = _mm512_load_si512(tables.high + 64);
    }

    void operator()(const uint8_t* from, __m512i& first, __m512i& second) const {
        const __m512i bytes = _mm512_loadu_si512(from);
        const __m512i low = _mm512_permutex2var_epi8(low0_, bytes, low1_);
        const __m512i magnitude = _mm512_permutex2var_epi8(high0_, bytes, high1_);
        const __m512i high = _mm512_ternarylogic_epi32(magnitude, bytes, _mm512_set1_epi8(char(0x80)), 0xf8);  // a | b & c
        first = _mm512_unpacklo_epi8(low, high);
        second = _mm512_unpackhi_epi8(low, high);
    }

   private:
    struct Tables {  // the two bytes of each magnitude as bfloat16
        alignas(64) uint8_t low[128], high[128];
        Tables() {
            for (int magnitude = 0; magnitude < 128; magnitude++) {
                const uint16_t bits = narrow<bfloat16>(float(magnitude)).bits;
                low[magnitude] = bits & 0xff;
                high[magnitude] = bits >> 8;
            }
        }
    };
    static inline const Tables tables;
    __m512i low0_, low1_, high0_, high1_;
};

struct ByteWeights {
    static constexpr long OPENED = 128;  // 16 KiB of bfloat16, so that it stays in the L1 cache
    static constexpr long FEW = DEPTH, STEP = PANEL;
    static constexpr bool GROUPED = false;
    const uint8_t* packed;
    struct Room {
        alignas(64) bfloat16 panel[OPENED * PANEL];
    };

    const bfloat16* open(const uint8_t* slice, long depth, Room& room) const {
        const BytesToBfloat16 convert;
        for (long i = 0; i < depth * PANEL; i += 64) {
            __m512i first, second;
            convert(slice + i, first, second);
            _mm512_store_si512(room.panel + i, first);
            _mm512_store_si512(room.panel + i + 32, second);
        }
        return room.panel;
    }
};

// As `tile`, of weights that are read once: they are converted in registers.
template <int M, typename Begin, typename End>
ALWAYS_INLINE void tile_of_bytes(const bfloat16* a, long stride, const uint8_t* panel, long depth, Begin begin, End end) {
    Vec acc[M][VECTORS];
#pragma GCC unroll 6
    for (int i = 0; i < M; i++)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) acc[i][j] = begin(i, j);
    const BytesToBfloat16 convert;
    for (long k = 0; k < depth; k += 2) {
        __builtin_prefetch(panel + BYTES_AHEAD, 0, 3);
        __builtin_prefetch(panel + BYTES_AHEAD + 64, 0, 3);
        __m512i b[VECTORS];
        convert(panel, b[0], b[1]);
        convert(panel + 64, b[2], b[3]);
#pragma GCC unroll 6
        for (int i = 0; i < M; i++) {
            int32_t two;
            std::memcpy(&two, a + i * stride + k, 4);
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++)
                acc[i][j] = (Vec)_mm512_dpbf16_ps((__m512)acc[i][j], (__m512bh)_mm512_set1_epi32(two), (__m512bh)b[j]);
        }
        panel += PANEL * 2;
    }
#pragma GCC unroll 6
    for (int i = 0; i < M; i++) end(i, acc[i]);
}

template <typename Begin, typename End>
inline void few_rows_of(ByteWeights, int rows, const bfloat16* a, long stride, const uint8_t* panel, long depth,
                        Begin begin, End end) {
    switch (rows) {
        case 1: return tile_of_bytes<1>(a, stride, panel, depth, begin, end);
        case 2: return tile_of_bytes<2>(a, stride, panel, depth, begin, end);
        case 3: return tile_of_bytes<3>(a, stride, panel, depth, begin, end);
        case 4: return tile_of_bytes<4>(a, stride, panel, depth, begin, end);
        case 5: return tile_of_bytes<5>(a, stride, panel, depth, begin, end);
        case 6: return tile_of_bytes<6>(a, stride, panel, depth, begin, end);
    }
}

// int4, -8 to 7 as 0 to 15. Of 64 bytes the low halves are one pair of the reduction of columns 0 to 31, the high halves
// that of columns 32 to 63, each in the order of BytesToBfloat16.
class NibblesToBfloat16 {
   public:
    NibblesToBfloat16() {
        low_ = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(tables.low)));
        high_ = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(tables.high)));
    }

    ALWAYS_INLINE void operator()(const uint8_t* from, __m512i* to) const {
        const __m512i bytes = _mm512_loadu_si512(from), mask = _mm512_set1_epi8(15);
        const __m512i halves[2] = {_mm512_and_si512(bytes, mask), _mm512_and_si512(_mm512_srli_epi16(bytes, 4), mask)};
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const __m512i low = _mm512_shuffle_epi8(low_, halves[half]), high = _mm512_shuffle_epi8(high_, halves[half]);
            to[2 * half] = _mm512_unpacklo_epi8(low, high);
            to[2 * half + 1] = _mm512_unpackhi_epi8(low, high);
        }
    }

   private:
    struct Tables {
        alignas(16) uint8_t low[16], high[16];
        Tables() {
            for (int value = -8; value < 8; value++) {
                const uint16_t bits = narrow<bfloat16>(float(value)).bits;
                low[value + 8] = bits & 0xff;
                high[value + 8] = bits >> 8;
            }
        }
    };
    static inline const Tables tables;
    __m512i low_, high_;
};

ALWAYS_INLINE Vec add_scaled(Vec total, Vec sum, const uint8_t* scales, long j) {
    const Vec scale = load(reinterpret_cast<const bfloat16*>(scales) + j * LANES);
    return (Vec)_mm512_fmadd_ps((__m512)sum, (__m512)scale, (__m512)total);
}

// Each group of a panel: its 64 scales in bfloat16, then its weights.
struct NibbleWeights {
    static constexpr long OPENED = 128, SCALES = PANEL * 2;
    static constexpr long FEW = 1L << 40, STEP = PANEL / 2 + SCALES / GROUP;
    static constexpr bool GROUPED = true;
    const uint8_t* packed;
    struct Room {
        alignas(64) bfloat16 panel[OPENED * PANEL];
    };

    ALWAYS_INLINE const bfloat16* open(const uint8_t* slice, long depth, Room& room) const {
        const NibblesToBfloat16 convert;
        bfloat16* to = room.panel;
        for (const uint8_t* group = slice; group < slice + depth * STEP; group += GROUP * STEP)
            for (long k = 0; k < GROUP; k += 2, to += 2 * PANEL) {
                __m512i b[VECTORS];
                convert(group + SCALES + k * PANEL / 2, b);
#pragma GCC unroll 4
                for (long j = 0; j < VECTORS; j++) _mm512_store_si512(to + j * 2 * LANES, b[j]);
            }
        return room.panel;
    }
};

// As `tile_of_bytes`. A group is summed by itself, as it is where many rows share an opened one.
template <int M, typename Begin, typename End>
ALWAYS_INLINE void tile_of_nibbles(const bfloat16* a, long stride, const uint8_t* panel, long depth, Begin begin, End end) {
    Vec total[M][VECTORS];
#pragma GCC unroll 3
    for (int i = 0; i < M; i++)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++) total[i][j] = begin(i, j);
    const NibblesToBfloat16 convert;
    for (long k0 = 0; k0 < depth; k0 += GROUP) {
        const uint8_t* scales = panel;
        Vec acc[M][VECTORS] = {};
        panel += NibbleWeights::SCALES;
        for (long k = k0; k < k0 + GROUP; k += 2, panel += PANEL) {
            __builtin_prefetch(panel + BYTES_AHEAD, 0, 3);
            __m512i b[VECTORS];
            convert(panel, b);
#pragma GCC unroll 3
            for (int i = 0; i < M; i++) {
                int32_t two;
                std::memcpy(&two, a + i * stride + k, 4);
#pragma GCC unroll 4
                for (int j = 0; j < VECTORS; j++)
                    acc[i][j] = (Vec)_mm512_dpbf16_ps((__m512)acc[i][j], (__m512bh)_mm512_set1_epi32(two), (__m512bh)b[j]);
            }
        }
#pragma GCC unroll 3
        for (int i = 0; i < M; i++)
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++) total[i][j] = add_scaled(total[i][j], acc[i][j], scales, j);
    }
#pragma GCC unroll 3
    for (int i = 0; i < M; i++) end(i, total[i]);
}

// As `tile`, of an opened slice. A group's sums are as in `tile_of_nibbles`; totals wait in the L1 cache.
template <int M, typename Begin, typename End>
ALWAYS_INLINE void tile_of_groups(const bfloat16* a, long stride, const bfloat16* panel, const uint8_t* slice, long depth,
                                  const char* ahead, long lines, Begin begin, End end) {
    Vec total[M][VECTORS];
    for (int i = 0; i < M; i++)
        for (int j = 0; j < VECTORS; j++) total[i][j] = begin(i, j);
    for (long k = 0; k < depth; k += GROUP) {
        Vec acc[M][VECTORS] = {};
        multiply<bfloat16, 2, M, false>(a + k, stride, panel + k * PANEL, GROUP, acc, ahead, lines);
        ahead += GROUP / 2 * 64;
        lines -= GROUP / 2;
        const uint8_t* scales = slice + k * NibbleWeights::STEP;
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++)
#pragma GCC unroll 6
            for (int i = 0; i < M; i++) total[i][j] = add_scaled(total[i][j], acc[i][j], scales, j);
    }
    for (int i = 0; i < M; i++) end(i, total[i]);
}

template <typename Begin, typename End>
inline void many_rows_of(NibbleWeights, int rows, const bfloat16* a, long stride, const bfloat16* panel,
                         const uint8_t* slice, long depth, const char* ahead, long lines, Begin begin, End end) {
    switch (rows) {  // more than ROWS are at least 3 each, as `for_row_groups` divides them
        case 3: return tile_of_groups<3>(a, stride, panel, slice, depth, ahead, lines, begin, end);
        case 4: return tile_of_groups<4>(a, stride, panel, slice, depth, ahead, lines, begin, end);
        case 5: return tile_of_groups<5>(a, stride, panel, slice, depth, ahead, lines, begin, end);
        case 6: return tile_of_groups<6>(a, stride, panel, slice, depth, ahead, lines, begin, end);
    }
}

template <typename Begin, typename End>
inline void few_rows_of(NibbleWeights, int rows, const bfloat16* a, long stride, const uint8_t* panel, long depth,
                        Begin begin, End end) {
    for (int r = 0; r < rows; r += 3) {
        const bfloat16* from = a + r * stride;
        const auto begin_at = [&](int i, int j) { return begin(r + i, j); };
        const auto end_at = [&](int i, const Vec* sums) { end(r + i, sums); };
        switch (std::min(3, rows - r)) {
            case 1: tile_of_nibbles<1>(from, stride, panel, depth, begin_at, end_at); break;
            case 2: tile_of_nibbles<2>(from, stride, panel, depth, begin_at, end_at); break;
            case 3: tile_of_nibbles<3>(from, stride, panel, depth, begin_at, end_at); break;
        }
    }
}

// Each column's sum times its scale.
template <typename Write>
struct Scaled {
    Write write;
    const float* scales;

    void operator()(long row, long panel, const Vec* sums) const {
        Vec scaled[VECTORS];
        for (long j = 0; j < VECTORS; j++) scaled[j] = sums[j] * load(scales + panel * PANEL + j * LANES);
        write(row, panel, scaled);
    }
};

#endif  // __AVX512VBMI__

// Of the reduction, at a time: what is opened for many rows to share, or read once by few.
template <typename Weights>
inline long most_of(long rows) {
    if constexpr (std::is_same_v<Weights, PlainWeights>)
        return Weights::OPENED;
    else
        return rows > ROWS ? Weights::OPENED : Weights::FEW;
}

template <typename Weights, typename Write>
void multiply_packed(const bfloat16* x, long x_stride, long m, Weights weights, long n, long k, Write write) {
    typedef std::remove_cvref_t<decltype(*weights.packed)> Element;
    const long num_panels = panels(n), panel_size = even(k) * Weights::STEP;
    const long blocks = (m + BLOCK_ROWS - 1) / BLOCK_ROWS, units = blocks * num_panels;
    // Units go to threads in runs, as they become free: one that loses its core for a while holds up little.
    // Few rows wait for memory, and what is fetched ahead is what comes next in it: their runs are longer, or it would be
    // another thread's. (Up to ROWS rows fetch nothing ahead.) So up to 12 rows cost hardly more than one.
    const long runs = m > ROWS && m <= 3 * ROWS ? LONG_RUNS : RUNS;
    const long run = std::max(1L, units / (runs * omp_get_max_threads()));
#pragma omp parallel
    {
        alignas(64) float partial[BLOCK_ROWS * PANEL];
        typename Weights::Room room;
#pragma omp for schedule(dynamic, run)
        for (long unit = 0; unit < units; unit++) {
            const long block = unit / num_panels, panel = unit % num_panels;
            const long row0 = m * block / blocks, rows = m * (block + 1) / blocks - row0;
            const long most = most_of<Weights>(rows);
            for (long k0 = 0; k0 < k; k0 += most) {
                const long depth = std::min(most, k - k0);
                const Element* slice = weights.packed + panel * panel_size + k0 * Weights::STEP;
                const bool first = k0 == 0, last = k0 + depth == k;
                const char* next = reinterpret_cast<const char*>(slice + even(depth) * Weights::STEP);
                const long next_lines = std::min(most, last ? k : k - k0 - depth) * Weights::STEP * sizeof(Element) / 64;
                const auto begin = [&](long row, int j) {
                    return first ? Vec{} : load(partial + row * PANEL + j * LANES);
                };
                const auto end = [&](long row, const Vec* sums) {
                    if (last) return write(row0 + row, panel, sums);
                    for (long j = 0; j < VECTORS; j++) store(partial + row * PANEL + j * LANES, sums[j]);
                };
                if constexpr (sizeof(Element) == 1) {
                    if (rows <= ROWS) {
                        few_rows_of(weights, rows, x + row0 * x_stride + k0, x_stride, slice, depth, begin, end);
                        continue;
                    }
                }
                const bfloat16* opened = weights.open(slice, even(depth), room);
                for_row_groups(rows, [&](long r, int count, long group, long groups) {
                    const bfloat16* a = x + (row0 + r) * x_stride + k0;
                    const long line = next_lines * group / groups, lines = next_lines * (group + 1) / groups - line;
                    const long fetched = groups == 1 ? 0 : lines;
                    const auto begin_at = [&](int i, int j) { return begin(r + i, j); };
                    const auto end_at = [&](int i, const Vec* sums) { end(r + i, sums); };
                    if constexpr (Weights::GROUPED)
                        many_rows_of(weights, count, a, x_stride, opened, slice, depth, next + line * 64, fetched,
                                     begin_at, end_at);
                    else
                        tile_of<bfloat16, 2>(count, a, x_stride, opened, depth, next + line * 64, fetched, begin_at,
                                             end_at);
                });
            }
        }
    }
}

#endif  // __AVX512BF16__


// -------------------------------------------------------------------------------------------------- paged attention

constexpr long TILE_KEYS = 256;  // keys of which scores are kept at a time

// 16 rows of 16 four-byte words (`from_stride` words apart) to 16 columns (`to_stride` words apart).
inline void transpose16(const uint32_t* from, long from_stride, uint32_t* to, long to_stride) {
#if defined(__AVX512F__)
    __m512i r[16], t[16];
    for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(from + i * from_stride);
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        _mm512_storeu_si512(to + i * to_stride, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
        _mm512_storeu_si512(to + (i + 8) * to_stride, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
        _mm512_storeu_si512(to + (i + 4) * to_stride, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88));
        _mm512_storeu_si512(to + (i + 12) * to_stride, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd));
    }
#else
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 16; j++) to[j * to_stride + i] = from[i * from_stride + j];
#endif
}

// The shape of the pool [blocks, kv_heads, layers, 2, block_tokens, head_dim] (int8 also has scales), and of one call.
struct AttentionShape {
    int64_t heads, kv_heads, head_dim, block_tokens, layers, layer;
    int64_t query_head_stride, query_token_stride;  // in elements; the last dimension is contiguous
    int64_t window;                                 // positions a token sees, its own included; 0: all
    float scale, softcap;                           // softcap 0: none
};

// Tokens [token, token + count) of the flattened batch are positions [position, position + count) of the sequence
// whose block table begins at tables[table].
struct AttentionItem {
    int64_t token, count, position, table;
};

inline long round_up(long x, long unit) { return (x + unit - 1) / unit * unit; }

// Keys and values are kept as they are computed, or as int8: then the vectors of a block's head, layer, and K or V are
// followed by their scales in bfloat16.
template <typename P>
inline long row_elements(const AttentionShape& s) {  // of one head and layer, K or V
    return s.block_tokens * (s.head_dim + (sizeof(P) == 1 ? sizeof(bfloat16) : 0));
}

template <typename P>
inline long row_of(const AttentionShape& s, long block, long kv_head) {  // that of the keys; the values' is the next
    return ((block * s.kv_heads + kv_head) * s.layers + s.layer) * 2 * row_elements<P>(s);
}

// Memory of one thread, and the work on one item and KV head. P: what the pool has.
template <typename T, typename P>
class Attention {
    typedef typename Operand<T>::Element E;
    static constexpr long PAIR = Operand<T>::PAIR;
    static constexpr bool QUANTISED = sizeof(P) == 1;

   public:
    Attention(const AttentionShape& shape, long max_rows)
        : s_(shape),
          group_(shape.heads / shape.kv_heads),
          depth_(round_up(shape.head_dim, PANEL)),
          to_value_(row_elements<P>(shape)) {
        const long words = max_rows * depth_ * 2 + 2 * TILE_KEYS * depth_ + 2 * ROWS * TILE_KEYS + 4 * max_rows +
                           LANES * depth_ + 2 * TILE_KEYS + 10 * LANES;
        memory_ = static_cast<float*>(std::aligned_alloc(64, round_up(words * 4, 64)));
        float* at = memory_;
        const auto take = [&at](long count) {
            float* taken = at;
            at += round_up(count, LANES);
            return taken;
        };
        outputs_ = take(max_rows * depth_);
        queries_ = reinterpret_cast<E*>(take(max_rows * depth_));
        keys_ = reinterpret_cast<E*>(take(TILE_KEYS * depth_));
        values_ = reinterpret_cast<E*>(take(TILE_KEYS * depth_));
        scores_ = take(ROWS * TILE_KEYS);
        weights_ = reinterpret_cast<E*>(take(ROWS * TILE_KEYS));
        most_ = take(max_rows);
        total_ = take(max_rows);
        rows_ = reinterpret_cast<E*>(take(LANES * depth_));
        key_scales_ = take(TILE_KEYS);
        value_scales_ = take(TILE_KEYS);
    }
    ~Attention() { std::free(memory_); }
    Attention(const Attention&) = delete;
    Attention& operator=(const Attention&) = delete;

    void run(const AttentionItem& item, long kv_head, const T* query, const P* pool, const int32_t* tables, T* out) {
        const long num_rows = item.count * group_, end = item.position + item.count;
        read_queries(item, kv_head, query);
        std::fill(outputs_, outputs_ + num_rows * depth_, 0.0f);
        std::fill(most_, most_ + num_rows, -INFINITY);
        std::fill(total_, total_ + num_rows, 0.0f);
        const long lowest = s_.window ? std::max(0L, item.position + 1 - s_.window) : 0;
        for (long first = lowest / TILE_KEYS * TILE_KEYS; first < end; first += TILE_KEYS) {
            const long count = std::min(TILE_KEYS, end - first);
            pack(pool, tables + item.table, kv_head, first, count);
            for_row_groups(num_rows, [&](long r, int rows, long, long) { attend(item, r, rows, first); });
        }
        write(item, kv_head, num_rows, out);
    }

   private:
    long position_of(const AttentionItem& item, long row) const { return item.position + row / group_; }

    void read_queries(const AttentionItem& item, long kv_head, const T* query) {
        for (long row = 0; row < item.count * group_; row++) {
            const long head = kv_head * group_ + row % group_;
            const T* from = query + (item.token + row / group_) * s_.query_token_stride + head * s_.query_head_stride;
            widen_row(from, queries_ + row * depth_);
        }
    }

    const P* key_row(const P* pool, const int32_t* table, long kv_head, long position) const {
        return pool + row_of<P>(s_, table[position / s_.block_tokens], kv_head) + position % s_.block_tokens * s_.head_dim;
    }

    // A vector of int8, without its scale.
    void widen_row(const int8_t* from, E* to) const {
        long d = 0;
        for (; d + LANES <= s_.head_dim; d += LANES) store(to + d, load(from + d));
        for (; d < s_.head_dim; d++) to[d] = narrow<E>(float(from[d]));
        std::memset(static_cast<void*>(to + s_.head_dim), 0, (depth_ - s_.head_dim) * sizeof(E));
    }

    // A vector as operands, zeros up to the panel's end.
    void widen_row(const T* from, E* to) const {
        if constexpr (sizeof(T) == sizeof(E)) {
            std::memcpy(to, from, s_.head_dim * sizeof(E));
        } else {
            for (long d = 0; d < s_.head_dim; d++) to[d] = narrow<E>(widen(from[d]));
        }
        std::memset(static_cast<void*>(to + s_.head_dim), 0, (depth_ - s_.head_dim) * sizeof(E));
    }

    // Keys [first, first + count) to panels of 64 keys, values to panels of 64 dimensions; zeros after them.
    void pack(const P* pool, const int32_t* table, long kv_head, long first, long count) {
        const long words = depth_ / PAIR;
        if constexpr (QUANTISED) read_scales(pool, table, kv_head, first, count);
        for (long k0 = 0; k0 < round_up(count, PANEL); k0 += LANES) {
            const long keys = std::clamp(count - k0, 0L, LANES);
            if (k0 + LANES < count) fetch(key_row(pool, table, kv_head, first + k0 + LANES));
            long stride;
            const E* rows = rows_of(pool, table, kv_head, first + k0, keys, 0, stride);
            uint32_t* panel = reinterpret_cast<uint32_t*>(keys_) + k0 / PANEL * PANEL * words + k0 % PANEL;
            for (long w = 0; w < words; w += LANES)
                transpose16(reinterpret_cast<const uint32_t*>(rows) + w, stride / PAIR, panel + w * PANEL, PANEL);
            rows = rows_of(pool, table, kv_head, first + k0, keys, to_value_, stride);
            for (long d = 0; d < depth_; d += PANEL)
                pack_values(rows + d, stride, values_ + d * TILE_KEYS + k0 * PANEL);
        }
    }

    void read_scales(const P* pool, const int32_t* table, long kv_head, long first, long count) {
        for (long k = 0, run; k < count; k += run) {
            const long offset = (first + k) % s_.block_tokens;
            run = std::min(s_.block_tokens - offset, count - k);
            const P* keys = key_row(pool, table, kv_head, first + k - offset);
            widen_scales(keys, offset, run, key_scales_ + k);
            widen_scales(keys + to_value_, offset, run, value_scales_ + k);
        }
        std::fill(key_scales_ + count, key_scales_ + TILE_KEYS, 0.0f);
        std::fill(value_scales_ + count, value_scales_ + TILE_KEYS, 0.0f);
    }

    void widen_scales(const P* row, long offset, long count, float* to) const {
        const bfloat16* from = reinterpret_cast<const bfloat16*>(row + s_.block_tokens * s_.head_dim) + offset;
        long i = 0;
        for (; i + LANES <= count; i += LANES) store(to + i, load(from + i));
        for (; i < count; i++) to[i] = widen(from[i]);
    }

    // 16 rows of keys (or, `to_value` further on, values) and how far apart they are: where they lie in the pool if
    // they lie there as operands, else copied. Zeros after `count`.
    const E* rows_of(const P* pool, const int32_t* table, long kv_head, long first, long count, long to_value,
                     long& stride) {
        if constexpr (sizeof(P) == sizeof(E)) {
            if (count == LANES && s_.head_dim == depth_ && first % s_.block_tokens + LANES <= s_.block_tokens) {
                stride = s_.head_dim;
                return reinterpret_cast<const E*>(key_row(pool, table, kv_head, first) + to_value);
            }
        }
        stride = depth_;
        if (count < LANES) std::memset(static_cast<void*>(rows_), 0, LANES * depth_ * sizeof(E));
        for (long k = 0; k < count; k++)
            widen_row(key_row(pool, table, kv_head, first + k) + to_value, rows_ + k * depth_);
        return rows_;
    }

    // The keys and values of a block come from memory one after the other: ask for the next while this is used.
    void fetch(const P* keys) const {
        const long bytes = std::min(s_.block_tokens, LANES) * s_.head_dim * sizeof(P);
        const char* at = reinterpret_cast<const char*>(keys);
        const char* values = reinterpret_cast<const char*>(keys + to_value_);
        for (long i = 0; i < bytes; i += 64) {
            __builtin_prefetch(at + i, 0, 2);
            __builtin_prefetch(values + i, 0, 2);
        }
    }

    // 16 rows of 64 values to one panel.
    void pack_values(const E* from, long stride, E* to) const {
        for (long k = 0; k < LANES; k += PAIR, to += PANEL * PAIR, from += PAIR * stride) {
            if constexpr (PAIR == 1) {
                std::memcpy(to, from, PANEL * sizeof(E));
            } else {
#if defined(__AVX512BF16__)
                const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7,
                                                     38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
                const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
                for (long d = 0; d < PANEL; d += 2 * LANES) {
                    const __m512i a = _mm512_loadu_si512(from + d), b = _mm512_loadu_si512(from + stride + d);
                    _mm512_storeu_si512(to + d * 2, _mm512_permutex2var_epi16(a, low, b));
                    _mm512_storeu_si512(to + d * 2 + 2 * LANES, _mm512_permutex2var_epi16(a, high, b));
                }
#endif
            }
        }
    }

    // One group of rows over the packed tile of keys that starts at position `first`.
    void attend(const AttentionItem& item, long r, int rows, long first) {
        const long visible = std::min(TILE_KEYS, position_of(item, r + rows - 1) + 1 - first);
        if (visible <= 0) return;
        const long span = round_up(visible, PANEL);
        for (long k = 0; k < span; k += PANEL)
            tile_of<E, PAIR>(
                rows, queries_ + r * depth_, depth_, keys_ + k * depth_, depth_, nullptr, 0,
                [](int, int) { return Vec{}; },
                [&](int i, const Vec* sums) {
                    for (long j = 0; j < VECTORS; j++) {
                        const Vec sum = QUANTISED ? sums[j] * load(key_scales_ + k + j * LANES) : sums[j];
                        store(scores_ + i * TILE_KEYS + k + j * LANES, bend(sum));
                    }
                });
        float fade[ROWS];
        for (int i = 0; i < rows; i++) fade[i] = soften(item, r + i, i, first, span);
        for (long d = 0; d < depth_; d += PANEL)
            tile_of<E, PAIR>(
                rows, weights_, TILE_KEYS, values_ + d * TILE_KEYS, span, nullptr, 0,
                [&](int i, int j) { return load(outputs_ + (r + i) * depth_ + d + j * LANES) * fade[i]; },
                [&](int i, const Vec* sums) {
                    for (long j = 0; j < VECTORS; j++)
                        store(outputs_ + (r + i) * depth_ + d + j * LANES, sums[j]);
                });
    }

    // Scores are kept as logarithms to base 2, whose exponential is cheaper.
    Vec bend(Vec score) const {
        constexpr float log2_e = 1.44269504f;
        if (s_.softcap > 0) return hyperbolic_tangent(score * (s_.scale / s_.softcap)) * (s_.softcap * log2_e);
        return score * (s_.scale * log2_e);
    }

    // Scores of row `i` of the group to weights, 2^(score - largest so far); returns what earlier outputs fade by.
    float soften(const AttentionItem& item, long row, int i, long first, long span) {
        float* scores = scores_ + i * TILE_KEYS;
        E* weights = weights_ + i * TILE_KEYS;
        const long own = position_of(item, row);
        const long end = std::clamp(own + 1 - first, 0L, span);
        const long begin = s_.window ? std::clamp(own + 1 - s_.window - first, 0L, end) : 0;
        std::fill(scores, scores + begin, -INFINITY);
        std::fill(scores + end, scores + span, -INFINITY);
        Vec most = splat(most_[row]);
        for (long k = 0; k < span; k += LANES) most = maximum(most, load(scores + k));
        const float now = largest(most);
        if (now == -INFINITY) {  // this row sees nothing up to here
            std::fill(weights, weights + span, narrow<E>(0.0f));
            return 1.0f;
        }
        Vec sums{};
        for (long k = 0; k < span; k += LANES) {
            const Vec weight = power_of_two<sizeof(E) == 4 ? 6 : 5>(load(scores + k) - now);
            sums += weight;
            store(weights + k, QUANTISED ? weight * load(value_scales_ + k) : weight);
        }
        const float fade = std::exp2(most_[row] - now);
        most_[row] = now;
        total_[row] = total_[row] * fade + sum(sums);
        return fade;
    }

    void write(const AttentionItem& item, long kv_head, long num_rows, T* out) const {
        for (long row = 0; row < num_rows; row++) {
            const float share = 1.0f / total_[row];
            const long head = kv_head * group_ + row % group_;
            T* to = out + ((item.token + row / group_) * s_.heads + head) * s_.head_dim;
            const float* from = outputs_ + row * depth_;
            long d = 0;
            for (; d + LANES <= s_.head_dim; d += LANES) store(to + d, load(from + d) * share);
            for (; d < s_.head_dim; d++) to[d] = narrow<T>(from[d] * share);
        }
    }

    const AttentionShape s_;
    const long group_, depth_, to_value_;
    float *memory_, *outputs_, *scores_, *most_, *total_, *key_scales_, *value_scales_;
    E *queries_, *keys_, *values_, *weights_, *rows_;
};

template <typename T, typename P>
void attention(const AttentionShape* shape, const T* query, const P* pool, const int32_t* tables,
               const AttentionItem* items, long num_items, long max_rows, T* out) {
#pragma omp parallel
    {
        Attention<T, P> worker(*shape, max_rows);
#pragma omp for schedule(dynamic)
        for (long i = 0; i < num_items * shape->kv_heads; i++)
            worker.run(items[i / shape->kv_heads], i % shape->kv_heads, query, pool, tables, out);
    }
}

// A vector into place `offset` of its row, as it is.
template <typename T>
inline void keep(const AttentionShape& s, const T* vector, T* row, long offset) {
    std::memcpy(row + offset * s.head_dim, vector, s.head_dim * sizeof(T));
}

// As int8 with a scale of its own, rounded up to bfloat16, or the largest element would be clipped.
template <typename T>
inline void keep(const AttentionShape& s, const T* vector, int8_t* row, long offset) {
    Vec sizes{};
    long d = 0;
    for (; d + LANES <= s.head_dim; d += LANES) sizes = maximum(sizes, maximum(load(vector + d), -load(vector + d)));
    float size = largest(sizes);
    for (; d < s.head_dim; d++) size = std::max(size, std::fabs(widen(vector[d])));
    const float exact = size / 127.0f;
    uint32_t bits;
    std::memcpy(&bits, &exact, 4);
    const bfloat16 scale{uint16_t((bits + 0xffffu) >> 16)};
    const float divisor = widen(scale) > 0 ? widen(scale) : 1.0f;
    int8_t* to = row + offset * s.head_dim;
    for (d = 0; d + LANES <= s.head_dim; d += LANES) store(to + d, load(vector + d) / divisor);
    for (; d < s.head_dim; d++) to[d] = int8_t(std::nearbyint(widen(vector[d]) / divisor));
    std::memcpy(row + s.block_tokens * s.head_dim + offset * sizeof scale, &scale, sizeof scale);
}

// keys and values [tokens, kv_heads, head_dim], strided, to their slots: slots[t] = block * block_tokens + offset.
template <typename T, typename P>
void write_kv(const AttentionShape& s, P* pool, const int64_t* slots, long tokens, const T* keys, long key_head_stride,
              long key_token_stride, const T* values, long value_head_stride, long value_token_stride) {
#pragma omp parallel for schedule(static) if (tokens > 64)
    for (long t = 0; t < tokens; t++)
        for (long head = 0; head < s.kv_heads; head++) {
            const long block = slots[t] / s.block_tokens, offset = slots[t] % s.block_tokens;
            P* row = pool + row_of<P>(s, block, head);
            keep(s, keys + t * key_token_stride + head * key_head_stride, row, offset);
            keep(s, values + t * value_token_stride + head * value_head_stride, row + row_elements<P>(s), offset);
        }
}

// ------------------------------------------------------------------------------------------------ between the layers

// weight * normalised, rounded between the two as transformers' Llama-like norms do.
template <typename T>
void rms_norm(const T* x, long rows, long n, const T* weight, float epsilon, T* out) {
#pragma omp parallel for schedule(static) if (rows > 16)
    for (long r = 0; r < rows; r++) {
        const T* from = x + r * n;
        T* to = out + r * n;
        Vec squares{};
        long i = 0;
        for (; i + LANES <= n; i += LANES) {
            const Vec value = load(from + i);
            squares += value * value;
        }
        float total = sum(squares);
        for (; i < n; i++) total += widen(from[i]) * widen(from[i]);
        const float scale = 1.0f / std::sqrt(total / n + epsilon);
        for (i = 0; i + LANES <= n; i += LANES) {
            store(to + i, load(from + i) * scale);
            store(to + i, load(to + i) * load(weight + i));
        }
        for (; i < n; i++) to[i] = narrow<T>(widen(narrow<T>(widen(from[i]) * scale)) * widen(weight[i]));
    }
}

// Rotate heads [tokens, heads, head_dim] (strided) in place: the halves of a head are the two parts of `head_dim / 2`
// complex numbers. cos and sin are [tokens, head_dim].
template <typename T>
void rotate(T* x, long heads, long head_stride, long token_stride, const T* cos, const T* sin, long tokens,
            long head_dim) {
    const long half = head_dim / 2;
#pragma omp parallel for schedule(static) if (tokens > 16)
    for (long t = 0; t < tokens; t++)
        for (long head = 0; head < heads; head++) {
            T *low = x + t * token_stride + head * head_stride, *high = low + half;
            const T *c = cos + t * head_dim, *s = sin + t * head_dim;
            long i = 0;
            for (; i + LANES <= half; i += LANES) {
                const Vec a = load(low + i), b = load(high + i);
                store(low + i, a * load(c + i) - b * load(s + i));
                store(high + i, b * load(c + half + i) + a * load(s + half + i));
            }
            for (; i < half; i++) {
                const float a = widen(low[i]), b = widen(high[i]);
                low[i] = narrow<T>(a * widen(c[i]) - b * widen(s[i]));
                high[i] = narrow<T>(b * widen(c[half + i]) + a * widen(s[half + i]));
            }
        }
}

// The index of each row's first largest element.
template <typename T>
void argmax(const T* x, long rows, long n, int64_t* out) {
#pragma omp parallel for schedule(static)
    for (long r = 0; r < rows; r++) {
        const T* from = x + r * n;
        Vec most = splat(-INFINITY);
        long i = 0;
        for (; i + LANES <= n; i += LANES) most = maximum(most, load(from + i));
        float best = largest(most);
        for (; i < n; i++) best = std::max(best, widen(from[i]));
        for (i = 0; i < n - 1 && !(widen(from[i]) >= best); i++) {
        }
        out[r] = i;
    }
}

}  // namespace

extern "C" {

// Thread i of the calling thread's team to cores[i]; a core that this process may not use is ignored.
void tandem_bind(const int* cores, int count) {
#if defined(__linux__)
#pragma omp parallel num_threads(count)
    {
        cpu_set_t own;
        CPU_ZERO(&own);
        CPU_SET(cores[omp_get_thread_num()], &own);
        sched_setaffinity(0, sizeof own, &own);
    }
#else
    (void)cores, (void)count;
#endif
}

// 2 when this library multiplies bfloat16 natively, with int8 weights too; 1 without those; 0: the linear functions do
// not exist.
int tandem_has_linear() {
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
    return 2;
#elif defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

#if defined(__AVX512BF16__)

// Bytes that `tandem_pack` writes.
long tandem_packed_bytes(long n, long k) { return panels(n) * even(k) * PANEL * 2 + 4096; }

// Weights [n, k] to panels, as column `shift + (c / group) * stride + c % group` for each row c: with group = n a
// plain matrix, with group 32 one half of a gated pair.
void tandem_pack(const bfloat16* weights, long n, long k, bfloat16* packed, long group, long stride, long shift) {
    const long panel_size = even(k) * PANEL;
#pragma omp parallel for schedule(static)
    for (long row = 0; row < n; row++) {
        const long column = shift + row / group * stride + row % group;
        bfloat16* to = packed + column / PANEL * panel_size + column % PANEL * 2;
        const bfloat16* from = weights + row * k;
        for (long i = 0; i < k; i++) to[i / 2 * PANEL * 2 + i % 2] = from[i];
    }
}

// out[m, n] = x[m, k] @ weights.T (+ bias). Strides are in elements.
void tandem_linear(const bfloat16* x, long x_stride, long m, const bfloat16* packed, long n, long k,
                   const bfloat16* bias, bfloat16* out, long out_stride) {
    multiply_packed(x, x_stride, m, PlainWeights{packed}, n, k, Plain{out, out_stride, bias, n});
}

// out[m, n] = silu(x @ gate.T) * (x @ up.T), both [n, k]; n must be a multiple of 32.
void tandem_gated(const bfloat16* x, long x_stride, long m, const bfloat16* packed, long n, long k, bfloat16* out,
                  long out_stride) {
    multiply_packed(x, x_stride, m, PlainWeights{packed}, 2 * n, k, Gated{out, out_stride});
}

// out[count, k] = rows `ids` of packed weights [n, k]: an embedding that shares the output layer's memory.
void tandem_embed(const int64_t* ids, long count, const bfloat16* packed, long k, bfloat16* out) {
    const long panel_size = even(k) * PANEL;
#pragma omp parallel for schedule(static)
    for (long t = 0; t < count; t++) {
        const bfloat16* from = packed + ids[t] / PANEL * panel_size + ids[t] % PANEL * 2;
        for (long i = 0; i < k; i++) out[t * k + i] = from[i / 2 * PANEL * 2 + i % 2];
    }
}

#endif

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)

// Bytes that `tandem_pack_int8` writes.
long tandem_packed_bytes_int8(long n, long k) { return panels(n) * even(k) * PANEL + 4096; }

// As `tandem_pack`, of values from -127 to 127.
void tandem_pack_int8(const int8_t* weights, long n, long k, uint8_t* packed, long group, long stride, long shift) {
    const long panel_size = even(k) * PANEL;
#pragma omp parallel for schedule(static)
    for (long row = 0; row < n; row++) {
        const long column = shift + row / group * stride + row % group, within = column % PANEL;
        uint8_t* to = packed + column / PANEL * panel_size + within / 32 * 64 + within % 32 / LANES * 8;
        const int8_t* from = weights + row * k;
        for (long i = 0; i < k; i++) {
            const long element = within % LANES * 2 + i % 2;
            to[i / 2 * PANEL * 2 + element / 8 * 16 + element % 8] = from[i] < 0 ? 0x80 | -from[i] : from[i];
        }
    }
}

// As `tandem_linear`; column c of the packed weights is multiplied by scales[c].
void tandem_linear_int8(const bfloat16* x, long x_stride, long m, const uint8_t* packed, const float* scales, long n,
                        long k, const bfloat16* bias, bfloat16* out, long out_stride) {
    multiply_packed(x, x_stride, m, ByteWeights{packed}, n, k,
                    Scaled<Plain>{Plain{out, out_stride, bias, n}, scales});
}

// Bytes that `tandem_pack_int4` writes; they must be zero before. `k` is a multiple of the group.
long tandem_packed_bytes_int4(long n, long k) { return panels(n) * k * NibbleWeights::STEP + 4096; }

// As `tandem_pack`, of values from -8 to 7 and scales [n, k / GROUP].
void tandem_pack_int4(const int8_t* weights, const bfloat16* scales, long n, long k, uint8_t* packed, long group,
                      long stride, long shift) {
    const long panel_size = k * NibbleWeights::STEP, group_size = GROUP * NibbleWeights::STEP;
#pragma omp parallel for schedule(static)
    for (long first = 0; first < n; first += PANEL)  // two rows share bytes, but of the same 64 only
        for (long row = first; row < std::min(n, first + PANEL); row++) {
            const long column = shift + row / group * stride + row % group, within = column % PANEL;
            uint8_t* to = packed + column / PANEL * panel_size;
            for (long g = 0; g < k / GROUP; g++, to += group_size) {
                reinterpret_cast<bfloat16*>(to)[within] = scales[row * (k / GROUP) + g];
                uint8_t* bytes = to + NibbleWeights::SCALES + within % 32 / LANES * 8;
                for (long i = 0; i < GROUP; i++) {
                    const long element = within % LANES * 2 + i % 2;
                    const uint8_t nibble = uint8_t(weights[row * k + g * GROUP + i] + 8);
                    bytes[i / 2 * PANEL + element / 8 * 16 + element % 8] |= within < 32 ? nibble : nibble << 4;
                }
            }
        }
}

void tandem_linear_int4(const bfloat16* x, long x_stride, long m, const uint8_t* packed, long n, long k,
                        const bfloat16* bias, bfloat16* out, long out_stride) {
    multiply_packed(x, x_stride, m, NibbleWeights{packed}, n, k, Plain{out, out_stride, bias, n});
}

void tandem_gated_int4(const bfloat16* x, long x_stride, long m, const uint8_t* packed, long n, long k, bfloat16* out,
                       long out_stride) {
    multiply_packed(x, x_stride, m, NibbleWeights{packed}, 2 * n, k, Gated{out, out_stride});
}

void tandem_gated_int8(const bfloat16* x, long x_stride, long m, const uint8_t* packed, const float* scales, long n,
                       long k, bfloat16* out, long out_stride) {
    multiply_packed(x, x_stride, m, ByteWeights{packed}, 2 * n, k, Scaled<Gated>{Gated{out, out_stride}, scales});
}

#endif

// Of a computed type T and a kept one P.
#define TANDEM_FOR_KV(T, P, name)                                                                                      \
    void tandem_attention_##name(const AttentionShape* shape, const T* query, const P* pool, const int32_t* tables,    \
                                 const AttentionItem* items, long num_items, long max_rows, T* out) {                  \
        attention(shape, query, pool, tables, items, num_items, max_rows, out);                                        \
    }                                                                                                                  \
    void tandem_write_kv_##name(const AttentionShape* shape, P* pool, const int64_t* slots, long tokens,               \
                                const T* keys, long key_head_stride, long key_token_stride, const T* values,           \
                                long value_head_stride, long value_token_stride) {                                     \
        write_kv(*shape, pool, slots, tokens, keys, key_head_stride, key_token_stride, values, value_head_stride,      \
                 value_token_stride);                                                                                  \
    }

#define TANDEM_FOR_TYPE(T, name)                                                                                       \
    TANDEM_FOR_KV(T, T, name)                                                                                          \
    TANDEM_FOR_KV(T, int8_t, name##_int8)                                                                              \
    void tandem_rms_norm_##name(const T* x, long rows, long n, const T* weight, float epsilon, T* out) {               \
        rms_norm(x, rows, n, weight, epsilon, out);                                                                    \
    }                                                                                                                  \
    void tandem_rotate_##name(T* x, long heads, long head_stride, long token_stride, const T* cos, const T* sin,       \
                              long tokens, long head_dim) {                                                            \
        rotate(x, heads, head_stride, token_stride, cos, sin, tokens, head_dim);                                       \
    }                                                                                                                  \
    void tandem_argmax_##name(const T* x, long rows, long n, int64_t* out) { argmax(x, rows, n, out); }

TANDEM_FOR_TYPE(float, float32)
TANDEM_FOR_TYPE(bfloat16, bfloat16)
}
