// Linear layers over packed weights in bfloat16: where units of work go, and what becomes of their sums.
//
// Factors are bfloat16 where the CPU multiplies these, and float32 elsewhere: then a slice of a panel is widened once for
// many rows, and as it is read for few.

#pragma once

#include <type_traits>
#include <vector>

#include <omp.h>

#include "deal.h"
#include "microkernel.h"

namespace {

typedef Operand<bfloat16>::Element Factor;
constexpr long PAIR = Operand<bfloat16>::PAIR;
constexpr bool WIDENS = sizeof(Factor) == 4;
constexpr long DEPTH = 1024;     // of a unit of work: 128 KiB of weights, so that it and the next fit the L2 cache
constexpr long WIDE_DEPTH = 256; // of a slice in float32: 64 KiB
constexpr long BLOCK_ROWS = 256; // rows of A that one unit is used for before the next is read

inline long panels(long n) { return (n + PANEL - 1) / PANEL; }
inline long paired(long k) { return (k + PAIR - 1) / PAIR * PAIR; }
// Where element i of a column is among those of its panel, the column's first one being at 0.
inline long place(long i) { return i / PAIR * PANEL * PAIR + i % PAIR; }

// Rows of A as factors: themselves, or a copy that lasts until the calling thread makes the next one.
inline const Factor* factors_of(const bfloat16* x, long& stride, long m, long k) {
    if constexpr (!WIDENS) {
        return reinterpret_cast<const Factor*>(x);
    } else {
        static thread_local std::vector<float> wide;
        if (long(wide.size()) < m * k) wide.resize(m * k);
        float* to = wide.data();
        const long from_stride = stride;
#pragma omp parallel for schedule(static) if (m > 16)
        for (long row = 0; row < m; row++) {
            const bfloat16* from = x + row * from_stride;
            long i = 0;
            for (; i + REGISTER_LANES <= k; i += REGISTER_LANES) keep(to + row * k + i, widened(from + i));
            for (; i < k; i++) to[row * k + i] = widen(from[i]);
        }
        stride = k;
        return reinterpret_cast<const Factor*>(to);
    }
}

// Columns [c, c + REGISTER_LANES) of a panel's sums.
inline Register part_of(const Vec* sums, long c) {
#if defined(__AVX512F__)
    return sums[c / LANES];
#else
    return widened(reinterpret_cast<const float*>(sums) + c);
#endif
}

// Where a panel's 64 sums go, or what they are added to once they are rounded. Columns beyond `n` are not written.
struct Plain {
    bfloat16* out;
    long stride;
    const bfloat16* bias;
    long n;
    bool adds;

    void operator()(long row, long panel, const Vec* sums) const {
        const long first = panel * PANEL;
        bfloat16* to = out + row * stride + first;
        if (first + PANEL <= n) {
            for (long c = 0; c < PANEL; c += REGISTER_LANES) {
                const Register sum = bias ? part_of(sums, c) + widened(bias + first + c) : part_of(sums, c);
                store(to + c, adds ? widened(to + c) + rounded<bfloat16>(sum) : sum);
            }
            return;
        }
        alignas(64) float all[PANEL];
        for (long j = 0; j < VECTORS; j++) store(all + j * LANES, sums[j]);
        for (long c = 0; first + c < n; c++) {
            const bfloat16 sum = narrow<bfloat16>(bias ? all[c] + widen(bias[first + c]) : all[c]);
            to[c] = adds ? narrow<bfloat16>(widen(to[c]) + widen(sum)) : sum;
        }
    }
};

// A panel holds 32 columns of the gate and the same 32 of the up projection: silu(gate) * up, 32 columns a panel.
struct Gated {
    bfloat16* out;
    long stride;

    void operator()(long row, long panel, const Vec* sums) const {
        bfloat16* to = out + row * stride + panel * (PANEL / 2);
        for (long c = 0; c < PANEL / 2; c += REGISTER_LANES) {
            const Register gate = part_of(sums, c);
            const Register falling = power_of_two<4>(minimum(gate * -1.44269504f, everywhere(126.0f)));  // e^-gate
            store(to + c, gate / (1.0f + falling) * part_of(sums, c + PANEL / 2));
        }
    }
};

// A slice in float32: each strip of columns by itself, reduction index by reduction index.
struct WideRoom {
    alignas(64) float panel[WIDE_DEPTH * PANEL];

    float* at(long k, long column) { return panel + column / STRIP * WIDE_DEPTH * STRIP + k * STRIP + column % STRIP; }

    const float* open(const bfloat16* from, long depth) {
        for (long k = 0; k < depth; k++, from += PANEL)
#pragma GCC unroll 16
            for (long c = 0; c < PANEL; c += REGISTER_LANES) keep(at(k, c), widened(from + c));
        return panel;
    }
};

// A slice that is factors as it is.
struct NoRoom {
    const bfloat16* open(const bfloat16* slice, long) { return slice; }
};

template <typename Write>
void multiply_packed(const bfloat16* x, long x_stride, long m, const bfloat16* packed, long n, long k, Write write) {
    const Factor* rows_of_x = factors_of(x, x_stride, m, k);
    const long num_panels = panels(n), panel_size = paired(k) * PANEL;
    const long blocks = (m + BLOCK_ROWS - 1) / BLOCK_ROWS, units = blocks * num_panels;
    const int threads = omp_get_max_threads();
    Deal deal(units, threads);
#pragma omp parallel num_threads(threads)
    {
        alignas(64) float partial[BLOCK_ROWS * PANEL];
        std::conditional_t<WIDENS, WideRoom, NoRoom> room;
        for (long unit; (unit = deal.take(omp_get_thread_num())) >= 0;) {
            const long block = unit / num_panels, panel = unit % num_panels;
            const long row0 = m * block / blocks, rows = m * (block + 1) / blocks - row0;
            const long most = WIDENS && rows > ROWS ? WIDE_DEPTH : DEPTH;
            for (long k0 = 0; k0 < k; k0 += most) {
                const long depth = std::min(most, k - k0);
                const bfloat16* slice = packed + panel * panel_size + k0 * PANEL;
                const bool first = k0 == 0, last = k0 + depth == k;
                const char* next = reinterpret_cast<const char*>(slice + paired(depth) * PANEL);
                const long next_lines = std::min(most, last ? k : k - k0 - depth) * PANEL * sizeof(bfloat16) / 64;
                const auto begin = [&](long row, int j) {
                    return first ? Vec{} : load(partial + row * PANEL + j * LANES);
                };
                const auto end = [&](long row, const Vec* sums) {
                    if (last) return write(row0 + row, panel, sums);
                    for (long j = 0; j < VECTORS; j++) store(partial + row * PANEL + j * LANES, sums[j]);
                };
                if constexpr (WIDENS) {
                    if (rows <= ROWS) {
                        const Factor* a = rows_of_x + row0 * x_stride + k0;
                        tile_of<Factor, PAIR>(rows, a, x_stride, slice, depth, nullptr, 0, begin, end);
                        continue;
                    }
                }
                const Factor* opened = room.open(slice, paired(depth));
#if !defined(__AVX512F__)
                const float* a = rows_of_x + row0 * x_stride + k0;
                if (first) std::fill(partial, partial + rows * PANEL, 0.0f);
                multiply_strips(a, x_stride, rows, opened, WIDE_DEPTH * STRIP, depth, partial, next, next_lines);
                for (long r = 0; last && r < rows; r++) {
                    Vec sums[VECTORS];
                    for (long j = 0; j < VECTORS; j++) sums[j] = load(partial + r * PANEL + j * LANES);
                    write(row0 + r, panel, sums);
                }
#else
                for_row_groups(rows, [&](long r, int count, long group, long groups) {
                    const Factor* a = rows_of_x + (row0 + r) * x_stride + k0;
                    const long line = next_lines * group / groups, lines = next_lines * (group + 1) / groups - line;
                    const long fetched = groups == 1 ? 0 : lines;
                    const auto begin_at = [&](int i, int j) { return begin(r + i, j); };
                    const auto end_at = [&](int i, const Vec* sums) { end(r + i, sums); };
                    tile_of<Factor, PAIR>(count, a, x_stride, opened, depth, next + line * 64, fetched, begin_at,
                                          end_at);
                });
#endif
            }
        }
    }
}

}  // namespace
