// Linear layers over int8 weights with a scale for each column, or int4 with one for each column and GROUP of the
// reduction. They become factors, exactly, where they are used.

// Making bfloat16 of bytes takes VBMI. A CPU without it makes float32 of them, as if it did not multiply bfloat16.
#if !defined(__AVX512VBMI__)
#undef __AVX512BF16__
#endif

#include "linear.h"

namespace {

constexpr long GROUP = 32;  // of the reduction, that shares a scale of int4 weights

#if defined(__AVX512BF16__)

constexpr long BYTES_AHEAD = 2048;  // fetched before they are converted

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
    static constexpr bool GROUPED = false, FEW_ROWS = true;
    const uint8_t* packed;
    struct Room {
        alignas(64) bfloat16 panel[OPENED * PANEL];
    };

    // Sign and magnitude of a value, and where it lies in its panel, as BytesToBfloat16 takes them.
    static uint8_t kept(int8_t value) { return value < 0 ? 0x80 | -value : value; }
    static long place(long i, long column) {
        const long element = column % LANES * 2 + i % 2;
        return i / 2 * PANEL * 2 + column / 32 * 64 + column % 32 / LANES * 8 + element / 8 * 16 + element % 8;
    }

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

// A pair of the reduction: two elements of each row of A times a panel's row, which is in registers.
template <int M>
ALWAYS_INLINE void add_products(Vec acc[][VECTORS], const bfloat16* a, long stride, const __m512i* b) {
#pragma GCC unroll 6
    for (int i = 0; i < M; i++) {
        int32_t two;
        std::memcpy(&two, a + i * stride, 4);
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; j++)
            acc[i][j] = (Vec)_mm512_dpbf16_ps((__m512)acc[i][j], (__m512bh)_mm512_set1_epi32(two), (__m512bh)b[j]);
    }
}

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
        add_products<M>(acc, a + k, stride, b);
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
    static constexpr bool GROUPED = true, FEW_ROWS = true;
    const uint8_t* packed;
    struct Room {
        alignas(64) bfloat16 panel[OPENED * PANEL];
    };

    // Where the byte lies in its group that has a value of column 0 to 31, as NibblesToBfloat16 takes it.
    static long place(long i, long column) {
        const long element = column % LANES * 2 + i % 2;
        return i / 2 * PANEL + column / LANES * 8 + element / 8 * 16 + element % 8;
    }

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
            add_products<M>(acc, a + k, stride, b);
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

#else

// Columns side by side, one element of the reduction after the other.
struct ByteWeights {
    static constexpr long OPENED = WIDE_DEPTH, FEW = DEPTH, STEP = PANEL;
    static constexpr bool GROUPED = false, FEW_ROWS = true;
    const uint8_t* packed;
    typedef WideRoom Room;

    static uint8_t kept(int8_t value) { return uint8_t(value); }
    static long place(long i, long column) { return i * PANEL + column; }

    const float* open(const uint8_t* slice, long depth, Room& room) const {
        room.widen_all(reinterpret_cast<const int8_t*>(slice), depth);
        return room.panel;
    }
};

template <typename Begin, typename End>
inline void few_rows_of(ByteWeights, int rows, const float* a, long stride, const uint8_t* panel, long depth, Begin begin,
                        End end) {
    tile_of<float, 1>(rows, a, stride, reinterpret_cast<const int8_t*>(panel), depth, nullptr, 0, begin, end);
}

// Each group of a panel: its 64 scales in bfloat16, then 32 bytes for each element of the reduction, with a value of
// columns 0 to 31 in the low half and one of columns 32 to 63 in the high half. A value times its scale is exact.
struct NibbleWeights {
    static constexpr long OPENED = WIDE_DEPTH, FEW = OPENED, SCALES = PANEL * 2;
    static constexpr long STEP = PANEL / 2 + SCALES / GROUP;
    static constexpr bool GROUPED = false, FEW_ROWS = false;
    const uint8_t* packed;
    typedef WideRoom Room;

    static long place(long i, long column) { return i * 32 + column; }

    const float* open(const uint8_t* slice, long depth, Room& room) const {
        for (long k0 = 0; k0 < depth; k0 += GROUP) {
            const uint8_t* group = slice + k0 * STEP;
            const bfloat16* scales = reinterpret_cast<const bfloat16*>(group);
            for (long k = 0; k < GROUP; k++)
                for (long j = 0; j < 2; j++) {
                    ByteVec bytes;
                    std::memcpy(&bytes, group + SCALES + k * 32 + j * LANES, LANES);
                    const ByteVec low = bytes & 15, high = (bytes >> 4) & 15;
                    const Vec first = __builtin_convertvector(low - 8, Vec), second = __builtin_convertvector(high - 8, Vec);
                    store(room.at(k0 + k, j * LANES), first * load(scales + j * LANES));
                    store(room.at(k0 + k, (j + 2) * LANES), second * load(scales + (j + 2) * LANES));
                }
        }
        return room.panel;
    }
};

#endif

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

}  // namespace

extern "C" {

// Bytes that `tandem_pack_int8` writes.
long tandem_packed_bytes_int8(long n, long k) { return panels(n) * paired(k) * PANEL + 4096; }

// As `tandem_pack`, of values from -127 to 127.
void tandem_pack_int8(const int8_t* weights, long n, long k, uint8_t* packed, long group, long stride, long shift) {
    const long panel_size = paired(k) * PANEL;
#pragma omp parallel for schedule(static)
    for (long row = 0; row < n; row++) {
        const long column = shift + row / group * stride + row % group;
        uint8_t* to = packed + column / PANEL * panel_size;
        const int8_t* from = weights + row * k;
        for (long i = 0; i < k; i++) to[ByteWeights::place(i, column % PANEL)] = ByteWeights::kept(from[i]);
    }
}

// As `tandem_linear`; column c of the packed weights is multiplied by scales[c].
void tandem_linear_int8(const bfloat16* x, long x_stride, long m, const uint8_t* packed, const float* scales, long n,
                        long k, const bfloat16* bias, bfloat16* out, long out_stride, bool adds) {
    multiply_packed(x, x_stride, m, ByteWeights{packed}, n, k,
                    Scaled<Plain>{Plain{out, out_stride, bias, n, adds}, scales});
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
                uint8_t* bytes = to + NibbleWeights::SCALES;
                for (long i = 0; i < GROUP; i++) {
                    const uint8_t nibble = uint8_t(weights[row * k + g * GROUP + i] + 8);
                    bytes[NibbleWeights::place(i, within % 32)] |= within < 32 ? nibble : nibble << 4;
                }
            }
        }
}

void tandem_linear_int4(const bfloat16* x, long x_stride, long m, const uint8_t* packed, long n, long k,
                        const bfloat16* bias, bfloat16* out, long out_stride, bool adds) {
    multiply_packed(x, x_stride, m, NibbleWeights{packed}, n, k, Plain{out, out_stride, bias, n, adds});
}

void tandem_gated_int4(const bfloat16* x, long x_stride, long m, const uint8_t* packed, long n, long k, bfloat16* out,
                       long out_stride) {
    multiply_packed(x, x_stride, m, NibbleWeights{packed}, 2 * n, k, Gated{out, out_stride});
}

void tandem_gated_int8(const bfloat16* x, long x_stride, long m, const uint8_t* packed, const float* scales, long n,
                       long k, bfloat16* out, long out_stride) {
    multiply_packed(x, x_stride, m, ByteWeights{packed}, 2 * n, k, Scaled<Gated>{Gated{out, out_stride}, scales});
}
}
