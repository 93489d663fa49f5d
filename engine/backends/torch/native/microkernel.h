// Up to ROWS rows of A, as they lie in memory, times one panel of B: what linear layers and attention are built on.
//
// A panel holds 64 columns of B, reduction index by reduction index, so that it is read front to back exactly once:
//
//     float32    [K][64]
//     bfloat16   [K / 2][64][2]      what one dot-product instruction (vdpbf16ps) takes
//
// Where few registers are, a panel in float32 is four strips of 16 columns, one after the other: [4][K][16].
//
// Products are accumulated in float32. Where the CPU does not multiply bfloat16 itself, it is widened when panels are
// packed.

#pragma once

#include "vectors.h"

namespace {

constexpr long PANEL = 64;
constexpr long VECTORS = PANEL / LANES;
constexpr int ROWS = 6;
#if defined(__AVX512F__)
constexpr long STRIP = PANEL;
#else
constexpr long STRIP = 16;  // columns whose sums of ROWS rows fit the registers
#endif

// Sums live in registers only where the loops are part of their caller; left to judge by size, GCC gives that up in a
// large file, and everything takes twice as long.
#define ALWAYS_INLINE inline __attribute__((always_inline))

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

template <typename B>
inline Vec multiply_add(Vec acc, const float* a, const B* b) {
    return acc + splat(*a) * load(b);
}
#if defined(__AVX512BF16__)
inline Vec multiply_add(Vec acc, const bfloat16* a, const bfloat16* b) {
    int32_t two;
    std::memcpy(&two, a, 4);
    return (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(two), (__m512bh)_mm512_loadu_si512(b));
}
#endif

#if defined(__AVX512F__)

// acc[rows][PANEL] (+)= a[rows][depth] x panel. `ahead`: memory that will be read soon; a line of it is fetched with
// each of the first `lines` steps, or two while there are more lines than steps: then MORE is set.
template <typename E, long PAIR, int M, bool MORE, typename B>
ALWAYS_INLINE void multiply(const E* a, long stride, const B* panel, long depth, Vec acc[][VECTORS], const char* ahead,
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

// The tile's epilogue decides where sums start and where they go. 6 x 4 accumulators, 4 vectors of B and one of A are 29
// of 32 registers.
template <typename E, long PAIR, int M, typename B, typename Begin, typename End>
ALWAYS_INLINE void tile(const E* a, long stride, const B* panel, long depth, const char* ahead, long lines, Begin begin,
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

#else

// sums[M] (+)= a[M][depth] x strip, which holds STRIP columns. A line of `ahead`, memory that will be read soon, is
// fetched with each of the first `lines` steps.
template <int M, bool ADDS>
ALWAYS_INLINE void multiply_strip(const float* a, long stride, const float* strip, long depth, float* sums,
                                  long sums_stride, const char* ahead = nullptr, long lines = 0) {
    constexpr int REGISTERS = STRIP / REGISTER_LANES;
    Register acc[M][REGISTERS];
#pragma GCC unroll 6
    for (int i = 0; i < M; i++)
#pragma GCC unroll 4
        for (int j = 0; j < REGISTERS; j++)
            acc[i][j] = ADDS ? widened(sums + i * sums_stride + j * REGISTER_LANES) : Register{};
    const float* later = a + 3 * stride;
    for (long k = 0; k < depth; k++, strip += STRIP) {
        if (k < lines) __builtin_prefetch(ahead + k * 64, 0, 2);
        Register columns[REGISTERS];
#pragma GCC unroll 4
        for (int j = 0; j < REGISTERS; j++) columns[j] = widened(strip + j * REGISTER_LANES);
#pragma GCC unroll 6
        for (int i = 0; i < M; i++) {
            const Register row = everywhere(i < 3 ? a[i * stride + k] : later[(i - 3) * stride + k]);
#pragma GCC unroll 4
            for (int j = 0; j < REGISTERS; j++) acc[i][j] += row * columns[j];
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < M; i++)
#pragma GCC unroll 4
        for (int j = 0; j < REGISTERS; j++) keep(sums + i * sums_stride + j * REGISTER_LANES, acc[i][j]);
}

// The tile's epilogue decides where sums start and where they go. Registers hold the sums of some of the panel's columns
// at a time: of enough of them that no sum waits for the one before it, and of so few that other registers are left. A
// panel of another type than A's is widened as it is read, which is worth it where few rows share it.
template <typename E, long PAIR, int M, typename B, typename Begin, typename End>
ALWAYS_INLINE void tile(const E* a, long stride, const B* panel, long depth, const char*, long, Begin begin, End end) {
    static_assert(PAIR == 1);
    constexpr int COLUMNS = M == 1 ? 64 : M <= 3 ? 32 : 16, REGISTERS = COLUMNS / REGISTER_LANES;
    alignas(64) float all[M][PANEL];
    for (int c = 0; c < PANEL; c += COLUMNS) {
        for (int i = 0; i < M; i++)
            for (int j = 0; j < COLUMNS / LANES; j++) store(&all[i][c + j * LANES], begin(i, c / LANES + j));
        Register acc[M][REGISTERS];
#pragma GCC unroll 6
        for (int i = 0; i < M; i++)
#pragma GCC unroll 16
            for (int j = 0; j < REGISTERS; j++)
                acc[i][j] = *reinterpret_cast<const Register*>(&all[i][c + j * REGISTER_LANES]);
        const B* b = panel + c;
        for (long k = 0; k < depth; k++, b += PANEL) {
            Register columns[REGISTERS];
#pragma GCC unroll 16
            for (int j = 0; j < REGISTERS; j++)
                columns[j] = widened(b + j * REGISTER_LANES);
#pragma GCC unroll 6
            for (int i = 0; i < M; i++) {
                const Register row = everywhere(a[i * stride + k]);
#pragma GCC unroll 16
                for (int j = 0; j < REGISTERS; j++) acc[i][j] += row * columns[j];
            }
        }
#pragma GCC unroll 6
        for (int i = 0; i < M; i++)
#pragma GCC unroll 16
            for (int j = 0; j < REGISTERS; j++)
                *reinterpret_cast<Register*>(&all[i][c + j * REGISTER_LANES]) = acc[i][j];
    }
    for (int i = 0; i < M; i++) {
        Vec sums[VECTORS];
        for (int j = 0; j < VECTORS; j++) sums[j] = load(&all[i][j * LANES]);
        end(i, sums);
    }
}

#endif

// Calls body.template operator()<rows>().
template <typename Body>
inline void with_rows(int rows, Body body) {
    switch (rows) {
        case 1: return body.template operator()<1>();
        case 2: return body.template operator()<2>();
        case 3: return body.template operator()<3>();
        case 4: return body.template operator()<4>();
        case 5: return body.template operator()<5>();
        case 6: return body.template operator()<6>();
    }
}

template <typename E, long PAIR, typename B, typename Begin, typename End>
inline void tile_of(int rows, const E* a, long stride, const B* panel, long depth, const char* ahead, long lines,
                    Begin begin, End end) {
    with_rows(rows, [&]<int M>() { tile<E, PAIR, M>(a, stride, panel, depth, ahead, lines, begin, end); });
}

// Calls body(first, count, group, groups) for groups of at most ROWS rows, as even as they can be.
template <typename Body>
inline void for_row_groups(long rows, Body body) {
    const long groups = (rows + ROWS - 1) / ROWS;
    for (long g = 0; g < groups; g++) {
        const long first = rows * g / groups;
        body(first, int(rows * (g + 1) / groups - first), g, groups);
    }
}

#if !defined(__AVX512F__)

// sums[rows][PANEL] += a[rows][depth] x the panel whose strips begin `strip_stride` apart. A strip stays in the L1 cache
// while all rows pass it.
inline void multiply_strips(const float* a, long stride, long rows, const float* strips, long strip_stride, long depth,
                            float* sums, const char* ahead, long lines) {
    for (long s = 0; s < PANEL / STRIP; s++)
        for_row_groups(rows, [&](long r, int count, long group, long groups) {
            const long parts = groups * (PANEL / STRIP), part = s * groups + group;
            const long line = lines * part / parts, fetched = lines * (part + 1) / parts - line;
            with_rows(count, [&]<int M>() {
                multiply_strip<M, true>(a + r * stride, stride, strips + s * strip_stride, depth,
                                        sums + r * PANEL + s * STRIP, PANEL, ahead + line * 64, fetched);
            });
        });
}

#endif

}  // namespace
